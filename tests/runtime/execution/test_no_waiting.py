"""Tests that no step reads a tensor's value. On a GPU, reading would wait for all enqueued work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import reference_lengths
import torch
from whole_models import model_of

from megatrain.runtime.execution.lanes import LaneGroup, OpFailed
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer.adamw import AdamW
from megatrain.simulator import policies
from megatrain.simulator.schedule.plan import Placement, Plan

READS = ("item", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__")


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reading a tensor's value an error in all threads while lanes run."""
    play = LaneGroup.play

    def refuse(name: str) -> Callable[..., Any]:
        def read(*_: object, **__: object) -> Any:
            raise AssertionError(f"Tensor.{name} inside a step")

        return read

    def watched(crew: LaneGroup, queues: Any) -> None:
        with monkeypatch.context() as patch:
            for name in READS:
                patch.setattr(torch.Tensor, name, refuse(name), raising=False)
            play(crew, queues)

    monkeypatch.setattr(LaneGroup, "play", watched)


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize("kernels", ["fused", "eager"])
@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        *((policy, {"accumulation": 2, "tied": True}) for policy in policies.names()),
        (
            "overlapped",
            {
                "clipping": "none",
                "placement": Placement(moments="0-1", saved_activations="2", offloaded_inputs="0"),
            },
        ),
        ("k_buffer", {"clipping": "none", "dtype": "fp32", "family": "qwen2"}),
        ("overlapped", {"clipping": "layer", "optimizer": "muon"}),
        ("overlapped", {"clipping": "layer", "optimizer": "muon", "state": "master24"}),
        ("overlapped", {"clipping": "adagc"}),
        ("overlapped", {"gradients": "8bit"}),
    ],
)
def test_no_op_reads_a_value(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    changes: dict[str, Any],
    kernels: str,
) -> None:
    monkeypatch.setenv("MEGATRAIN_KERNELS", kernels)
    slots = (
        {}
        if "placement" in changes or policy in ("resident", "overlapped")
        else {"gradient_staging": 2}
    )
    with session(executable(policy, **slots, **changes)) as running:
        for number in (1, 2, 3):
            running.step(number)
        running.executor.flush_update()


@pytest.mark.usefixtures("no_reads")
def test_no_layer_of_gemma_3n_reads_a_value(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' own code reads the range of a tensor in each sparse MLP.

    PyTorch checks this range only until the process first compiles a function.
    """
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)
    with run(model_of("gemma3n_text")) as running:
        running.step()


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "deepseek_v3"])
def test_attention_with_document_lengths_does_not_wait(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
) -> None:
    reference_lengths.install(monkeypatch)
    model = model_of(family)
    with session(
        executable(
            "resident",
            model=model,
            documents=True,
            accumulation=2,
            device_limit_bytes=2**30,
            host_limit_bytes=2**30,
        )
    ) as running:
        for number in (1, 2):
            numbered = [
                batch._replace(documents=torch.arange(16).expand(2, -1) // (4 * number))
                for batch in running.batches(number)
            ]
            running.executor.step(numbered, rate=1e-2, number=number)


def _read(name: str) -> None:
    getattr(torch.ones(1), name)()


@pytest.mark.usefixtures("no_reads")
@pytest.mark.parametrize("name", READS)
def test_an_op_that_reads_a_value_is_found(
    executable: Callable[..., Plan], session: Callable[..., Any], name: str
) -> None:
    with session(executable()) as running:
        running.tasks["N0"].run = functools.partial(_read, name)
        with pytest.raises(
            OpFailed, match=rf"^N0 on lane cpu: AssertionError: Tensor.{name} inside a step"
        ):
            running.step()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_without_kernels_a_nan_coefficient_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """An update with a coefficient of NaN changes no bit.

    This holds for negative zeros and infinite gradients. The update has several blocks, the last of
    which is short, and the copy gets the old weights.
    """
    monkeypatch.setattr(optimizer, "kernels", lambda _: None)
    monkeypatch.setattr(optimizer.Workers, "cpu_block", 64)
    torch.manual_seed(0)
    weights, low = (
        torch.randn(150).to(dtype),
        (
            torch.randint(-(2**15), 2**15, (150,), dtype=torch.int16)
            if dtype == torch.bfloat16
            else None
        ),
    )
    weights[:20], moments = -0.0, torch.stack([torch.randn(150), torch.rand(150)])
    moments[0, :30] = -0.0
    gradient = torch.full((150,), float("inf"))
    state = [tensor for tensor in (weights, low, moments) if tensor is not None]
    before, copy = [tensor.clone() for tensor in state], torch.zeros_like(weights)
    clip = torch.tensor(float("nan"))
    optimizer.update(
        weights,
        low,
        moments,
        gradient,
        settings=AdamW(weight_decay=0.1),
        rate=1e-2,
        number=3,
        clip=clip,
        copy_to=copy,
    )
    for tensor, old in zip([*state, copy], [*before, before[0]], strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))
    optimizer.update(
        weights,
        low,
        moments,
        gradient.clamp(max=1.0),
        settings=AdamW(),
        rate=1e-2,
        number=3,
        clip=torch.tensor(0.5),
    )
    assert not any(torch.equal(tensor, old) for tensor, old in zip(state, before, strict=True))
