"""Evaluator: the schedule in one pass, as if busy lanes did not slow each other; and bounds that no schedule of these ops can beat.

    start(op) = max(end of the op before it on its lane, ends of `after`) + dispatch(lane),    end(op) = start(op) + duration(op)

It does not model contention: that is the engine's. Without contention the two agree span by span, so this is the planner's first
ranking and the engine's oracle. Times are integer nanoseconds.
"""

from __future__ import annotations

import msgspec

from megatrain.simulator.costs import CostModel
from megatrain.simulator.schedule import LANES, Schedule, ScheduleError
from megatrain.simulator.timeline import Span, Timeline


def evaluate(schedule: Schedule, costs: CostModel) -> Timeline:
    """The predicted timeline without contention. Raises ScheduleError for a dependency that does not stand before its op."""
    ends, starts = _times(schedule, costs)
    spans = [Span(op=op.id, lane=op.lane, start_ns=start, end_ns=end) for op, start, end in zip(schedule.ops, starts, ends, strict=True)]
    return Timeline(name="predicted", digest=schedule.digest, spans=tuple(spans))


def makespan_ns(schedule: Schedule, costs: CostModel) -> int:
    """End of the last op of `evaluate`, without building a timeline."""
    return max(_ends(schedule, _priced(schedule, costs)), default=0)


def another_ns(schedule: Schedule, costs: CostModel) -> int:
    """What one micro-batch more would add to a step of two: from the end of the first one's compute to the end of the second's. 0 for a step of one."""
    ends = [0, 0]
    for op, end in zip(schedule.ops, _ends(schedule, _priced(schedule, costs)), strict=True):
        if op.lane == "compute" and op.id.endswith((".m0", ".m1")):
            ends[op.id.endswith(".m1")] = end
    return max(ends[1] - ends[0], 0)


def _priced(schedule: Schedule, costs: CostModel) -> list[int]:
    """Dispatch and duration of every op, in program order; looked up once a size."""
    if schedule.compiled.fault:
        raise ScheduleError(schedule.compiled.fault)
    sizes, dispatch = costs.sizes(schedule), costs.dispatch_ns
    times = [dispatch.get(op.lane, 0) + costs.duration_ns(op) for op in sizes.ops]
    return [times[size] for size in sizes.which]


def _ends(schedule: Schedule, times: list[int]) -> list[int]:
    """Ends in program order, of ops that take `times`."""
    free = [0] * len(LANES)
    ends: list[int] = []
    ended = ends.append
    for lane, after, time in zip(schedule.compiled.lanes, schedule.compiled.after, times, strict=True):
        start = free[lane]
        for other in after:
            if ends[other] > start:
                start = ends[other]
        free[lane] = start = start + time
        ended(start)
    return ends


def _times(schedule: Schedule, costs: CostModel) -> tuple[list[int], list[int]]:
    """Ends and starts, in program order."""
    sizes = costs.sizes(schedule)
    ends = _ends(schedule, _priced(schedule, costs))
    times = [costs.duration_ns(op) for op in sizes.ops]
    return ends, [end - times[size] for end, size in zip(ends, sizes.which, strict=True)]


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What limits a schedule, in nanoseconds, dispatch included, contention not."""

    lanes_ns: dict[str, int]
    """sum of each lane's ops"""
    critical_path_ns: int
    """longest chain of ops that wait for each other: for another lane, or for what the other writes; not for their turn on their lane"""
    lower_bound_ns: int
    """however each lane's queue were reordered, no schedule of these ops, dependencies and slots ends earlier: the latest lane when each
    runs its ops in the order in which chains of dependencies let them start"""
    latest: str = ""
    """the lane that sets the lower bound"""
    sum_ns: int
    """all ops, one after the other"""

    @property
    def binding(self) -> str:
        """The lane with the most work."""
        return max(self.lanes_ns, key=self.lanes_ns.__getitem__, default="none")


def bounds(schedule: Schedule, costs: CostModel) -> Bounds:
    """Bounds on the makespan of `schedule`, whatever the contention. Raises ScheduleError like `evaluate`."""
    times, compiled = _priced(schedule, costs), schedule.compiled
    released: dict[str, list[tuple[int, int]]] = {}  # lane -> (earliest start, duration) of its ops
    chain: list[int] = []
    written: dict[str, int] = {}
    for op, after, time in zip(schedule.ops, compiled.after, times, strict=True):
        start = 0
        for other in after:
            start = max(start, chain[other])
        for buffer in op.reads:
            start = max(start, written.get(buffer, 0))
        released.setdefault(op.lane, []).append((start, time))
        end = start + time
        chain.append(end)
        for buffer in op.writes:
            written[buffer] = max(written.get(buffer, 0), end)
    lanes = {lane: sum(time for _, time in ops) for lane, ops in released.items()}
    latest: dict[str, int] = {}
    for lane, ops in released.items():
        end = 0
        for start, time in sorted(ops):
            end = max(end, start) + time
        latest[lane] = end
    last = max(latest, key=latest.__getitem__, default="")
    return Bounds(
        lanes_ns=lanes, critical_path_ns=max(chain, default=0), lower_bound_ns=latest.get(last, 0), latest=last, sum_ns=sum(lanes.values())
    )  # fmt: skip
