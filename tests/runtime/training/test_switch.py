"""Tests of `TrainingRun.switch`: a callback switches to another plan with the same bits."""

from __future__ import annotations

import gc
import json
import mmap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatrain.runtime.checkpoint import checkpoint
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.lanes import OpFailed
from megatrain.runtime.memory import host_memory
from megatrain.runtime.training import trainer as training
from megatrain.runtime.training.callback import Callback, Step
from megatrain.runtime.training.config import Config
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import RunError, UserError
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan

Prepare = Callable[..., Trainer]


class Switch(Callback):
    """Switches to other plans after the given steps."""

    def __init__(self, **plans: Path) -> None:
        self._plans = {int(key.removeprefix("after_")): plan for key, plan in plans.items()}
        self.notes: list[str] = []
        self.switches: list[tuple[str, int]] = []
        self.closed: list[bool] = []
        """For each step, whether the executor that the callbacks were told of is closed."""

    def on_start(self, trainer: Any) -> None:
        self._executor = trainer.executor

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_step(self, trainer: Any, step: Step) -> None:
        self.closed.append(self._executor.closed)
        if step.number in self._plans:
            trainer.switch(self._plans[step.number])

    def on_switch(self, trainer: Any, seconds: float) -> None:
        self._executor = trainer.executor
        self.switches.append((trainer.plan.policy, trainer.first_step))
        assert trainer.timelines == []
        assert trainer.executor.plan == trainer.plan


def other(place: Path, policy: str = "overlapped", **changes: Any) -> Path:
    """Writes the plan of `place` with another policy, and returns its file."""
    plan = msgspec.structs.replace(Plan.load(place / "plan.toml"), policy=policy, **changes)
    path = place / f"{policy}.toml"
    msgspec.structs.replace(plan, digest=lower(plan).digest).save(path)
    return path


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if key not in ("seconds", "tokens_per_second", "schedule", "check")
        }
        for line in lines
    ]


def assert_same(place: Path, one: str, two: str) -> None:
    assert rows(place / one) == rows(place / two)
    model = Path("model") / "model.safetensors"
    assert (place / one / model).read_bytes() == (place / two / model).read_bytes()


@pytest.fixture
def straight(run: Prepare, place: Path) -> Path:
    """Returns a folder with an undisturbed run `straight`."""
    run(place, "straight", steps=5)
    return place


def test_a_training_switches_there_and_back_with_the_same_bits(
    prepare: Prepare, straight: Path
) -> None:
    first, second = straight / "plan.toml", other(straight)
    switch = Switch(after_2=second, after_4=first)
    prepare(straight, "run", callbacks=[switch], steps=5).fit()
    assert switch.switches == [("overlapped", 3), (Plan.load(first).policy, 5)]
    assert_same(straight, "run", "straight")
    assert Plan.load(straight / "run" / "plan.toml").digest == Plan.load(first).digest
    assert (straight / "run" / "plans" / Plan.load(second).digest / "plan.toml").is_file()


def test_a_training_switches_to_a_plan_with_short_recomputes(
    prepare: Prepare, straight: Path
) -> None:
    """Eager layers have the same bits with them, so it counts as the same workload."""
    work = Plan.load(straight / "plan.toml").workload
    short = msgspec.structs.replace(work, short_recompute=not work.short_recompute)
    switch = Switch(after_2=other(straight, workload=short))
    prepare(straight, "run", callbacks=[switch], steps=5).fit()
    assert switch.switches == [("overlapped", 3)]
    assert_same(straight, "run", "straight")


def test_a_switch_after_the_last_step_is_not_made(prepare: Prepare, straight: Path) -> None:
    switch = Switch(after_5=other(straight))
    prepare(straight, "run", callbacks=[switch], steps=5).fit()
    assert not switch.switches
    assert_same(straight, "run", "straight")


def train_on(trainer: Trainer, steps: int) -> None:
    """Calls `fit` again, as a caller that trains on with the same trainer."""
    training = msgspec.structs.replace(trainer.config.training, steps=steps)
    trainer.config = msgspec.structs.replace(trainer.config, training=training)
    trainer._resume = "newest"
    trainer.fit()


