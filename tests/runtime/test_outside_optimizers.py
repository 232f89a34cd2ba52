"""Tests of optimizers from files with no, one and two moments.

Every plan has the reference's bits and can be saved and resumed. An optimizer that cannot be used
is refused before anything is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from outside_optimizers import HEADER, TEXTS
from reference_step import Reference
from safetensors.torch import load_file
from small_runs import SETTINGS as RUN_SETTINGS
from small_runs import everything, run_of

from megatrain.runtime.checkpoint.checkpoint import restore, save
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.files.model_files import export, random_weights
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.optimizer import outside
from megatrain.runtime.optimizer.adamw import join, split
from megatrain.runtime.optimizer.settings import AdamW, GroupSettings
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.optimizer import find
from megatrain.simulator.schedule.plan import Placement, Plan

CPU = torch.device("cpu")
SETTINGS = AdamW(
    max_norm=0.05,
    weight_decay=0.1,
    groups=(
        GroupSettings(match="*up_proj*", rate_factor=0.5),
        GroupSettings(match="*k_proj*", rate_factor=0),
    ),
)
"""tensors decay differently, one kind has half the rate, and one is frozen"""
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "overlapped": ("overlapped", {}),
    "overlapped, placed": (
        "overlapped",
        {"placement": Placement(weights="0", master_low="1", moments="e,2", host_updated="3,h")},
    ),
    "double_buffer": ("double_buffer", {}),
    "resident": ("resident", {}),
}


@pytest.fixture(autouse=True)
def deterministic_mode() -> Iterator[None]:
    """Makes PyTorch use one thread for matrix products, as lanes do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def files(tmp_path: Path) -> dict[int, str]:
    """Writes one optimizer for each number of moments, and returns their paths."""
    for moments, text in TEXTS.items():
        (tmp_path / f"optimizer_{moments}.py").write_text(text, encoding="utf-8")
    return {moments: str(tmp_path / f"optimizer_{moments}.py") for moments in TEXTS}


Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Returns a function that saves an optimizer with the given body of `update`.

    It returns the path of the file. By default, the optimizer has no moments.
    """

    def saved(body: str, moments: int = 0) -> str:
        path = tmp_path / f"written_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(
            f"{HEADER}class Mine(Optimizer):\n    name = 'mine'\n    moments = {moments}\n\n"
            "    def update(self, weights, moments, gradient, *, rate, number):\n"
            f"        {body}\n",
            encoding="utf-8",
        )
        return str(path)

    return saved


@pytest.mark.parametrize(
    ("moments", "dtype", "clipping"),
    [
        (0, "bf16", "global"),
        pytest.param(0, "fp32", "layer", marks=pytest.mark.nightly),
        (1, "bf16", "layer"),
        pytest.param(1, "fp32", "global", marks=pytest.mark.nightly),
        pytest.param(2, "bf16", "global", marks=pytest.mark.nightly),
        (2, "fp32", "none"),
    ],
)
def test_every_plan_has_the_reference_s_bits(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    files: dict[int, str],
    moments: int,
    dtype: str,
    clipping: str,
) -> None:
    work = {"dtype": dtype, "optimizer": files[moments], "accumulation": 2, "clipping": clipping}
    plans = {name: executable(policy, **work, **knobs) for name, (policy, knobs) in PLANS.items()}
    expected: dict[tuple[str, str], torch.Tensor] = {}
    results: list[tuple[float, float | None]] = []
    for name, plan in plans.items():
        with session(plan, settings=SETTINGS) as running:
            if not expected:
                draw = random_weights(0)
                first = {
                    layer.name: {t.name: draw(layer.name, t.name, t.shape) for t in layer.tensors}
                    for layer in plan.model.stack.values()
                }
                reference = Reference(
                    plan.model, plan.workload, config_of(plan.model), SETTINGS, first, CPU
                )
                results = [
                    reference.step(running.batches(number), rate=1e-2, number=number)
                    for number in (1, 2)
                ]
                expected = {
                    (layer, tensor): values
                    for layer, tensors in reference.masters.items()
                    for tensor, values in tensors.items()
                }
            made = [running.step(number) for number in (1, 2)]
            assert [(step.loss, step.gradient_norm) for step in made] == results, name
            for layer in plan.model.stack.values():
                for tensor, values in running.state.masters(layer).items():
                    found = expected[layer.name, tensor].view(torch.int32)
                    assert torch.equal(values.contiguous().view(torch.int32), found), (name, tensor)
            assert (("moments", "0") in running.executor.schedule.state) == bool(moments)
    moved = {
        tensor: not torch.equal(first["0"][tensor], expected["0", tensor]) for tensor in first["0"]
    }
    assert [tensor for tensor, moves in moved.items() if not moves] == ["self_attn.k_proj.weight"]


@pytest.mark.parametrize("moments", [0, 1, 2])
def test_a_run_is_resumed_under_another_plan_and_exported(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    files: dict[int, str],
    tmp_path: Path,
    moments: int,
) -> None:
    plan, other = (
        executable(policy, optimizer=files[moments], **knobs)
        for policy, knobs in (PLANS["overlapped, placed"], PLANS["resident"])
    )
    with session(plan, settings=SETTINGS) as running:
        running.step(1)
        save(running.executor, run_of(1), tmp_path / "step-1")
        running.step(2)
        straight = everything(running)
        masters = {
            name: tensor.clone()
            for name, tensor in running.state.masters(plan.model.stack["1"]).items()
        }
        export(running.state, plan, config_of(plan.model), tmp_path / "model", dtype="fp32")
    assert ("1.moments" in straight) == bool(moments)
    with session(other, settings=SETTINGS) as running:
        restore(running.executor, tmp_path / "step-1", RUN_SETTINGS)
        running.step(2)
        assert everything(running) == straight
    exported = load_file(tmp_path / "model" / "model.safetensors")
    for name, tensor in masters.items():
        assert torch.equal(exported[f"model.layers.1.{name}"], tensor)


@pytest.mark.parametrize(("was", "now"), [(0, 1), (1, 2), (2, 0), (2, None), (None, 1)])
def test_a_checkpoint_of_another_optimizer_is_refused_in_one_line(
    executable: Callable[..., Plan],
    session: Callable[..., Any],
    files: dict[int, str],
    tmp_path: Path,
    was: int | None,
    now: int | None,
) -> None:
    first, second = (
        executable(**({} if each is None else {"optimizer": files[each]})) for each in (was, now)
    )
    with session(first) as running:
        save(running.executor, run_of(0), tmp_path / "step-0")
    with session(second) as running, pytest.raises(UserError) as caught:
        restore(running.executor, tmp_path / "step-0", RUN_SETTINGS)
    assert (
        "found another content than that with which the checkpoint was trained"
        if None not in (was, now)
        else f"found workload.optimizer {str(first.workload.optimizer)[:60]} in the checkpoint"
    ) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("moments", [0, 1, 2])
def test_a_clip_factor_of_nan_changes_nothing(
    files: dict[int, str], moments: int, low: bool
) -> None:
    optimizer, count = find(files[moments]), 100
    master, gradient = torch.randn(2, count, generator=torch.Generator().manual_seed(0))
    state = torch.rand(moments, count)
    high, rest = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.int16)
    split(master, high, rest)
    weights = high if low else master.clone()
    before = state.clone()

    def updated(factor: float) -> torch.Tensor:
        outside.update(
            optimizer,
            weights,
            rest if low else None,
            state,
            gradient,
            settings=SETTINGS,
            rate=0.1,
            number=2,
            clip=torch.tensor(factor),
            weight_decay=0.1,
        )
        return join(weights, rest) if low else weights

    kept = gradient.clone()
    assert torch.equal(updated(float("nan")), master)
    assert torch.equal(state, before)
    assert not torch.equal(updated(0.5), master)
    assert torch.equal(gradient, kept), "the update overwrote the gradient instead of a copy"


def test_blocks_change_no_bit(files: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for block in (2**20, 64):
        monkeypatch.setattr(outside, "_BLOCK", block)
        generator = torch.Generator().manual_seed(0)
        weights, gradient = torch.randn(2, 1000, generator=generator)
        moments = torch.zeros(1, 1000)
        given: dict[str, Any] = {"rate": 0.1, "number": 1, "clip": None, "weight_decay": 0.1}
        copy = torch.empty(1000)
        outside.update(
            find(files[1]),
            weights,
            None,
            moments,
            gradient,
            settings=SETTINGS,
            copy_to=copy,
            **given,
        )
        assert torch.equal(copy, weights)
        made.append(torch.cat([weights, moments[0]]))
    assert torch.equal(*made)


@pytest.mark.parametrize(
    "body",
    ["return weights.sub_(gradient * rate)", "weights.sub_(gradient * rate * (number % 5 == 0))"],
)
def test_an_update_may_return_something_or_wait_for_some_gradients(
    executable: Callable[..., Plan], write: Write, body: str
) -> None:
    assert preflight(executable(optimizer=write(body)), AdamW(), CPU)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "weights.sub_(gradient / gradient.norm() * rate)",
            "found an update that depends on how a tensor is cut; allowed: one in which each",
        ),
        ("{}['rate']", "found KeyError in update: 'rate'; allowed: an update of fp32 tensors"),
        (
            "return weights - gradient * rate",
            "found 100 updates that changed no weights, and each returned Tensor; allowed: an",
        ),
        (
            "weights = weights - gradient * rate",
            "found 100 updates that changed no weights; allowed: an update that changes its",
        ),
        (
            "weights.sub_(1.0)",
            "found an update that changes frozen weights; allowed: none where rate and gradient",
        ),
    ],
)
def test_an_update_that_no_plan_can_execute_is_refused(
    executable: Callable[..., Plan], write: Write, body: str, message: str
) -> None:
    path = write(body)
    with pytest.raises(UserError) as caught:
        preflight(executable(optimizer=path), AdamW(), CPU)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"optimizer {path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (AdamW(epsilon=1e-6), "optimizer: epsilon: found 1e-06 with optimizer "),
        (AdamW(weight_decay=0.1), "optimizer: weight_decay: found 0.1 with optimizer "),
        (
            AdamW(groups=(GroupSettings(match="*norm*", weight_decay=0.2),)),
            "optimizer: weight_decay: found 0.2 with optimizer ",
        ),
    ],
)
def test_a_setting_that_the_optimizer_does_not_read_is_refused(
    executable: Callable[..., Plan], write: Write, settings: AdamW, message: str
) -> None:
    plan = executable(optimizer=write("weights.sub_(gradient * rate)"))
    preflight(plan, AdamW(max_norm=3.0), CPU)
    with pytest.raises(UserError) as caught:
        preflight(plan, settings, CPU)
    assert message in str(caught.value)
    assert "allowed: max_norm, groups" in str(caught.value)


def test_an_executor_refuses_an_unusable_optimizer_before_anything_is_allocated(
    executable: Callable[..., Plan], write: Write
) -> None:
    plan, allocated = executable(optimizer=write("weights.sub_(1.0)")), list[object]()
    with pytest.raises(UserError, match="changes frozen weights"):
        Executor(
            plan,
            config_of(plan.model),
            AdamW(),
            CPU,
            on_allocate=lambda *given: allocated.append(given),
        )
    assert not allocated


def test_a_file_named_adamw_does_not_count_as_the_built_in_optimizer(
    executable: Callable[..., Plan], session: Callable[..., Any], write: Write
) -> None:
    path = write("weights.sub_(gradient * rate)", moments=2)
    Path(path).write_text(Path(path).read_text().replace("'mine'", "'adamw'"))
    work = executable(optimizer=path)
    bits = []
    for plan in (work, executable()):
        with session(plan, settings=AdamW()) as running:
            bits.append(running.bits().masters)
    assert bits[0] != bits[1]
    assert msgspec.structs.replace(work.workload, optimizer="adamw") == executable().workload
