"""Evaluator: times a schedule in one pass without contention, and computes lower bounds.

    start(op) = max(end of the op before it on its lane, ends of `after`) + dispatch(lane)
    end(op) = start(op) + duration(op)

The discrete-event engine also models contention: ops of busy lanes slow each other down. Without
contention, engine and evaluator agree on every span, and tests compare them. The planner uses the
evaluator for a first ranking. Times are integer nanoseconds.
"""

from __future__ import annotations

import msgspec

from megatrain.simulator.costs import CostModel
from megatrain.simulator.schedule import LANES, Schedule
from megatrain.simulator.schedule.schedule import late_dependency
from megatrain.simulator.schedule.timeline import Timeline


def evaluate(schedule: Schedule, costs: CostModel) -> Timeline:
    """Returns the predicted timeline without contention.

    Raises ScheduleError if an op depends on a later one.
    """
    sizes, ends = costs.sizes(schedule), _ends(schedule, _durations_ns(schedule, costs))
    times = [costs.duration_ns(op) for op in sizes.ops]
    spans = ((end - times[size], end) for size, end in zip(sizes.which, ends, strict=True))
    return Timeline.of("predicted", schedule, spans)


def uncontended_makespan_ns(schedule: Schedule, costs: CostModel) -> int:
    """Returns the end of the last op of `evaluate`, in nanoseconds, without building a timeline."""
    return two_groups_ns(schedule, costs)[0]


def two_groups_ns(schedule: Schedule, costs: CostModel, group: int = 1) -> tuple[int, int]:
    """Returns `uncontended_makespan_ns` of a step of two groups of micro-batches, and the
    nanoseconds that one more group would add.

    The second value is the time from the end of the first group's compute to the end of the second
    group's. It is 0 for a step of one group. `group` is the number of micro-batches in a group.
    """
    ends = _ends(schedule, _durations_ns(schedule, costs))
    compute = [ends[op] for op in schedule.compiled.micro_batches[group - 1 :: group]]
    return max(ends, default=0), max(compute[1] - compute[0], 0) if compute[1:] else 0


def _durations_ns(schedule: Schedule, costs: CostModel) -> list[int]:
    """Returns dispatch time + duration of every op, in program order. The cost model is asked once
    per distinct op size.
    """
    if schedule.compiled.fault:
        raise late_dependency(schedule.compiled.fault)
    sizes, dispatch = costs.sizes(schedule), costs.dispatch_ns
    times = [dispatch.get(op.lane, 0) + costs.duration_ns(op) for op in sizes.ops]
    return [times[size] for size in sizes.which]


def _ends(schedule: Schedule, times: list[int]) -> list[int]:
    """Returns the ends of ops that take `times`, in program order."""
    free = [0] * len(LANES)
    ends: list[int] = []
    ended = ends.append
    for lane, after, time in zip(
        schedule.compiled.lanes, schedule.compiled.after, times, strict=True
    ):
        start = free[lane]
        for other in after:
            if ends[other] > start:
                start = ends[other]
        free[lane] = start = start + time
        ended(start)
    return ends


class LowerBounds(msgspec.Struct, frozen=True, kw_only=True):
    """What limits a schedule. Times are in nanoseconds, with dispatch and without contention."""

    lanes_ns: dict[str, int]
    """Lane -> the sum of the times of its ops."""
    critical_path_ns: int
    """The longest chain of ops that depend on each other, through `after` or through a buffer. The
    order of ops on a lane is not a dependency here."""
    lower_bound_ns: int
    """A lower bound on the makespan of any schedule with these ops, dependencies and slots, for any
    order of ops on each lane. The earliest start of an op follows from the chains of dependencies
    before it. Each lane runs its ops in the order of their earliest starts, and the bound is the
    end of the lane that ends last."""
    latest: str = ""
    """The lane that sets the lower bound."""
    sum_ns: int
    """The sum of the times of all ops."""

    @property
    def binding(self) -> str:
        """The lane with the most work."""
        return max(self.lanes_ns, key=self.lanes_ns.__getitem__, default="none")


def bounds(schedule: Schedule, costs: CostModel) -> LowerBounds:
    """Returns bounds on the makespan of `schedule`, which hold with any contention.

    Raises ScheduleError if an op depends on a later one.
    """
    times, compiled = _durations_ns(schedule, costs), schedule.compiled
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
    return LowerBounds(
        lanes_ns=lanes,
        critical_path_ns=max(chain, default=0),
        lower_bound_ns=latest.get(last, 0),
        latest=last,
        sum_ns=sum(lanes.values()),
    )