def test_a_switch_that_was_not_made_is_not_made_in_the_next_call_of_fit(
    prepare: Prepare, straight: Path
) -> None:
    switch = Switch(after_2=other(straight))
    fields = {"saving.every_steps": 2, "saving.keep_last": 9}
    trainer = prepare(straight, "run", callbacks=[switch], steps=2, **fields)
    trainer.fit()
    train_on(trainer, 5)
    assert not switch.switches
    assert rows(straight / "run") == rows(straight / "straight")


def test_the_next_call_of_fit_does_not_return_to_the_plan_before_a_switch(
    prepare: Prepare, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call ends between a switch and the first step under the other plan."""

    class Broken(Switch):
        def on_switch(self, trainer: Any, seconds: float) -> None:
            super().on_switch(trainer, seconds)
            raise RunError("planted")

    switch = Broken(after_2=other(place))
    trainer = prepare(place, "run", callbacks=[switch], steps=3)
    with pytest.raises(RunError, match="planted"):
        trainer.fit()
    step, failure = Executor.step, OpFailed("F0.m0", "memory", ValueError("broken"))

    def fail(self: Executor, *given: Any, **named: Any) -> Any:
        if self.plan.policy == "overlapped":
            raise failure
        return step(self, *given, **named)

    monkeypatch.setattr(Executor, "step", fail)
    with pytest.raises(OpFailed, match="broken"):
        train_on(trainer, 3)
    assert len(switch.switches) == 1


@pytest.mark.parametrize("where", ["step", "operation", "opening", "activations"])
def test_a_plan_that_fails_in_its_first_step_is_abandoned(
    prepare: Prepare, straight: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    error: Exception = UserError("memory", found="too little", allowed="more", fix="none")
    if where == "activations":  # PyTorch's error, for memory outside of the pools
        error = torch.OutOfMemoryError("memory: none left\nmore than one line")
    if where == "operation":
        error = OpFailed("F0.m0", "memory", ValueError("planted"))
    step = Executor.step

    def fail(self: Executor, *given: Any, **named: Any) -> Any:
        if self.plan.policy == "overlapped":
            raise error
        return step(self, *given, **named)

    def fail_to_open(plan: Plan, *given: Any, **named: Any) -> Executor:
        if plan.policy == "overlapped":
            raise error
        return Executor(plan, *given, **named)

    if where in ("step", "operation"):
        monkeypatch.setattr(Executor, "step", fail)
    else:
        monkeypatch.setattr(training, "Executor", fail_to_open)
    first, switch = Plan.load(straight / "plan.toml"), Switch(after_2=other(straight))
    prepare(straight, "run", callbacks=[switch], steps=5).fit()
    notes = "\n".join(switch.notes)
    assert "the training continues under the former plan, since the other cannot be" in notes
    found = "F0.m0 on lane memory: " if where == "operation" else "memory: "
    assert f" executed: {found}" in notes
    back = (first.policy, 3)
    assert switch.switches == (
        [("overlapped", 3), back] if where in ("step", "operation") else [back]
    )
    assert switch.closed == [False] * 5
    assert_same(straight, "run", "straight")
    assert Plan.load(straight / "run" / "plan.toml").digest == first.digest


def test_if_the_former_plan_fails_too_the_error_says_how_to_continue(
    prepare: Prepare, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the GPU may affect both plans. The run folder has the former plan."""
    opened: list[str] = []
    step = Executor.step

    def broken(plan: Plan, *given: Any, **named: Any) -> Executor:
        opened.append(plan.policy)
        if len(opened) == 3:
            raise RuntimeError("CUDA error: an illegal memory access\nmore than one line")
        return Executor(plan, *given, **named)

    def fail(self: Executor, *given: Any, **named: Any) -> Any:
        if self.plan.policy == "overlapped":
            raise OpFailed("F0.m0", "compute", ValueError("planted"))
        return step(self, *given, **named)

    first, switch = Plan.load(straight / "plan.toml"), Switch(after_2=other(straight))
    with monkeypatch.context() as patch:
        patch.setattr(training, "Executor", broken)
        patch.setattr(Executor, "step", fail)
        with pytest.raises(RunError, match="illegal memory access; continue under") as failure:
            prepare(straight, "run", callbacks=[switch], steps=5).fit()
    assert str(failure.value).endswith(f"megatrain train --resume {straight / 'run'}")
    assert opened == [first.policy, "overlapped", first.policy]
    assert Plan.load(straight / "run" / "plan.toml").digest == first.digest
    run = straight / "run"
    config, device = Config.load(run / "config.toml"), torch.device("cpu")
    Trainer(run / "plan.toml", None, None, config, out=run, resume="newest", device=device).fit()
    assert_same(straight, "run", "straight")


@pytest.mark.parametrize("where", ["step", "opening"])
def test_the_memory_of_a_plan_that_fails_is_free_when_the_former_one_opens(
    prepare: Prepare, place: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    pages: list[weakref.ref[mmap.mmap]] = []
    in_use: list[int] = []
    map_pages, step = host_memory.map_pages, Executor.step

    def mapped(size: int) -> mmap.mmap:
        # the second plan gets its first pool only
        if where == "opening" and len(in_use) == 2 and in_use[-1] < len(pages):
            raise OSError(12, "Cannot allocate memory")
        made = map_pages(size)
        pages.append(weakref.ref(made))
        return made

    def opened(*given: Any, **named: Any) -> Executor:
        gc.collect()
        assert not [page for page in pages if page() is not None], f"opening {len(in_use)}"
        in_use.append(len(pages))
        return Executor(*given, **named)

    def without_memory(self: Executor, *given: Any, **named: Any) -> Any:
        if self.plan.policy == "overlapped" and where == "step":
            next(iter(self.tasks.values())).run = fail
        return step(self, *given, **named)

    def fail() -> None:
        raise MemoryError

    monkeypatch.setattr(host_memory, "map_pages", mapped)
    monkeypatch.setattr(training, "Executor", opened)
    monkeypatch.setattr(Executor, "step", without_memory)
    switch = Switch(after_2=other(place))
    prepare(place, "run", callbacks=[switch], steps=4).fit()
    assert len(in_use) == 3, switch.notes


@pytest.mark.parametrize("on_failure", ["stop", "go on"])
def test_without_a_checkpoint_the_plan_is_not_switched(
    prepare: Prepare, straight: Path, monkeypatch: pytest.MonkeyPatch, on_failure: str
) -> None:
    write, calls = checkpoint.write_tensors, []

    def full_once(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        return write(*given)

    monkeypatch.setattr(checkpoint, "write_tensors", full_once)
    switch = Switch(after_2=other(straight))
    fields = {"saving.on_failure": on_failure, "steps": 5}
    prepare(straight, "run", callbacks=[switch], **fields).fit()
    assert not switch.switches
    assert "was not saved: no space left on device" in switch.notes[-2]
    assert switch.notes[-1] == (
        "the training continues under the same plan, since no checkpoint could be written"
    )
    assert_same(straight, "run", "straight")


def test_a_checkpoint_that_is_due_before_a_switch_is_tried_once(
    prepare: Prepare, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Saves(Switch):
        saves: list[int]

        def on_save(self, trainer: Any, number: int) -> None:
            self.saves.append(number)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    switch = Saves(after_2=other(place))
    switch.saves = []
    fields = {"saving.on_failure": "go on", "saving.every_steps": 2, "steps": 3}
    monkeypatch.setattr(checkpoint, "write_tensors", full)
    prepare(place, "run", callbacks=[switch], **fields).fit()
    assert switch.saves == [2, 3]
    assert len([note for note in switch.notes if "was not saved: no space left" in note]) == 2
    assert not switch.switches


def test_a_switch_to_an_unsuitable_plan_is_refused(prepare: Prepare, place: Path) -> None:
    longer = msgspec.structs.replace(Plan.load(place / "plan.toml").workload, sequence=8)
    for plan, match in (
        (other(place, "resident", workload=longer), "another workload"),
        (other(place, device_limit_bytes=1), "device memory"),
    ):
        with pytest.raises(UserError, match=match):
            prepare(place, "run", callbacks=[Switch(after_1=plan)], steps=3).fit()
        (place / "run").rename(place / f"refused {match}")
    trainer = prepare(place, None, callbacks=[Switch(after_1=other(place))], steps=3)
    with pytest.raises(UserError, match="no run folder"):
        trainer.fit()
