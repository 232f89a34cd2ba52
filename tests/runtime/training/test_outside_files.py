"""Tests of runs whose policy, optimizer or cost model is in a file of the user's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from forget import forget
from outside_optimizers import TEXTS

from megatrain.runtime.checkpoint import checkpoint
from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.checkpoint.same_run import description
from megatrain.runtime.training.callback import Callback, CallbackError
from megatrain.runtime.training.config import Config
from megatrain.runtime.training.run_folder import save_plan
from megatrain.runtime.training.run_lock import RunLock
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_toml, write_toml
from megatrain.simulator.hardware.machine import HardwareSpec, library
from megatrain.simulator.model.optimizer import OPTIMIZERS
from megatrain.simulator.policies.registry import POLICIES
from megatrain.simulator.schedule.plan import Plan

POLICY = """
import msgspec
from megatrain.simulator.policies.k_buffer import KBuffer


class Mine(KBuffer):
    name = "mine"

    def lower(self, plan):
        knobs = msgspec.structs.replace(plan.knobs, weight_slots=2)
        return super().lower(msgspec.structs.replace(plan, knobs=knobs))

    def buffers(self, plan, *, merged=False):
        return self.lower(plan)
"""
EDITED = POLICY.replace("weight_slots=2", "weight_slots=3")


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    forget(POLICIES, OPTIMIZERS)
    yield
    forget(POLICIES, OPTIMIZERS)


@pytest.fixture
def mine(place: Path) -> Path:
    """Returns the policy file of the plan in `place`."""
    (place / "mine.py").write_text(POLICY, encoding="utf-8")
    plan = msgspec.structs.replace(Plan.load(place / "plan.toml"), policy=str(place / "mine.py"))
    digest = policies.lower(plan).digest
    msgspec.structs.replace(plan, digest=digest).save(place / "plan.toml")
    return place / "mine.py"


@pytest.mark.parametrize("edited", [EDITED, "raise RuntimeError", None])
def test_an_edit_does_not_reach_a_training_that_runs(
    place: Path, mine: Path, run: Callable[..., Any], edited: str | None
) -> None:
    """The policy is needed again for the evaluation after the edit."""
    evaluated = []

    class Editor(Callback):
        def on_step(self, trainer: Any, step: Any) -> None:
            if edited is None:
                mine.unlink(missing_ok=True)
            else:
                mine.write_text(edited, encoding="utf-8")

        def on_evaluation(self, trainer: Any, evaluation: Any) -> None:
            evaluated.append(evaluation.number)

    (place / "held_out.txt").write_text("def function(argument):\n    return argument\n" * 50)
    settings = {"evaluation_data": str(place / "held_out.txt"), "evaluation.every_steps": 1}
    trainer = run(place, callbacks=[Editor()], steps=2, export=False, **settings)
    assert evaluated == [1, 2]
    with pytest.raises(UserError, match=r"plan: digest|while it was loaded|no file"):
        policies.verified(trainer.plan)


def test_an_edit_before_a_training_begins_is_noticed(
    place: Path, mine: Path, prepare: Callable[..., Any]
) -> None:
    trainer = prepare(place, steps=1, export=False)
    mine.write_text(EDITED, encoding="utf-8")
    with pytest.raises(UserError, match="plan: digest"):
        trainer.fit()
    assert not (place / "run" / "plan.toml").exists()


def own(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "plan_code").rglob("*.py"))


def kept(run: Path) -> Plan:
    """Returns the plan in the folder `run`, after checking its schedule."""
    plan = Plan.load(run / "plan.toml")
    policies.verified(plan)
    return plan


def test_a_run_keeps_the_policy_with_which_it_trained(
    place: Path, mine: Path, run: Callable[..., Any]
) -> None:
    class Editor(Callback):
        """Edits the policy before the run's folder is written."""

        def on_load(self, parameters: int) -> None:
            mine.write_text(EDITED, encoding="utf-8")

    every = {"saving.every_steps": 1, "export": False}
    run(place, callbacks=[Editor()], steps=1, **every)
    assert kept(place / "run").policy == str(place / "run" / "plan_code" / "mine.py")
    assert (place / "run" / "plan_code" / "mine.py").read_text() == POLICY
    assert 'policy = "plan_code/mine.py"' in (place / "run" / "plan.toml").read_text()
    mine.unlink()
    moved = place.parent / f"{place.name}-moved"
    (place / "run").rename(moved)
    assert kept(moved).policy == str(moved / "plan_code" / "mine.py")


