"""Tests of attention that is computed in groups of heads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import reference_lengths
import torch
from whole_models import PACKED, SEQUENCE, drawn, gradients_of, model_of

from megatrain.runtime.layers import attention, lengths
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.families import CAN_SAVE_ATTENTION
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Placement, Plan

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16}
WHOLE = {"sliding_window": 0, "use_sliding_window": False}
NORMAL = [
    ("llama", "fp32", "mask"),
    ("llama", "bf16", "lengths"),
    ("mistral", "bf16", ""),
    ("mistral", "fp32", "lengths"),
    ("qwen2", "bf16", "mask"),
    ("qwen3", "fp32", ""),
]
KEPT = Placement(saved_attention="1-2", saved_activations="3", weights="all", gradients="all")


def trained(run: Callable[..., Any], family: str, **changes: Any) -> tuple[float, Any]:
    """Returns the loss and the gradients of a step."""
    with run(model_of(family, **HEADS, **WHOLE), accumulation=2, **changes) as running:
        batches = drawn(running.plan)
        if running.plan.workload.documents:
            batches = [batch._replace(documents=PACKED) for batch in batches]
        result = running.executor.step(batches, rate=0.0, number=1)
        return result.loss, gradients_of(running)


@pytest.mark.parametrize(
    ("family", "dtype", "documents"),
    [
        pytest.param(*case, marks=[] if case in NORMAL else [pytest.mark.nightly])
        for case in itertools.product(CAN_SAVE_ATTENTION, ("fp32", "bf16"), ("", "mask", "lengths"))
    ],
)
def test_groups_of_heads_give_the_same_bits_on_a_cpu(
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    dtype: str,
    documents: str,
) -> None:
    """Layers recompute attention, keep it, or save their activations.

    The normal tests have each family, and each kind of documents in each dtype.
    """
    if documents == "lengths":
        reference_lengths.install(monkeypatch)
    changes = {"dtype": dtype, "documents": bool(documents), "policy": "overlapped"}
    heads: list[int] = []
    for module, name in ((attention, "_forward"), (attention, "_backward")) + (
        ((lengths, "forward"), (lengths, "backward")) if documents == "lengths" else ()
    ):
        kernel = getattr(module, name)

        def counted(*args: Any, kernel: Any = kernel, **named: Any) -> Any:
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() > 2]
            heads.append(max(tensor.shape[1] for tensor in tensors))  # those of the queries
            return kernel(*args, **named)

        monkeypatch.setattr(module, name, counted)
    loss, gradients = trained(run, family, placement=KEPT, **changes)
    for groups in (2, 4):
        heads.clear()
        found = trained(
            run, family, placement=KEPT, head_groups=groups, token_piece=None, **changes
        )
        assert set(heads) == {8 // groups}
        assert found[0] == loss
        assert all(torch.equal(found[1][name], gradients[name]) for name in gradients)


def test_groups_of_heads_and_pieces_of_tokens(run: Callable[..., Any]) -> None:
    pieces = trained(run, "qwen2", token_piece=5)
    both = trained(run, "qwen2", token_piece=5, head_groups=4)
    assert both[0] == pieces[0]
    assert all(torch.equal(both[1][name], pieces[1][name]) for name in pieces[1])


def test_a_compiled_layer_has_groups(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, **_: compiled(function, fullgraph=True, backend="aot_eager"),
    )
    torch._dynamo.reset()
    one, several = (
        trained(
            run,
            "llama",
            compiled=groups > 1,  # an eager layer without groups needs no compiling
            loss_chunk=2 * SEQUENCE,  # one chunk, so the head is compiled once
            head_groups=groups,
            placement=KEPT,
            policy="overlapped",
        )
        for groups in (1, 4)
    )
    assert several[0] == pytest.approx(one[0], rel=1e-6)
    for name, gradient in one[1].items():
        torch.testing.assert_close(several[1][name], gradient, rtol=1e-4, atol=1e-6)


def planned(model: ModelSpec, groups: int, policy: str = "overlapped") -> Plan:
    return Plan(
        policy=policy,
        hardware="h200",
        source="",
        model=model,
        workload=Workload(batch=1, sequence=32768, head_groups=groups),
        device_limit_bytes=2**40,
        host_limit_bytes=2**42,
    )


def test_models_without_such_groups_are_refused() -> None:
    seven = ModelSpec.load("qwen2.5-7b")
    lower(planned(seven, 4))
    with pytest.raises(UserError, match=r"found 3 for qwen2\.5-7b; allowed: a divisor of its 4"):
        lower(planned(seven, 3))
    with pytest.raises(UserError, match="found 2 for a gemma2 model; allowed: full causal"):
        lower(planned(ModelSpec.load("gemma-2-9b"), 2))
    with pytest.raises(UserError, match="found 2 with zero3_offload, a system"):
        lower(planned(seven, 2, "zero3_offload"))
    with pytest.raises(UserError, match="head_groups: found 0; allowed: 1 to 1024"):
        planned(seven, 0)


def test_groups_cost_the_copies_of_their_results() -> None:
    model, hardware = ModelSpec.load("qwen2.5-7b").with_layers(2), HardwareSpec.load("h200")
    one, four = (planned(model, groups) for groups in (1, 4))
    for kind, elements in (("forward", 28 * 128), ("backward", (3 * 28 + 8) * 128)):
        works = [op_work(model, kind, "0", plan.workload) for plan in (one, four)]
        copied = 2 * 2 * elements + (2 * 4 * 28 if kind == "forward" else 0)
        assert works[1].moved_bytes - works[0].moved_bytes == 32768 * copied
    times = [
        sum(
            cost_model(hardware, model, plan.workload).duration_ns(op)
            for op in lower(plan).ops
            if op.lane == "compute"
        )
        for plan in (one, four)
    ]
    assert times[0] < times[1] < 1.02 * times[0]
