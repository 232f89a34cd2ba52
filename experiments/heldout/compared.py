"""Compares a case's measured step with its prediction, as `megatrain compare` does. The replay
includes the machine's dispatch time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from megatrain.experiments.heldout.rows import HeldoutRow
from megatrain.simulator.compare.compare import compare
from megatrain.simulator.compare.error_report import ErrorReport, PeakError
from megatrain.simulator.costs import CostModel, Replayed, cost_model
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.timeline import Timeline
from megatrain.simulator.verdict.verdict import summarize


class Compared(NamedTuple):
    """The current simulator's prediction of a step, and its errors."""

    predicted: Timeline
    """The predicted step."""
    errors: ErrorReport
    """The errors against the measured step."""


def predict_and_compare(
    schedule: Schedule, measured: Timeline, costs: CostModel, memory: tuple[PeakError, ...] = ()
) -> Compared:
    """Returns the predicted timeline and its errors against the measured one."""
    predicted = simulate(schedule, costs)
    replayed = simulate(schedule, Replayed(measured, costs.dispatch_ns))
    return Compared(
        predicted, compare(predicted, measured, schedule, replayed=replayed, memory=memory)
    )


def within_range(rows: Iterable[HeldoutRow], hardware: HardwareSpec) -> tuple[int, int]:
    """Returns (number of measured steps within their predicted range, number of measured steps).
    The range follows from the spreads of the calibration.
    """
    inside = []
    for row in rows:
        if row.failure or row.same_as or row.step_seconds is None:
            continue
        verdict = summarize(
            assess(row.plan, cost_model(hardware, row.plan.model, row.plan.workload)), hardware
        )
        inside.append(
            verdict.step_seconds_low is not None
            and verdict.step_seconds_high is not None
            and verdict.step_seconds_low <= row.step_seconds <= verdict.step_seconds_high
        )
    return sum(inside), len(inside)
