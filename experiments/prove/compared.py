"""Compared: a case's measured step against its prediction, the way `megatrain compare` does it: the engine replays with the machine's dispatch."""

from __future__ import annotations

from typing import NamedTuple

from megatrain.simulator.compare import compare
from megatrain.simulator.costs import CostModel, Replayed
from megatrain.simulator.engine import simulate
from megatrain.simulator.error_report import ErrorReport, PeakError
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.timeline import Timeline


class Compared(NamedTuple):
    """What is predicted today, and how far off it is."""

    predicted: Timeline
    errors: ErrorReport


def compared(schedule: Schedule, measured: Timeline, costs: CostModel, memory: tuple[PeakError, ...] = ()) -> Compared:
    predicted = simulate(schedule, costs)
    replayed = simulate(schedule, Replayed(measured, costs.dispatch_ns))
    return Compared(predicted, compare(predicted, measured, schedule, replayed=replayed, memory=memory))


def replay_error(schedule: Schedule, measured: Timeline, costs: CostModel) -> float:
    """The engine's own error of the step, signed."""
    step_ns = measured.makespan_ns
    return (simulate(schedule, Replayed(measured, costs.dispatch_ns)).makespan_ns - step_ns) / step_ns
