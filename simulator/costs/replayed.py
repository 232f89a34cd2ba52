"""Replayed: durations of a run, to see what the engine makes of them."""

from __future__ import annotations

from collections.abc import Mapping

from megatrain.simulator.costs.protocol import Unmeasured
from megatrain.simulator.errors import UserError
from megatrain.simulator.schedule import Op, Schedule, Sizes
from megatrain.simulator.sharing import Sharing
from megatrain.simulator.timeline import Timeline


class Replayed(Unmeasured):
    """Durations of a timeline: what the engine makes of them, against the timeline, is the engine's own error."""

    sharing = Sharing({})
    step_overhead_ns = 0

    def __init__(self, timeline: Timeline, dispatch_ns: Mapping[str, int] | None = None) -> None:
        """`dispatch_ns`: lane -> what the engine adds before each op, as it does in a prediction; by default nothing."""
        self.dispatch_ns: Mapping[str, int] = dispatch_ns or {}
        self._durations = {span.op: span.duration_ns for span in timeline.spans}

    def sizes(self, schedule: Schedule) -> Sizes:
        """Every op has a duration of its own."""
        return Sizes(schedule.ops, list(range(len(schedule.ops))))

    def duration_ns(self, op: Op) -> int:
        if op.id not in self._durations:
            raise UserError("timeline", found=f"no span of {op.id}", allowed="a timeline of this very schedule", fix="run the plan again")
        return self._durations[op.id]
