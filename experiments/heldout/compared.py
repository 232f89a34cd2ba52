"""Compares a case's measured step with its prediction, as `megatrain compare` does. The replay
includes the machine's dispatch time.
"""

from __future__ import annotations

from typing import NamedTuple

from megatrain.simulator.compare.compare import compare
from megatrain.simulator.compare.error_report import ErrorReport, PeakError
from megatrain.simulator.costs import CostModel, Replayed
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.timeline import Timeline


class Compared(NamedTuple):
    """Today's prediction of a step, and its errors."""

    predicted: Timeline
    errors: ErrorReport


def compared(
    schedule: Schedule, measured: Timeline, costs: CostModel, memory: tuple[PeakError, ...] = ()
) -> Compared:
    """Returns the predicted timeline and its errors against the measured one."""
    predicted = simulate(schedule, costs)
    replayed = simulate(schedule, Replayed(measured, costs.dispatch_ns))
    return Compared(
        predicted, compare(predicted, measured, schedule, replayed=replayed, memory=memory)
    )


def replay_error(schedule: Schedule, measured: Timeline, costs: CostModel) -> float:
    """Returns the signed error of the engine: the step time simulated from the measured durations,
    against the measured step time.
    """
    step_ns = measured.makespan_ns
    return (
        simulate(schedule, Replayed(measured, costs.dispatch_ns)).makespan_ns - step_ns
    ) / step_ns
