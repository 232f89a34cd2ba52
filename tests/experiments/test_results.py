"""Committed runs stay what they say: today's simulator lowers their plans to the schedule that ran, and predicts it no worse than was written down."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.experiments.compared_run import compare_run
from megatrain.simulator.error_report import ErrorReport
from megatrain.simulator.files import convert, read_json

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
RUNS = sorted(folder for folder in RESULTS.iterdir() if (folder / "measured.json").exists())


def test_there_are_runs() -> None:
    assert RUNS


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_stored_run_is_predicted_no_worse_than_when_it_was_stored(run: Path) -> None:
    compared = compare_run(run)
    report = compared.errors
    stored = convert(read_json(run / "comparison.json"), ErrorReport, "comparison.json")
    assert not report.violations
    errors = [error for error in (report.error, stored.error, report.engine_error) if error is not None]
    assert len(errors) == 3
    assert abs(errors[0]) <= abs(errors[1]) + 0.001
    assert abs(errors[2]) < 0.001, "measured durations, replayed with the dispatch of that machine"
    assert report.first_divergence is None
    (peak,) = (row for row in report.memory if row.what == "whole device peak")
    assert peak.measured_bytes <= peak.predicted_bytes <= 1.03 * peak.measured_bytes
