"""Committed runs stay what they say: today's simulator lowers their plans to the schedule that ran, and predicts it no worse than was written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.experiments import options
from megatrain.experiments.pictures import memory_rows
from megatrain.simulator.compare import ErrorReport, compare
from megatrain.simulator.costs import Replayed, cost_model
from megatrain.simulator.engine import simulate
from megatrain.simulator.evaluator import evaluate
from megatrain.simulator.files import convert, read_json
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import verified
from megatrain.simulator.timeline import Timeline

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
RUNS = sorted(folder for folder in RESULTS.iterdir() if (folder / "measured.json").exists())


def test_there_are_runs() -> None:
    assert RUNS


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_stored_run_is_predicted_no_worse_than_when_it_was_stored(run: Path) -> None:
    plan = Plan.load(run / "plan.toml")
    schedule, measured = verified(plan), Timeline.load(run / "measured.json")
    costs = cost_model(options.hardware_of(run / "plan.toml", plan.hardware), plan.model, plan.workload)
    report = compare(simulate(schedule, costs), measured, schedule, replayed=evaluate(schedule, Replayed(measured)))
    stored = convert(read_json(run / "comparison.json"), ErrorReport, "comparison.json")
    assert not report.violations
    errors = [error for error in (report.error, stored.error, report.engine_error) if error is not None]
    assert len(errors) == 3
    assert abs(errors[0]) <= abs(errors[1]) + 0.001
    assert abs(errors[2]) < 0.01
    (peak,) = (row for row in memory_rows(run, plan, schedule, costs) if row["what"] == "whole device peak")
    predicted, allocated = int(str(peak["predicted_bytes"])), int(str(peak["measured_bytes"]))
    assert allocated <= predicted <= 1.03 * allocated
