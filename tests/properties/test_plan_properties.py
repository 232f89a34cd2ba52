"""Properties of the schedules of every policy, with any knobs and on any machine.

The properties are checked from the ops of a schedule and the spans of a timeline alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import Datasheet
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.engine.discrete_event import makespan_ns, simulate
from megatrain.simulator.engine.evaluator import (
    bounds,
    evaluate,
    two_groups_ns,
    uncontended_makespan_ns,
)
from megatrain.simulator.hardware.cost_table import HostMemorySpec
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import Account, account, usage
from megatrain.simulator.model.layer import DTYPE_BYTES, EMBEDDING
from megatrain.simulator.model.state_format import EXACT, FORMATS
from megatrain.simulator.model.workload import Clipping
from megatrain.simulator.planner.assessment import (
    InShortGroups,
    plan_account,
    schedule_to_time,
    with_knobs,
)
from megatrain.simulator.planner.filling import CLASSES
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.policies.building.clipping import _persistent
from megatrain.simulator.policies.building.parameter_store_policy import _computed, _stored
from megatrain.simulator.policies.building.training_step import _workspaces
from megatrain.simulator.policies.overlapped import _distinct, _homes
from megatrain.simulator.policies.registry import POLICIES
from megatrain.simulator.policies.resident import Resident
from megatrain.simulator.schedule import Schedule, Sizes, base_buffer, serialized
from megatrain.simulator.schedule.arithmetic import layer_state
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.schedule.timeline import Timeline

H200 = HardwareSpec.load("h200")
MakePlan = Callable[..., Plan]


machines = st.builds(
    msgspec.structs.replace,
    st.just(
        msgspec.structs.replace(H200, h2d_curve=(), d2h_curve=(), duplex_curve=(), host_memory=None)
    ),
    h2d_gb_per_s=st.floats(0.5, 60),
    d2h_gb_per_s=st.floats(0.5, 60),
    duplex_fraction=st.floats(0.3, 1),
    link_latency_ns=st.integers(0, 10_000),
    host_gb_per_s=st.floats(1, 100),
    cpu_update_per_s=st.floats(1e7, 1e10),
    peak_tflops=st.fixed_dictionaries({"bf16": st.floats(0.1, 900), "fp32": st.floats(0.1, 60)}),
    host_memory=st.none()
    | st.builds(HostMemorySpec, gb_per_s=st.floats(1, 300), cpu_weight=st.floats(0.2, 5)),
)


def drawn(make_plan: MakePlan, policy: str, data: st.DataObject) -> tuple[Plan, Schedule]:
    """Draws a plan of `policy` with random knobs, down to the smallest that it accepts."""
    state = data.draw(st.sampled_from(list(FORMATS)))
    changes: dict[str, Any] = {
        "state": state,
        "layers": data.draw(st.integers(1, 4)),
        "tied": (tied := data.draw(st.booleans())),
        "accumulation": (accumulation := data.draw(st.integers(1, 3))),
        "clipping": data.draw(st.sampled_from(get_args(Clipping))),
        "dtype": data.draw(st.sampled_from(["bf16", "fp32"])) if state == EXACT else "bf16",
        "gradient_slots": data.draw(st.integers(1, 3)),
        "gradient_staging": data.draw(st.integers(1, 3)),
        "chunk_bytes": data.draw(st.sampled_from([6_000, 20_000, 2**20])),
        "checkpoint_interval": data.draw(st.integers(1, 5)),
        "state_slots": data.draw(st.integers(1, 3)),
        "weights_ahead": data.draw(st.integers(0, 1)),
        "compiled": data.draw(st.booleans()),
        "short_recompute": data.draw(st.booleans()),
        "rebuild_outputs": data.draw(st.integers(0, 1)),
        "micro_batch_group": 1 if tied else data.draw(st.sampled_from([1, accumulation])),
        "placement": Placement(
            **{
                name: data.draw(st.sampled_from(["", "0", "all"]))
                for name in Placement.__struct_fields__
            }
        ),
    }
    try:
        plan = make_plan(policy, **changes, weight_slots=data.draw(st.integers(1, 5)))
        return plan, policies.lower(plan)
    except UserError:  # the policy does not let a plan choose the number of weight slots
        plan = make_plan(policy, **changes)
        return plan, policies.lower(plan)


every_policy = pytest.mark.parametrize("policy", policies.names())


@every_policy
@settings(max_examples=40)
@given(data=st.data())
def test_any_plan_on_any_machine_plays_by_the_rules(
    make_plan: MakePlan, policy: str, data: st.DataObject
) -> None:
    """A schedule has no deadlock and no race, and its step is not below its lower bound.

    No link is overloaded, no slot is held twice, and no pool exceeds its account.
    """
    plan, schedule = drawn(make_plan, policy, data)
    hardware = data.draw(machines)
    costs = Datasheet(hardware, plan.model, plan.workload)
    timeline = simulate(schedule, costs)
    schedule.check()
    assert len(timeline.spans) == len(schedule.ops)
    assert timeline.makespan_ns >= bounds(schedule, costs).lower_bound_ns
    assert_links_carry_what_they_can(schedule, timeline, costs, hardware)
    assert_holds_are_disjoint(schedule, timeline)
    assert_pools_stay_within_their_account(schedule, timeline)


@every_policy
@settings(max_examples=60)
@given(data=st.data())
def test_no_plan_is_faster_than_its_lower_bounds(
    make_plan: MakePlan, policy: str, data: st.DataObject
) -> None:
    """Neither the plan's own step nor a step with more groups is below its lower bound.

    The search extrapolates the step with more groups of micro-batches from two.
    """
    plan, schedule = drawn(make_plan, policy, data)
    costs = Datasheet(data.draw(machines), plan.model, plan.workload)
    least, time = LowerBound(plan, costs), makespan_ns(schedule, costs)
    assert least.compute_ns(plan) <= least.step_ns(plan) <= time
    more, group = data.draw(st.integers(1, 3)), plan.knobs.micro_batch_group
    longer = msgspec.structs.replace(
        plan, workload=msgspec.structs.replace(plan.workload, accumulation=(2 + more) * group)
    )
    least, two = LowerBound(longer, costs), policies.lower(with_knobs(longer, groups=2))
    short = InShortGroups(costs, group)
    assert (
        least.step_ns(longer)
        <= makespan_ns(two, short) + more * (two_groups_ns(two, short, min(group, 2))[1])
    )
    assert least.compute_ns(longer) <= makespan_ns(policies.lower(longer), costs)


@every_policy
@settings(max_examples=40)
@given(data=st.data())
def test_a_schedule_lowered_for_timing_has_the_times_of_the_whole_one(
    make_plan: MakePlan, policy: str, data: st.DataObject
) -> None:
    """A schedule that is lowered only for timing has no ops and no buffers, but the same times."""
    plan, schedule = drawn(make_plan, policy, data)
    costs = Datasheet(data.draw(machines), plan.model, plan.workload)
    quick, read = schedule_to_time(plan, costs), msgspec.structs.replace(schedule)
    assert (quick.ops, quick.buffers) == ((), ())
    for time in (makespan_ns, uncontended_makespan_ns, two_groups_ns):
        assert time(quick, costs) == time(schedule, costs) == time(read, costs)
    assert schedule.compiled == read.compiled
    assert schedule.sizes.which == quick.sizes.which


class _OpByOp(Datasheet):
    def sizes(self, schedule: Schedule) -> Sizes:
        return Sizes(schedule.ops, list(range(len(schedule.ops))))


class _OwnLower(Resident):
    def lower(self, plan: Plan) -> Schedule:
        return serialized(super().lower(plan))


def test_a_cost_model_or_policy_that_needs_all_ops_gets_them(
    make_plan: MakePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan("overlapped")
    costs = _OpByOp(H200, plan.model, plan.workload)
    for each in (costs, ScaledCosts(costs, lambda op: op)):
        assert schedule_to_time(plan, each) == policies.lower(plan)
    monkeypatch.setitem(POLICIES._loaded, "own", _OwnLower())
    own = make_plan("own")
    assert schedule_to_time(own, Datasheet(H200, own.model, own.workload)) == policies.lower(own)


@settings(max_examples=60)
@given(data=st.data())
def test_results_do_not_depend_on_the_plans_before(
    make_plan: MakePlan, data: st.DataObject
) -> None:
    """Lower bounds, schedules and memory are the same whether or not plans that differ only in
    their placement and the size of copies were looked at before.

    Parts of these results are cached for a whole search.
    """
    plan, _ = drawn(make_plan, "overlapped", data)
    costs = Datasheet(data.draw(machines), plan.model, plan.workload)
    placements = st.builds(
        Placement,
        **{name: st.sampled_from(["", "e", "0", "all"]) for name in CLASSES},
        offloaded_inputs=st.sampled_from(["", "all"]),
        host_updated=st.sampled_from(["", "0", "all"]),
    )
    shared = LowerBound(plan, costs)
    for placement in data.draw(st.lists(placements, min_size=2, max_size=5)):
        chunk = data.draw(st.sampled_from([6_000, 20_000]))
        other = with_knobs(plan, placement=placement, chunk_bytes=chunk)
        later = shared.step_ns(other), policies.lower_uncached(other).digest, memory(other, costs)
        for cached in (_persistent, _distinct, _homes, _stored, _computed, _workspaces):
            cached.cache_clear()
        first = LowerBound(plan, costs).step_ns(other), policies.lower_uncached(other).digest
        assert later == (*first, memory(other, costs))


def memory(plan: Plan, costs: Datasheet) -> Account:
    """Returns the memory of a plan, which does not depend on whether the advice is written."""
    outline = policies.outline(plan, merged=True)
    with_advice = plan_account(plan, outline, costs)
    without = plan_account(plan, outline, costs, advise=False)
    assert msgspec.structs.replace(with_advice, advice="") == without
    assert without.advice == ""
    return with_advice


def assert_links_carry_what_they_can(
    schedule: Schedule, timeline: Timeline, costs: Datasheet, hardware: HardwareSpec
) -> None:
    """Asserts that no link carries more bytes within a window than its rate allows.

    The bytes of a window are those of the ops that start and end in it. Shared host DRAM counts as
    a link.
    """
    limits = {"h2d": hardware.h2d_gb_per_s, "d2h": hardware.d2h_gb_per_s}
    loads = {
        lane: [(timeline.by_op[op.id], float(op.bytes)) for op in schedule.lanes.get(lane, ())]
        for lane in limits
    }
    if hardware.host_memory:
        demands = [(op, costs.demand(op)) for op in schedule.ops]
        loads["dram"] = [
            (timeline.by_op[op.id], demand.traffic * costs.duration_ns(op) / 1e9)
            for op, demand in demands
            if demand and demand.traffic
        ]
        limits["dram"] = hardware.host_memory.gb_per_s
    for name, load in loads.items():
        times = sorted({time for span, _ in load for time in (span.start_ns, span.end_ns)})
        for begin, end in itertools.combinations(times[:: 1 + len(times) // 12], 2):
            inside = sum(
                size for span, size in load if span.start_ns >= begin and span.end_ns <= end
            )
            assert inside <= limits[name] * (end - begin) * (1 + 1e-6), name


def assert_holds_are_disjoint(schedule: Schedule, timeline: Timeline) -> None:
    """Asserts that no slot is acquired before the last op that uses it has ended."""
    begun: dict[str, int] = {}
    ended: dict[str, int] = defaultdict(int)
    for op in schedule.ops:
        span = timeline.by_op[op.id]
        for slot in op.acquires:
            assert slot not in begun
            begun[slot] = span.start_ns
            assert begun[slot] >= ended[slot], f"{op.id} acquires {slot} while it is in use"
        for name in map(base_buffer, op.buffers):
            assert schedule.buffer[name].persistent or span.start_ns >= begun[name]
            ended[name] = max(ended[name], span.end_ns)
        for slot in op.releases:
            del begun[slot]
    assert not begun


def assert_pools_stay_within_their_account(schedule: Schedule, timeline: Timeline) -> None:
    """Asserts that no pool's peak exceeds its account, and that every slot is released."""
    planned = account(schedule, 2**60, 2**60, None, 0).pools
    kept: dict[str, int] = defaultdict(int)
    for buffer in schedule.buffers:
        kept[buffer.pool] += buffer.allocated if buffer.persistent else 0
    for pool, steps in usage(schedule, timeline).items():
        assert kept[pool] <= max(size for _, size in steps) <= planned[pool]
        assert steps[-1][1] == kept[pool]


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_the_peak_of_a_pool_with_all_slots_in_use_is_its_account(
    make_plan: MakePlan, slots: int
) -> None:
    """If loads run ahead into every slot, the peak over time equals that of the account."""
    plan = make_plan("k_buffer", weight_slots=slots, layers=6)
    schedule = policies.lower(plan)
    costs = Datasheet(
        msgspec.structs.replace(H200, peak_tflops={"bf16": 1e-5}), plan.model, plan.workload
    )
    steps = usage(schedule, simulate(schedule, costs))
    for pool in ("device.weights", "device.checkpoints", "device.activations"):
        assert (
            max(size for _, size in steps[pool])
            == account(schedule, 2**60, 2**60, None, 0).pools[pool]
        )


