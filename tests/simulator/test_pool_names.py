"""Tests that predictions and reports do not depend on the names of pools."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pool_names import with_other_pool_names

from megatrain.simulator import policies
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import makespan_ns, simulate
from megatrain.simulator.engine.evaluator import bounds
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import PROCESS, class_of, usage
from megatrain.simulator.planner.assessment import plan_account
from megatrain.simulator.planner.capacity import resized
from megatrain.simulator.plots.memory_picture import held_name
from megatrain.simulator.policies.building.evaluation import forward_only
from megatrain.simulator.schedule.arithmetic import kept_moments
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.verdict.multi_gpu import estimate

H200 = HardwareSpec.load("h200")
MIXED = Placement(
    weights="0-1,e",
    moments="0",
    gradients="1",
    saved_activations="3",
    saved_attention="2",
    offloaded_inputs="0-1",
    host_updated="1",
)
EVERY_POLICY = [*policies.names(), *policies.peers()]


def plans(make_plan: Callable[..., Plan], policy: str) -> list[Plan]:
    placements = [Placement(), MIXED] if policies.find(policy).places_state else [Placement()]
    return [
        make_plan(policy, accumulation=micros, tied=tied, clipping=clipping, placement=placement)
        for placement in placements
        for micros, tied, clipping in (
            (1, True, "global"),
            (2, False, "update"),
            (2, True, "layer"),
            (1, False, "adagc"),
        )
    ] + ([make_plan(policy, optimizer="muon")] if policy in ("overlapped", "resident") else [])


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_predictions_and_reports_are_the_same(make_plan: Callable[..., Plan], policy: str) -> None:
    for plan in plans(make_plan, policy):
        costs = cost_model(H200, plan.model, plan.workload)
        schedule = policies.lower(plan)
        other = with_other_pool_names(schedule)
        assert {buffer.pool for buffer in other.buffers}.isdisjoint(
            buffer.pool for buffer in schedule.buffers
        )
        other.check(kept_moments(plan))
        assert makespan_ns(other, costs) == makespan_ns(schedule, costs)
        assert bounds(other, costs) == bounds(schedule, costs)
        mine, its = (plan_account(plan, each, costs) for each in (schedule, other))
        assert its.classes == mine.classes
        assert (its.device_peak_bytes, its.host_peak_bytes, its.advice) == (
            mine.device_peak_bytes,
            mine.host_peak_bytes,
            mine.advice,
        )
        both = [
            estimate(plan, each, found, H200, costs, 1.0, 2)
            for each, found in ((schedule, mine), (other, its))
        ]
        assert both[0] == both[1]
        sizes = [
            [resized(buffer, 3).bytes for buffer in each.buffers] for each in (schedule, other)
        ]
        assert sizes[0] == sizes[1]
        names = [[held_name(buffer) for buffer in each.buffers] for each in (schedule, other)]
        assert names[0] == names[1]


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_memory_over_time_is_the_same(make_plan: Callable[..., Plan], policy: str) -> None:
    plan = make_plan(policy, accumulation=2)
    schedule = policies.lower(plan)
    other = with_other_pool_names(schedule)
    costs = cost_model(H200, plan.model, plan.workload)

    def by_class(each: object) -> list[tuple[str, list[tuple[int, int]]]]:
        assert isinstance(each, type(schedule))
        kinds = {buffer.pool: buffer for buffer in each.buffers}
        found = usage(each, simulate(each, costs))
        return sorted((class_of(kinds[pool]), points) for pool, points in found.items())

    assert by_class(schedule) == by_class(other)


@pytest.mark.parametrize("policy", policies.names())
def test_evaluation_needs_no_names(make_plan: Callable[..., Plan], policy: str) -> None:
    """An evaluation finds the buffers of a step by the data that they hold."""
    plan = make_plan(policy, accumulation=2, tied=True)
    schedule = policies.lower(plan)
    costs = cost_model(H200, plan.model, plan.workload)
    expected = forward_only(plan, schedule)
    found = forward_only(plan, with_other_pool_names(schedule))
    assert found.digest == with_other_pool_names(expected).digest
    assert makespan_ns(found, costs) == makespan_ns(expected, costs)


def test_buffers_that_every_gpu_has_are_counted_for_each(make_plan: Callable[..., Plan]) -> None:
    """Each GPU has its own staging buffers and offloaded inputs.

    GPUs share state on the host.
    """
    plan = make_plan("k_buffer")
    costs = cost_model(H200, plan.model, plan.workload)
    schedule = with_other_pool_names(policies.lower(plan))
    account = plan_account(plan, schedule, costs)
    own = account.pools.get(PROCESS, 0) + account.classes["host"]["staging"]
    assert own > 0
    two = estimate(plan, schedule, account, H200, costs, 1.0, 2)
    assert two.host_peak_bytes == account.host_peak_bytes + own
