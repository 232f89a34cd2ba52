"""Tests of commands for a run whose policy, optimizer and cost model are in files that were edited
or removed since.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forget import forget
from outside_optimizers import SGD

from megatrain.experiments.run_report.several_runs import _settings
from megatrain.runtime.training.run_folder import save_plan
from megatrain.simulator import policies
from megatrain.simulator.base.files import read_toml, write_toml
from megatrain.simulator.hardware.machine import library
from megatrain.simulator.model.optimizer import OPTIMIZERS
from megatrain.simulator.policies.registry import POLICIES
from megatrain.simulator.schedule.plan import Plan

POLICY = """
from megatrain.simulator.policies.double_buffer import DoubleBuffer


class Mine(DoubleBuffer):
    name = "mine"
"""
COSTS = """
from megatrain.simulator.costs import Datasheet


class Costs(Datasheet):
    def duration_ns(self, op):
        return 7 * super().duration_ns(op)


def cost_model(hardware, model, workload):
    return Costs(hardware, model, workload)
"""


@pytest.fixture
def files(workplace: Path) -> Iterator[list[Path]]:
    """Gives `plan.toml` a policy, an optimizer and a cost model in files, and returns these."""
    (workplace / "own").mkdir()
    names = {"policy.py": POLICY, "sgd.py": SGD, "costs.py": COSTS}
    for name, text in names.items():
        (workplace / "own" / name).write_text(text, encoding="utf-8")
    machine = read_toml(library()["h200"], dict)
    write_toml(workplace / "own" / "machine.toml", {**machine, "cost_model": "costs.py"})
    forget(POLICIES, OPTIMIZERS)
    plan = Plan.load("plan.toml")
    plan = msgspec.structs.replace(
        plan,
        policy="own/policy.py",
        hardware="own/machine.toml",
        workload=msgspec.structs.replace(plan.workload, optimizer="own/sgd.py"),
    )
    msgspec.structs.replace(plan, digest=policies.lower(plan).digest).save("plan.toml")
    yield [workplace / "own" / name for name in (*names, "machine.toml")]
    forget(POLICIES, OPTIMIZERS)


@pytest.mark.parametrize("removed", [False, True])
def test_commands_read_an_old_run_with_its_own_files(
    files: list[Path], command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, removed: bool
) -> None:
    """The commands run in another folder, after all files were edited or removed."""
    words = ("--data", "corpus", "--device", "cpu", "--steps", 5, "--save-every", 5)
    trained = command("train", "plan.toml", *words, "--out", "run")
    assert trained.status == 0, trained.err
    before = json.loads(command("compare", "run", "--json").out)
    for file in files:
        if removed:
            file.unlink()
        else:
            file.write_text("raise RuntimeError('edited')", encoding="utf-8")
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    compared = command("compare", "../run", "--json")
    assert compared.status == 0, compared.err
    assert json.loads(compared.out) == {**before, "policy": f"../{before['policy']}"}
    for line in (
        ("report", "../run"),
        ("simulate", "../run/plan.toml"),
        ("eval", "../run", "--data", "../corpus", "--device", "cpu"),
        ("train", "--resume", "../run", "--steps", 6, "--device", "cpu"),
    ):
        ended = command(*line)
        assert ended.status == 0, (line, ended.err)


def test_a_copy_of_a_file_is_no_difference_between_runs(files: list[Path]) -> None:
    """Only the content of the optimizer's file is one of the settings."""
    plan = Plan.load("plan.toml")
    found = []
    for number in range(3):
        save_plan(plan, Path(), plan.source, Path(f"run-{number}"))
        found.append(_settings(Path(f"run-{number}")))
        if number == 1:
            files[1].write_text(SGD + "# edited\n", encoding="utf-8")
            policies.find(plan.policy)
    assert found[0] == found[1]
    differing = {key for key, value in found[2].items() if found[0][key] != value}
    assert differing == {"workload.optimizer"}