@every_policy
@settings(max_examples=40)
@given(data=st.data())
def test_bytes_are_conserved_by_tensor_class(
    make_plan: MakePlan, policy: str, data: st.DataObject
) -> None:
    """The copies of a tensor neither overlap nor leave a gap, and each layer is updated once."""
    plan, schedule = drawn(make_plan, policy, data)
    stack, width = plan.model.stack, DTYPE_BYTES[plan.workload.dtype]
    sums = {
        layer: 4
        if layer_state(plan, layer)["gradients"].bytes == 4 and policy == "overlapped"
        else width
        for layer in stack
    }
    journeys = defaultdict(list)
    updated: dict[str, int] = defaultdict(int)
    for op in schedule.ops:
        if op.kind in ("load_weights", "save_gradients", "load_gradients"):
            journeys[op.kind, op.layer, op.id.partition(".c")[0]].append((op.offset, op.bytes))
        if op.kind in ("update", "cpu_update"):
            updated[op.layer] += op.parameters
    for (kind, layer, _), copies in journeys.items():
        assert [offset for offset, _ in copies] == [
            0,
            *itertools.accumulate(size for _, size in copies[:-1]),
        ]
        assert (
            sum(size for _, size in copies)
            == (width if kind == "load_weights" else sums[layer]) * stack[layer].elements
        )
    assert updated == {name: layer.elements for name, layer in stack.items()}
    saved = defaultdict(int)
    for kind, layer, _ in journeys:
        saved[layer] += kind == "save_gradients"
    for layer, times in saved.items():
        # The last contribution is not saved if the device updates the layer during backward.
        last = (
            policy == "overlapped"
            and plan.workload.clipping != "global"
            and layer not in plan.placed("host_updated")
        )
        # a group of micro-batches is summed on the device and leaves it once, if each layer is a
        # block of its own
        summed = policy == "overlapped" and plan.knobs.checkpoint_interval == 1
        group = plan.knobs.micro_batch_group if summed else 1
        sums_of_groups = -(-plan.workload.accumulation // group)
        assert times in (
            0,
            sums_of_groups * (2 if layer == EMBEDDING and plan.model.tied else 1) - last,
        )


@every_policy
@settings(max_examples=40)
@given(data=st.data())
def test_without_contention_fewer_dependencies_end_nothing_later(
    make_plan: MakePlan, policy: str, data: st.DataObject
) -> None:
    plan, schedule = drawn(make_plan, policy, data)
    costs = Datasheet(data.draw(machines), plan.model, plan.workload)
    waiting = [index for index, op in enumerate(schedule.ops) if op.after]
    if not waiting:
        return
    index = data.draw(st.sampled_from(waiting))
    op = schedule.ops[index]
    gone = data.draw(st.sampled_from(op.after))
    freed = msgspec.structs.replace(op, after=tuple(other for other in op.after if other != gone))
    looser = msgspec.structs.replace(
        schedule, ops=(*schedule.ops[:index], freed, *schedule.ops[index + 1 :])
    )
    for before, after in zip(
        evaluate(schedule, costs).spans, evaluate(looser, costs).spans, strict=True
    ):
        assert after.end_ns <= before.end_ns


@pytest.mark.parametrize("knob", ["gradient_slots", "gradient_staging"])
@settings(max_examples=40)
@given(data=st.data())
def test_without_contention_deeper_buffers_are_no_slower(
    make_plan: MakePlan, knob: str, data: st.DataObject
) -> None:
    """A second gradient slot or staging buffer never makes the step longer.

    Weight slots are left out, because more of them also change which weights are loaded.
    """
    plan, _ = drawn(make_plan, "k_buffer", data)
    costs = Datasheet(data.draw(machines), plan.model, plan.workload)
    depth = getattr(plan.knobs, knob)
    deeper = msgspec.structs.replace(
        plan, knobs=msgspec.structs.replace(plan.knobs, **{knob: depth + 1})
    )
    assert uncontended_makespan_ns(policies.lower(deeper), costs) <= uncontended_makespan_ns(
        policies.lower(plan), costs
    )
