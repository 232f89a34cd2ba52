"""Evaluator: the schedule in one pass, as if busy lanes did not slow each other; and bounds that no schedule of these ops can beat.

    start(op) = max(end of the op before it on its lane, ends of `after`) + dispatch(lane),    end(op) = start(op) + duration(op)

It does not model contention: that is the engine's. Without contention the two agree span by span, so this is the planner's first
ranking and the engine's oracle. Times are integer nanoseconds.
"""

from __future__ import annotations

import msgspec

from megatrain.simulator.costs import CostModel
from megatrain.simulator.schedule import Schedule, ScheduleError
from megatrain.simulator.timeline import Span, Timeline


def evaluate(schedule: Schedule, costs: CostModel) -> Timeline:
    """The predicted timeline without contention. Raises ScheduleError for a dependency that does not stand before its op."""
    ends, starts = _times(schedule, costs)
    spans = tuple(Span(op=op.id, lane=op.lane, start_ns=start, end_ns=ends[op.id]) for op, start in zip(schedule.ops, starts, strict=True))
    return Timeline(name="predicted", digest=schedule.digest, spans=spans)


def makespan_ns(schedule: Schedule, costs: CostModel) -> int:
    """End of the last op of `evaluate`, without building a timeline."""
    return max(_times(schedule, costs)[0].values(), default=0)


def _times(schedule: Schedule, costs: CostModel) -> tuple[dict[str, int], list[int]]:
    """Ends by op id, and starts in program order."""
    duration, dispatch = costs.duration_ns, costs.dispatch_ns
    free: dict[str, int] = {}
    ends: dict[str, int] = {}
    starts: list[int] = []
    op = None
    try:
        for op in schedule.ops:
            lane = op.lane
            start = free.get(lane, 0)
            for other in op.after:
                end = ends[other]
                if end > start:
                    start = end
            start += dispatch.get(lane, 0)
            starts.append(start)
            free[lane] = ends[op.id] = start + duration(op)
    except KeyError as error:
        if op is None or error.args[0] not in op.after:
            raise
        raise ScheduleError(f"{op.id}: depends on {error.args[0]}, which does not stand before it") from None
    return ends, starts


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What limits a schedule, in nanoseconds, dispatch included, contention not."""

    lanes_ns: dict[str, int]
    """sum of each lane's ops"""
    critical_path_ns: int
    """longest chain of ops that wait for each other: for another lane, or for what the other writes; not for their turn on their lane"""
    lower_bound_ns: int
    """however each lane's queue were reordered, no schedule of these ops, dependencies and slots ends earlier: the latest lane when each
    runs its ops in the order in which chains of dependencies let them start"""
    sum_ns: int
    """all ops, one after the other"""

    @property
    def binding(self) -> str:
        """The lane with the most work."""
        return max(self.lanes_ns, key=self.lanes_ns.__getitem__, default="none")


def bounds(schedule: Schedule, costs: CostModel) -> Bounds:
    """Bounds on the makespan of `schedule`, whatever the contention. Raises ScheduleError like `evaluate`."""
    released: dict[str, list[tuple[int, int]]] = {}  # lane -> (earliest start, duration) of its ops
    chain: dict[str, int] = {}
    written: dict[str, int] = {}
    for op in schedule.ops:
        missing = next((other for other in op.after if other not in chain), None)
        if missing is not None:
            raise ScheduleError(f"{op.id}: depends on {missing}, which does not stand before it")
        time = costs.dispatch_ns.get(op.lane, 0) + costs.duration_ns(op)
        start = max((chain[other] for other in op.after), default=0)
        start = max(start, max((written.get(buffer, 0) for buffer in op.reads), default=0))
        released.setdefault(op.lane, []).append((start, time))
        end = chain[op.id] = start + time
        for buffer in op.writes:
            written[buffer] = max(written.get(buffer, 0), end)
    lanes = {lane: sum(time for _, time in ops) for lane, ops in released.items()}
    bound = 0
    for ops in released.values():
        end = 0
        for start, time in sorted(ops):
            end = max(end, start) + time
        bound = max(bound, end)
    return Bounds(lanes_ns=lanes, critical_path_ns=max(chain.values(), default=0), lower_bound_ns=bound, sum_ns=sum(lanes.values()))