def test_a_resumed_run_keeps_both_policies(
    place: Path, mine: Path, run: Callable[..., Any]
) -> None:
    """The present plan and the former one each have their own content of one file."""
    every = {"saving.every_steps": 1, "export": False}
    run(place, steps=1, **every)
    former = Plan.load(place / "run" / "plan.toml")
    mine.write_text(EDITED, encoding="utf-8")
    plan = Plan.load(place / "plan.toml")
    other = msgspec.structs.replace(plan, digest=policies.lower(plan).digest)
    other.save(place / "plan.toml")
    run(place, resume="newest", steps=2, **every)
    mine.unlink()
    present, before = kept(place / "run"), kept(place / "run" / "plans" / former.digest)
    assert (present.digest, before.digest) == (other.digest, former.digest)
    assert present.digest != before.digest
    assert Path(present.policy).read_text() == EDITED
    assert Path(before.policy).read_text() == POLICY
    assert len(own(place / "run")) == 2


@pytest.mark.parametrize("write", range(1, 5))
def test_a_kill_while_a_plan_is_saved_leaves_the_former_plan_with_its_files(
    place: Path, mine: Path, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    """The files of the other plan have the names of those of the former one."""
    (place / "costs.py").write_text("FACTOR = 1\n", encoding="utf-8")
    (place / "machine.toml").write_text('cost_model = "costs.py"\n', encoding="utf-8")
    target, count = place / "run", 0
    plan = msgspec.structs.replace(Plan.load(place / "plan.toml"), hardware="machine.toml")
    save_plan(plan, place, "small", target)
    files = ("plan.toml", "hardware.toml", "plan_code/mine.py", "plan_code/costs.py")
    before = {name: (target / name).read_bytes() for name in files}
    mine.write_text(EDITED, encoding="utf-8")
    (place / "costs.py").write_text("FACTOR = 2\n", encoding="utf-8")
    (place / "machine.toml").write_text('cost_model = "costs.py"\nname = "b"\n', encoding="utf-8")
    other = msgspec.structs.replace(plan, digest=policies.lower(plan).digest)
    replace = os.replace

    def killed(source: Any, to: Any) -> None:
        nonlocal count
        count += 1
        if count == write:
            raise KeyboardInterrupt
        replace(source, to)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            save_plan(other, place, "small", target)
    assert {name: (target / name).read_bytes() for name in files} == before
    assert kept(target).digest == plan.digest
    save_plan(other, place, "small", target)
    assert kept(target).digest == other.digest
    hardware = target / kept(target).hardware
    assert (target / read_toml(hardware, dict)["cost_model"]).read_text() == "FACTOR = 2\n"
    files = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    save_plan(kept(target), target, "small", target)  # as a run that is resumed
    assert {path: path.read_bytes() for path in target.rglob("*") if path.is_file()} == files


def test_a_run_keeps_the_cost_model_of_its_machine(place: Path, run: Callable[..., Any]) -> None:
    (place / "machines").mkdir()
    (place / "machines" / "costs.py").write_text("# a cost model\n", encoding="utf-8")
    machine = read_toml(library()["h200"], dict)
    write_toml(place / "machines" / "ours.toml", {**machine, "cost_model": "costs.py"})
    plan = Plan.load(place / "plan.toml")
    msgspec.structs.replace(plan, hardware="machines/ours.toml").save(place / "plan.toml")
    run(place, steps=1, export=False)
    shutil.rmtree(place / "machines")
    found = HardwareSpec.load(str(place / "run" / "hardware.toml"))
    assert found.cost_model == str(place / "run" / "plan_code" / "costs.py")
    assert Path(found.cost_model).read_text() == "# a cost model\n"
    usual = HardwareSpec.load("h200")
    assert msgspec.structs.replace(found, cost_model="") == usual


def test_a_run_that_fails_or_is_killed_before_its_first_step_leaves_no_code(
    place: Path, mine: Path, run: Callable[..., Any]
) -> None:
    class Failing(Callback):
        def on_start(self, trainer: Any) -> None:
            raise RuntimeError("planted")

    with pytest.raises(CallbackError, match="planted"):
        run(place, callbacks=[Failing()], steps=1, export=False)
    assert not list((place / "run").glob("[!.]*"))
    save_plan(Plan.load(place / "plan.toml"), place, "small", place / "run")
    assert mine.name in own(place / "run")
    (place / "run" / ".lock").write_text("a process that died\n")
    RunLock(place / "run").refuse_taken()
    assert not list((place / "run").glob("[!.]*"))


@pytest.fixture
def lion(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the optimizer's file of the plan in `place`. The current folder is `place`."""
    monkeypatch.chdir(place)
    (place / "lion.py").write_text(TEXTS[1], encoding="utf-8")
    plan = Plan.load(place / "plan.toml")
    work = msgspec.structs.replace(plan.workload, optimizer="lion.py")
    plan = msgspec.structs.replace(plan, workload=work)
    msgspec.structs.replace(plan, digest=policies.lower(plan).digest).save(place / "plan.toml")
    return place / "lion.py"


EVERY = {"saving.every_steps": 1, "export": False}


def resumed(place: Path, plan: Path, steps: int) -> Trainer:
    config = Config.load(place / "run" / "config.toml", {"training.steps": steps})
    return Trainer(
        plan,
        None,
        place / "corpus",
        config,
        out=place / "run",
        resume="newest",
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("earlier_version", [False, True])
def test_a_run_is_resumed_from_another_folder_with_its_copy_of_the_optimizer(
    place: Path,
    lion: Path,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    earlier_version: bool,
) -> None:
    """Checkpoints of earlier versions name the optimizer's file, and not its content."""
    with monkeypatch.context() as patch:
        if earlier_version:
            patch.setattr(checkpoint, "description", lambda settings, _: description(settings))
        run(place, steps=1, **EVERY)
    (saved,) = (place / "run" / "checkpoints").iterdir()
    assert ("file" in Manifest.load(saved).optimizer) != earlier_version
    lion.write_text("raise RuntimeError", encoding="utf-8")
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    assert resumed(place, Path("../run/plan.toml"), 2).fit().steps == 2
    assert own(place / "run") == ["lion.py"]


def test_a_run_is_not_resumed_with_an_edited_optimizer(
    place: Path, lion: Path, run: Callable[..., Any]
) -> None:
    run(place, steps=1, **EVERY)
    lion.write_text(TEXTS[1].replace("betas[0]", "0.5"), encoding="utf-8")
    for plan in (Path("plan.toml"), place / "plan.toml"):
        with pytest.raises(UserError, match=r"lion\.py: found another content than") as caught:
            resumed(place, plan, 2).fit()
        assert "`megatrain train --resume RUN` alone" in str(caught.value)
        assert "\n" not in str(caught.value)
    lion.unlink()
    with pytest.raises(UserError, match=r"optimizer: found no file .*lion\.py"):
        resumed(place, place / "plan.toml", 2).fit()


def test_a_checkpoint_without_a_digest_is_not_resumed_with_another_file_of_the_name(
    place: Path, lion: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints of earlier versions do not know the content of the optimizer's file."""
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "description", lambda settings, _: description(settings))
        run(place, steps=1, **EVERY)
    (place / "other").mkdir()
    other = lion.with_name("other") / "lion.py"
    other.write_text(TEXTS[1].replace("betas[0]", "0.5"), encoding="utf-8")
    plan = Plan.load(place / "plan.toml")
    work = msgspec.structs.replace(plan.workload, optimizer=str(other))
    msgspec.structs.replace(plan, workload=work).save(place / "other" / "plan.toml")
    with pytest.raises(UserError, match=r"found workload\.optimizer"):
        resumed(place, place / "other" / "plan.toml", 2).fit()


def test_a_run_keeps_what_its_optimizer_imports_from_its_folder(
    place: Path, lion: Path, run: Callable[..., Any]
) -> None:
    future = "from __future__ import annotations\n"
    helper = lion.with_name("decay_of_lion.py")
    helper.write_text("DECAY = 0.5\n", encoding="utf-8")
    helped = TEXTS[1].replace("betas[0]", "decay_of_lion.DECAY").replace(future, "")
    lion.write_text(f"{future}import decay_of_lion\n{helped}", encoding="utf-8")
    run(place, steps=1, **EVERY)
    assert own(place / "run") == ["decay_of_lion.py", "lion.py"]
    helper.unlink()
    lion.unlink()
    forget(POLICIES, OPTIMIZERS)
    assert resumed(place, place / "run" / "plan.toml", 2).fit().steps == 2


def test_a_training_switches_to_a_plan_with_a_copy_of_its_optimizer(
    place: Path, lion: Path, run: Callable[..., Any]
) -> None:
    plan = Plan.load(place / "plan.toml")
    save_plan(plan, place, "small", place / "other")
    (place / "edited").mkdir()
    lion.with_name("edited").joinpath("lion.py").write_text(TEXTS[1] + "\n# edited\n")
    edited = msgspec.structs.replace(plan.workload, optimizer="edited/lion.py")
    msgspec.structs.replace(plan, workload=edited).save(place / "edited" / "plan.toml")
    refused = []

    class Switch(Callback):
        def on_step(self, trainer: Any, step: Any) -> None:
            if step.number == 1:
                with pytest.raises(UserError) as caught:
                    trainer.switch(place / "edited" / "plan.toml")
                refused.append(str(caught.value))
                trainer.switch(place / "other" / "plan.toml")

    trainer = run(place, callbacks=[Switch()], steps=2, **EVERY)
    assert trainer.plan.workload.optimizer == str(place / "other" / "plan_code" / "lion.py")
    assert "found another workload" in refused[0]
