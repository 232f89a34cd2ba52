"""Properties of the simulator and the evaluator on random schedules and every policy's plans.

The properties are checked from the spans of a timeline alone.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.simulator import policies
from megatrain.simulator.costs.contention import PARTS, ContentionModel, Demand
from megatrain.simulator.costs.protocol import EstimatedCosts
from megatrain.simulator.engine import discrete_event as engine
from megatrain.simulator.engine.discrete_event import DeadlockError, simulate
from megatrain.simulator.engine.evaluator import bounds, evaluate, uncontended_makespan_ns
from megatrain.simulator.hardware.cost_table import HostMemorySpec
from megatrain.simulator.schedule import LANES, Op, Schedule, Sizes
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline


class Given(EstimatedCosts):
    """A cost model with given durations.

    With `memory`, each op also demands 1 GB/s of host DRAM, one byte per nanosecond.
    """

    step_overhead_ns = 0

    def __init__(
        self,
        durations: Mapping[str, int],
        contention: Mapping[str, Mapping[str, float]] | None = None,
        dispatch_ns: Mapping[str, int] | None = None,
        memory: HostMemorySpec | None = None,
    ) -> None:
        self.durations, self.contention, self.dispatch_ns, self.memory = (
            durations,
            contention or {},
            dispatch_ns or {},
            memory,
        )
        self.sharing = ContentionModel(self.contention, memory)

    def sizes(self, schedule: Schedule) -> Sizes:
        return Sizes(schedule.ops, list(range(len(schedule.ops))))

    def duration_ns(self, op: Op) -> int:
        return self.durations[op.id]

    def demand(self, op: Op) -> Demand | None:
        return self.sharing.demand(op.lane, self.durations[op.id], self.durations[op.id])


@st.composite
def programs(draw: st.DrawFn) -> Schedule:
    """Draws a schedule of up to 16 ops. Each may depend on any earlier ops of other lanes."""
    ops: list[Op] = []
    for index in range(draw(st.integers(1, 16))):
        lane = draw(st.sampled_from(LANES))
        others = [op.id for op in ops if op.lane != lane]
        after = draw(st.lists(st.sampled_from(others), unique=True, max_size=3)) if others else []
        ops.append(Op(id=f"F{index}", lane=lane, after=tuple(after)))
    return Schedule(policy="random", buffers=(), ops=tuple(ops))


@st.composite
def cases(draw: st.DrawFn, *, contention: bool, dispatch: bool) -> tuple[Schedule, Given]:
    schedule = draw(programs())
    durations = {op.id: draw(st.integers(0, 30)) for op in schedule.ops}
    rates = (
        {
            lane: {
                other: draw(st.sampled_from([1.0, 0.9, 0.75, 0.5, 0.333]))
                for other in LANES
                if other != lane
            }
            for lane in LANES
        }
        if contention
        else {}
    )
    latencies = {lane: draw(st.integers(0, 5)) for lane in LANES} if dispatch else {}
    return schedule, Given(durations, rates, latencies)


def assert_played(schedule: Schedule, costs: Given, timeline: Timeline) -> None:
    """Asserts that every op starts and ends exactly when the rules say.

    An op starts as early as its lane and its dependencies allow. It ends in the first nanosecond at
    which its work is done.
    """
    assert [span.op for span in timeline.spans] == [op.id for op in schedule.ops]
    span = timeline.by_op
    for lane, queue in schedule.lanes.items():
        for before, op in itertools.pairwise((None, *queue)):
            ready = max(
                [span[before.id].end_ns if before else 0]
                + [span[other].end_ns for other in op.after]
            )
            assert span[op.id].start_ns == ready + costs.dispatch_ns.get(lane, 0), op.id
            assert span[op.id].lane == lane
    for one in timeline.spans:
        done = []
        for time in range(one.start_ns, one.end_ns):
            busy = [each for each in timeline.spans if each.start_ns <= time < each.end_ns]
            rate = Fraction(PARTS)
            for other in busy:
                rate *= Fraction(str(costs.contention.get(one.lane, {}).get(other.lane, 1.0)))
            if costs.memory:
                asked = [
                    costs.demand(schedule.by_id[each.op]) or Demand(each.lane) for each in busy
                ]
                rate = Fraction(costs.rates(tuple(asked))[busy.index(one)])
            done.append(int(rate))
        work = costs.durations[one.op] * PARTS
        assert sum(done) >= work, f"{one.op} ends before its work is done"
        assert not done or sum(done[:-1]) < work, f"{one.op} goes on after its work is done"


@given(cases(contention=True, dispatch=True))
def test_the_engine_plays_every_program_by_the_rules(case: tuple[Schedule, Given]) -> None:
    schedule, costs = case
    timeline = simulate(schedule, costs)
    assert_played(schedule, costs, timeline)
    assert simulate(schedule, costs) == timeline


@given(
    cases(contention=True, dispatch=True),
    st.builds(
        HostMemorySpec, gb_per_s=st.floats(0.5, 5), cpu_weight=st.sampled_from([0.5, 1.0, 3.3])
    ),
)
def test_the_engine_shares_host_memory_by_the_rules(
    case: tuple[Schedule, Given], memory: HostMemorySpec
) -> None:
    """Ops of the link and the cpu lane share a host memory that is too slow for all of them.

    Each op demands 1 GB/s times its cost.
    """
    schedule, costs = case
    shared = Given(costs.durations, costs.contention, costs.dispatch_ns, memory)
    assert_played(schedule, shared, simulate(schedule, shared))


@given(
    cases(contention=True, dispatch=True),
    st.none()
    | st.builds(
        HostMemorySpec, gb_per_s=st.floats(0.5, 5), cpu_weight=st.sampled_from([0.5, 1.0, 3.3])
    ),
)
def test_the_makespan_is_the_end_of_the_timeline_by_simpy(
    case: tuple[Schedule, Given], memory: HostMemorySpec | None
) -> None:
    """The loop without simpy gives the same timeline as simpy, and `makespan_ns` is its end."""
    schedule, costs = case
    for dispatch in ({}, costs.dispatch_ns):
        shared = Given(costs.durations, costs.contention, dispatch, memory)
        timeline = simulate(schedule, shared)
        assert engine.play(schedule, shared) == timeline
        assert engine.makespan_ns(schedule, shared) == timeline.makespan_ns


@given(cases(contention=False, dispatch=True))
def test_without_contention_engine_and_evaluator_agree(case: tuple[Schedule, Given]) -> None:
    schedule, costs = case
    timeline = evaluate(schedule, costs)
    assert simulate(schedule, costs) == timeline
    assert uncontended_makespan_ns(schedule, costs) == timeline.makespan_ns


@given(cases(contention=False, dispatch=False))
def test_the_makespan_lies_between_its_bounds(case: tuple[Schedule, Given]) -> None:
    schedule, costs = case
    limits, makespan = bounds(schedule, costs), evaluate(schedule, costs).makespan_ns
    assert limits.lanes_ns == {
        lane: sum(costs.durations[op.id] for op in queue) for lane, queue in schedule.lanes.items()
    }
    assert max(limits.lanes_ns.values()) <= limits.lower_bound_ns
    assert (
        limits.critical_path_ns
        <= limits.lower_bound_ns
        <= makespan
        <= limits.sum_ns
        == sum(costs.durations.values())
    )


@given(cases(contention=True, dispatch=False))
def test_contention_never_helps_below_the_bounds(case: tuple[Schedule, Given]) -> None:
    """With contention, no step is shorter than its lower bound."""
    schedule, costs = case
    assert simulate(schedule, costs).makespan_ns >= bounds(schedule, costs).lower_bound_ns


@given(cases(contention=False, dispatch=False), st.integers(2, 1000))
def test_durations_scaled_scale_all_times(case: tuple[Schedule, Given], factor: int) -> None:
    """Without contention, multiplying all durations by n multiplies all times by n."""
    schedule, costs = case
    slower = simulate(
        schedule, Given({op: factor * duration for op, duration in costs.durations.items()})
    )
    for before, after in zip(simulate(schedule, costs).spans, slower.spans, strict=True):
        assert (after.start_ns, after.end_ns) == (factor * before.start_ns, factor * before.end_ns)


@given(cases(contention=False, dispatch=True), st.data())
def test_without_contention_longer_ops_end_nothing_earlier(
    case: tuple[Schedule, Given], data: st.DataObject
) -> None:
    schedule, costs = case
    longer = {
        op: duration + data.draw(st.integers(0, 10)) for op, duration in costs.durations.items()
    }
    for before, after in zip(
        simulate(schedule, costs).spans,
        simulate(schedule, Given(longer, {}, costs.dispatch_ns)).spans,
        strict=True,
    ):
        assert after.start_ns >= before.start_ns
        assert after.end_ns >= before.end_ns


@given(programs(), st.data())
def test_a_reversed_dependency_is_simulated_or_named_as_a_deadlock(
    schedule: Schedule, data: st.DataObject
) -> None:
    """With a reversed dependency, either all ops still run in some order, or there is a deadlock.

    The error of a deadlock names every blocked op.
    """
    late = [(a, b) for a, b in itertools.combinations(schedule.ops, 2) if a.lane != b.lane]
    if not late:
        return
    first, second = data.draw(st.sampled_from(late))
    turned = tuple(
        msgspec.structs.replace(op, after=(*op.after, second.id)) if op is first else op
        for op in schedule.ops
    )
    cyclic = Schedule(policy="random", buffers=(), ops=turned)
    costs = Given({op.id: 1 for op in turned})
    ahead = {op.id: set(op.after) for op in turned}
    for queue in cyclic.lanes.values():
        for before, op in itertools.pairwise(queue):
            ahead[op.id].add(before.id)
    runnable: set[str] = set()
    while more := {op for op in ahead if op not in runnable and ahead[op] <= runnable}:
        runnable |= more
    if len(runnable) == len(turned):
        assert_played(cyclic, costs, simulate(cyclic, costs))
        assert engine.makespan_ns(cyclic, costs) == simulate(cyclic, costs).makespan_ns
    else:
        with pytest.raises(DeadlockError) as deadlock:
            simulate(cyclic, costs)
        with pytest.raises(DeadlockError, match=re.escape(str(deadlock.value))):
            engine.makespan_ns(cyclic, costs)
        for lane, queue in cyclic.lanes.items():
            stuck = next((op for op in queue if op.id not in runnable), None)
            assert (
                (f"{lane} is blocked at {stuck.id}," in str(deadlock.value))
                if stuck
                else (f"{lane} is blocked" not in str(deadlock.value))
            )


@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"accumulation": 2, "checkpoint_interval": 3},
        {"tied": True, "gradient_slots": 1, "clipping": "none"},
    ],
)
def test_lowered_plans_are_played_by_the_rules(
    make_plan: Callable[..., Plan], policy: str, changes: dict[str, Any]
) -> None:
    """The simulator and the evaluator play the schedules of every policy by the same rules."""
    schedule = policies.lower(make_plan(policy, **changes))
    durations = {
        op.id: 1 + (len(op.id) * 7 + index * 5) % 23 for index, op in enumerate(schedule.ops)
    }
    free = Given(durations, {}, {"compute": 2, "cpu": 3})
    assert simulate(schedule, free) == evaluate(schedule, free)
    assert_played(schedule, free, evaluate(schedule, free))
    shared = Given(
        durations,
        {
            "h2d": {"d2h": 0.9, "cpu": 0.5},
            "d2h": {"h2d": 0.9, "cpu": 0.4},
            "cpu": {"h2d": 0.8},
            "compute": {"h2d": 0.99},
        },
    )
    timeline = simulate(schedule, shared)
    assert_played(schedule, shared, timeline)
    assert engine.makespan_ns(schedule, shared) == timeline.makespan_ns
    limits = bounds(schedule, shared)
    assert limits.critical_path_ns <= limits.lower_bound_ns <= timeline.makespan_ns
