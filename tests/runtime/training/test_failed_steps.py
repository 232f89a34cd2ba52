"""Tests of steps that fail or are slow during a training. No finished step is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.lanes import OpFailed
from megatrain.runtime.memory.allocation_guard import AllocationGuard, Taken
from megatrain.runtime.training.callback import Callback
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

Prepare = Callable[..., Trainer]
MODEL = Path("model") / "model.safetensors"


class Notes(Callback):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def write_plan(place: Path, executable: Callable[..., Plan], policy: str, clipping: str) -> None:
    plan = executable(policy, vocabulary=300, dtype="fp32", accumulation=2, clipping=clipping)
    plan.save(place / "plan.toml")


@pytest.fixture(params=["double_buffer", "overlapped"])
def planned(request: Any, place: Path, executable: Callable[..., Plan]) -> Path:
    """Returns `place` with a plan that defers no updates, or with one that defers them."""
    write_plan(place, executable, request.param, "global")
    return place


def test_a_step_that_allocates_memory_is_noted_once_and_loses_nothing(
    planned: Path, prepare: Prepare, run: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(planned, "straight", steps=6)
    looks = []

    def counts(_: AllocationGuard) -> tuple[Taken, int]:
        looks.append(True)
        return Taken(0, max(len(looks) - 7, 0), 0), 0  # retries in step 4 and in all later steps

    monkeypatch.setattr(AllocationGuard, "_counts", counts)
    notes = Notes()
    prepare(planned, callbacks=[notes], steps=6).fit()
    warnings = [note for note in notes.notes if "took memory" in note]
    assert len(warnings) == 1
    assert warnings[0].startswith("step 4: a step after the warm-up took memory: 0 bytes of the")
    assert (planned / "run" / MODEL).read_bytes() == (planned / "straight" / MODEL).read_bytes()


# ---- errors of a step ----


def without_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


def broken() -> None:
    raise ValueError("broken")


def task_of(executor: Executor, kind: str, index: int = 0) -> Any:
    return executor.tasks[[op.id for op in executor.schedule.ops if op.kind == kind][index]]


def forward_without_memory(executor: Executor) -> None:
    executor.tasks["F0.m0"].run = without_memory


def first_backward(executor: Executor) -> None:
    task_of(executor, "backward").run = broken


def fail_when(executor: Executor, ready: Callable[[], bool]) -> None:
    """Makes the last backward op fail as soon as other lanes have made `ready` true."""

    def fail() -> None:
        end = time.monotonic() + 20
        while not ready():
            assert time.monotonic() < end
            time.sleep(0.001)
        broken()

    task_of(executor, "backward", -1).run = fail


def backward_after_updates(executor: Executor) -> None:
    fail_when(executor, lambda: not executor._unwritten)


def backward_during_updates(executor: Executor) -> None:
    fail_when(executor, lambda: executor._undefined)


def update_of(executor: Executor, index: int) -> Any:
    return executor.tasks[[op.id for op in executor.schedule.ops if op.id.startswith("U")][index]]


def first_update(executor: Executor) -> None:
    update_of(executor, 0).run = broken


def last_update(executor: Executor) -> None:
    """The state of other layers has been stored, because this layer needs their slots."""
    update_of(executor, -1).run = broken


def write_after(executor: Executor, op: str, written: torch.Tensor, value: str) -> None:
    """Overwrites `written` with `value` when the op `op` has ended."""
    task = executor.tasks[op]
    works = task.run
    task.run = lambda: (works(), written.fill_(float(value)))


def loss_is_nan(executor: Executor) -> None:
    write_after(executor, "H.m0", executor._values("losses", "0"), "nan")


def norm_is_infinite(executor: Executor) -> None:
    norm = next(op for op in executor.schedule.ops if op.id == "N1").writes[0]
    write_after(executor, "N1", executor._arenas.flat(norm, torch.float32, 1), "inf")


def reading_the_norm(executor: Executor) -> None:
    """The program of the step has ended."""
    executor._read_norm = broken  # type: ignore[method-assign,assignment]


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if key not in ("seconds", "tokens_per_second", "check")
        }
        for line in lines
    ]


CASES = [
    *(
        (policy, "global", fault, True)
        for policy in ("double_buffer", "k_buffer")
        for fault in (forward_without_memory, first_backward)
    ),
    # A plan that defers updates has not begun to apply that of step 3, or has applied all of it.
    ("overlapped", "global", first_update, True),
    ("overlapped", "global", backward_after_updates, True),
    ("overlapped", "global", reading_the_norm, True),
    # It has applied a part of it.
    ("overlapped", "global", forward_without_memory, False),
    ("overlapped", "global", last_update, False),
    # The update of step 4 may have been applied.
    ("double_buffer", "global", reading_the_norm, False),
    ("double_buffer", "global", last_update, False),
    ("overlapped", "layer", backward_during_updates, False),
]


@pytest.fixture(scope="module")
def straight_runs() -> dict[tuple[str, str], Path]:
    """(policy, clipping) -> the folder of a run in which no step failed."""
    return {}


@pytest.mark.parametrize(("policy", "clipping", "fault", "saved"), CASES)
def test_a_step_that_fails_loses_no_other_step(
    place: Path,
    straight_runs: dict[tuple[str, str], Path],
    executable: Callable[..., Plan],
    prepare: Prepare,
    run: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    clipping: str,
    fault: Callable[[Executor], None],
    saved: bool,
) -> None:
    """If the state is still that of step 3, it is saved, and the run continues from it with the
    same bits. Otherwise only the checkpoint of step 2 is there.
    """
    write_plan(place, executable, policy, clipping)
    fields = {"steps": 6, "saving.every_steps": 2, "saving.keep_last": 9}
    if (policy, clipping) not in straight_runs:
        run(place, "straight", **fields)
        straight_runs[policy, clipping] = place / "straight"
    straight = straight_runs[policy, clipping]
    step, notes = Executor.step, Notes()

    def faulty(self: Executor, *given: Any, number: int, **named: Any) -> Any:
        if number == 4:
            fault(self)
        return step(self, *given, number=number, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "step", faulty)
        with pytest.raises((UserError, OpFailed, FloatingPointError, ValueError)) as failure:
            prepare(place, callbacks=[notes], **fields).fit()
    assert not isinstance(failure.value, UserError) or fault is forward_without_memory
    checkpoints = sorted(path.name for path in (place / "run" / "checkpoints").iterdir())
    assert checkpoints == [f"step-0000000{number}" for number in ((2, 3) if saved else (2,))]
    assert notes.notes[-1].startswith(
        "the step failed; a checkpoint of step 3 was written"
        if saved
        else "the step failed, and then no checkpoint could be written: the weights cannot be used,"
    )
    run(place, "run", resume="newest", **fields)
    assert rows(place / "run") == rows(straight)
    assert (place / "run" / MODEL).read_bytes() == (straight / MODEL).read_bytes()
    newest = Path("checkpoints") / "step-00000006"
    for tensors in sorted((straight / newest).glob("*.safetensors")):
        assert tensors.read_bytes() == (place / "run" / newest / tensors.name).read_bytes()


@pytest.mark.parametrize("fault", [loss_is_nan, norm_is_infinite])
@pytest.mark.parametrize("policy", ["double_buffer", "overlapped"])
def test_a_loss_that_is_not_finite_writes_no_checkpoint(
    place: Path,
    executable: Callable[..., Plan],
    prepare: Prepare,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    fault: Callable[[Executor], None],
) -> None:
    """A resume from the step before would come to the same loss."""
    write_plan(place, executable, policy, "global")
    step, notes = Executor.step, Notes()

    def faulty(self: Executor, *given: Any, number: int, **named: Any) -> Any:
        if number == 4:
            fault(self)
        return step(self, *given, number=number, **named)

    monkeypatch.setattr(Executor, "step", faulty)
    fields = {"steps": 6, "saving.every_steps": 2, "saving.keep_last": 9}
    with pytest.raises(FloatingPointError, match="not finite"):
        prepare(place, callbacks=[notes], **fields).fit()
    assert not [note for note in notes.notes if "failed" in note]
    assert [path.name for path in (place / "run/checkpoints").iterdir()] == ["step-00000002"]


def test_a_step_that_is_saved_already_is_not_saved_again(
    place: Path, prepare: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a checkpoint of the step was written already, nothing is saved again, or said."""
    step, notes = Executor.step, Notes()

    def faulty(self: Executor, *given: Any, number: int, **named: Any) -> Any:
        if number == 3:
            forward_without_memory(self)
        return step(self, *given, number=number, **named)

    monkeypatch.setattr(Executor, "step", faulty)
    with pytest.raises(UserError, match="device memory"):
        prepare(place, callbacks=[notes], **{"saving.every_steps": 2}).fit()
    assert not [note for note in notes.notes if "the step failed" in note]
    assert [path.name for path in (place / "run/checkpoints").iterdir()] == ["step-00000002"]
