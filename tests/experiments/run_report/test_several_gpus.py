"""Tests that a run on several GPUs is compared with the prediction for several GPUs.

The ranks share the host's memory, so their copies are slower than those of one GPU.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatrain.experiments.cli.training import step_comparison
from megatrain.experiments.run_report import compared_run, sections
from megatrain.experiments.run_report.several_runs import _settings
from megatrain.experiments.run_report.why import rivals
from megatrain.simulator.base.files import write_json
from megatrain.simulator.base.units import format_seconds
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import makespan_ns, simulate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice
from megatrain.simulator.planner.search import plans_of
from megatrain.simulator.planner.shared_step import shared_step
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.verdict.verdict import described

MACHINE = HardwareSpec.load("h200-4x")
GIB = 2**30


@pytest.fixture(scope="module")
def choice() -> Choice:
    """Returns a plan for four GPUs whose step is limited by copies."""
    (plan,) = plans_of(
        ModelSpec.load("qwen2.5-7b").with_layers(8),
        MACHINE,
        Workload(batch=1, sequence=256),
        device_limit=12 * GIB,
        policies=["overlapped"],
    )
    return shared_step(plan, MACHINE, 4)


@pytest.fixture(scope="module")
def schedule(choice: Choice) -> Schedule:
    """Returns the plan's schedule. With the links of one GPU, it would take less time."""
    plan, schedule = choice.plan, lower(choice.plan)
    wrong = cost_model(MACHINE, plan.model, plan.workload)
    assert makespan_ns(schedule, wrong) / 1e9 < 0.9 * choice.step_seconds
    return schedule


def test_a_report_has_the_links_of_several_gpus(
    choice: Choice, schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = choice.plan
    measured = simulate(schedule, cost_model(MACHINE, plan.model, plan.workload, 4))
    plan.save(tmp_path / "plan.toml")
    measured.save(tmp_path / "measured.json")
    monkeypatch.setattr(compared_run, "read_record", lambda _: SimpleNamespace(steady_seconds={}))
    monkeypatch.setattr(compared_run, "peaks", lambda *_: ())
    run = compared_run.compare_run(tmp_path)
    assert run.errors.predicted_seconds == measured.makespan_ns / 1e9
    (row,) = rivals(run)
    assert row[:3] == ["overlapped", format_seconds(choice.step_seconds), "+0.0 %"]


@pytest.mark.parametrize(
    ("gpus", "hosts", "name", "command"),
    [
        (1, 1, "NVIDIA H200", "megatrain train"),
        (4, 1, "4 x NVIDIA H200", "torchrun --standalone --nproc-per-node 4 -m megatrain train"),
        (4, 2, "4 x NVIDIA H200, 2 hosts", "torchrun --nnodes 2 --nproc-per-node 2 "),
    ],
)
def test_the_page_names_the_gpus_and_the_command_that_starts_them(
    choice: Choice, tmp_path: Path, gpus: int, hosts: int, name: str, command: str
) -> None:
    write_json(tmp_path / "environment.json", {"device": "NVIDIA H200"})
    plan = msgspec.structs.replace(choice.plan, gpus=gpus, hosts=hosts)
    run: Any = SimpleNamespace(
        plan=plan,
        folder=tmp_path,
        hardware=MACHINE,
        record=SimpleNamespace(device="NVIDIA H200", steps=[]),
    )
    assert sections.title(run).endswith(f", on {name}")
    assert f"on {name}</span>" in sections.heading(run)
    assert f"commands>{command}" in sections.machine(run)


def test_a_training_is_compared_with_the_links_of_several_gpus(
    choice: Choice, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = choice.plan
    measured = simulate(schedule, cost_model(MACHINE, plan.model, plan.workload, 4))
    monkeypatch.setattr(step_comparison, "measured_memory", lambda *_: {})
    monkeypatch.setattr(step_comparison, "memory_errors", lambda *_: ())
    training = SimpleNamespace(
        plan=plan,
        measured=measured,
        origin=Path(),
        executor=SimpleNamespace(schedule=schedule),
        device_bytes_before=0,
    )
    report = step_comparison.StepComparison()._compare(training)  # type: ignore[arg-type]
    assert report.predicted_seconds == measured.makespan_ns / 1e9


@pytest.mark.usefixtures("schedule")
def test_a_verdict_has_the_waits_of_several_gpus(choice: Choice) -> None:
    """With the links of one GPU, a tenth of the step would belong to nothing."""
    shares = described(choice, MACHINE, kernel_chosen=False).step_shares
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["nothing_else"] < 0.02


def test_runs_on_other_numbers_of_gpus_are_told_apart(choice: Choice, tmp_path: Path) -> None:
    """The limit of host memory is that of a host, which the ranks divide."""
    found = []
    for gpus in (1, 4):
        folder = tmp_path / str(gpus)
        folder.mkdir()
        plan = msgspec.structs.replace(
            choice.plan, gpus=gpus, host_limit_bytes=64 * GIB // gpus, digest="", prediction=None
        )
        plan.save(folder / "plan.toml")
        found.append(_settings(folder))
    one, four = found
    assert {name for name in one if one[name] != four[name]} == {"plan.gpus"}
    assert (one["plan.gpus"], four["plan.gpus"]) == ("1", "4")
    assert four["plan.host_limit"] == "64.00 GiB"
