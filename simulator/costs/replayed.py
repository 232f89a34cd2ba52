"""Replayed: a cost model with the durations of a run, to measure the error of the engine."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs.contention import ContentionModel
from megatrain.simulator.costs.protocol import EstimatedCosts
from megatrain.simulator.schedule import Op, Schedule, Sizes
from megatrain.simulator.schedule.timeline import Timeline


class Replayed(EstimatedCosts):
    """A cost model with the durations of a timeline. If the engine simulates the schedule with it,
    the difference from the timeline is the error of the engine alone. Ops do not slow each other
    down.
    """

    sharing = ContentionModel({})
    step_overhead_ns = 0

    def __init__(self, timeline: Timeline, dispatch_ns: Mapping[str, int] | None = None) -> None:
        """`dispatch_ns` is the time that the engine adds before each op, by lane, in nanoseconds.
        By default it is 0.
        """
        self.dispatch_ns: Mapping[str, int] = dispatch_ns or {}
        self._durations = {span.op: span.duration_ns for span in timeline.spans}

    def sizes(self, schedule: Schedule) -> Sizes:
        """Returns one size for each op, because each op has its own duration."""
        return Sizes(schedule.ops, list(range(len(schedule.ops))))

    def duration_ns(self, op: Op) -> int:
        if op.id not in self._durations:
            raise UserError(
                "timeline",
                found=f"no span of {op.id}",
                allowed="a timeline of this schedule",
                fix="run the plan again",
            )
        return self._durations[op.id]
