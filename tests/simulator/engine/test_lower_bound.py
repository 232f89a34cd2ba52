"""Tests of lower bounds of a plan's step.

A bound is near the evaluator's time. If copies or updates limit the step, it exceeds the time of
compute.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from megatrain.simulator import policies
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.protocol import ContendedCosts
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.engine.evaluator import uncontended_makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Clipping, Workload
from megatrain.simulator.planner.lower_bound import LowerBound, _EarliestTimes
from megatrain.simulator.schedule.arithmetic import blocks_of
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

MODEL = ModelSpec.load("qwen2.5-1.5b")
PLACEMENTS = {
    "all streams": Placement(),
    "weights stay": Placement(weights="all"),
    "gradients stay": Placement(gradients="all"),
    "half stays": Placement(
        weights="e,0-13", master_low="e,0-13", moments="e,0-13", gradients="e,0-13"
    ),
    "all stays": Placement(weights="all", master_low="all", moments="all", gradients="all"),
    "the host updates": Placement(host_updated="all"),
    "the host updates half": Placement(weights="e,0-13", host_updated="14-27"),
    "offloaded_inputs": Placement(
        weights="all", master_low="all", moments="all", gradients="all", offloaded_inputs="all"
    ),
    "saved_activations": Placement(saved_activations="14-27"),
}


def plan(name: str, batch: int, clipping: Clipping, accumulation: int) -> Plan:
    work = Workload(batch=batch, sequence=1024, clipping=clipping, accumulation=accumulation)
    return Plan(
        policy="overlapped",
        hardware="h200",
        source=MODEL.name,
        model=MODEL,
        workload=work,
        device_limit_bytes=2**40,
        host_limit_bytes=2**40,
        knobs=Knobs(
            weight_slots=3,
            gradient_slots=3,
            state_slots=8,
            chunk_bytes=2**26,
            weights_ahead=1,
            placement=PLACEMENTS[name],
        ),
    )


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clipping", ["global", "none"])
@pytest.mark.parametrize("batch", [1, 16], ids=["slow link", "slow compute"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_with_enough_slots_a_bound_is_near_the_time_without_contention(
    name: str, batch: int, clipping: str, accumulation: int
) -> None:
    """The bound is nearest with slow compute.

    With a slow link and two micro-batches, compute also waits for copies that the bound leaves out.
    """
    found = plan(name, batch, clipping, accumulation)
    costs = cost_model(HardwareSpec.load("a6000"), MODEL, found.workload)
    bound, time = (
        LowerBound(found, costs).step_ns(found),
        uncontended_makespan_ns(policies.lower(found), costs),
    )
    share = 0.99 if batch == 16 else 0.88 if accumulation == 1 else 0.75
    assert share * time <= bound
    if bound > time:  # The bound includes the traffic of the host's memory, and the time does not.
        assert bound <= makespan_ns(policies.lower(found), costs)


def test_a_bound_counts_what_compute_waits_for() -> None:
    """A bound includes the copies before the first forward pass.

    With a slow link they take longer than all of compute.
    """
    found = plan("all streams", 1, "global", 1)
    least = LowerBound(found, cost_model(HardwareSpec.load("a6000"), MODEL, found.workload))
    assert least.step_ns(found) > 2 * least.compute_ns(found)


@pytest.mark.parametrize("clipping", ["global", "none"])
def test_a_bound_is_near_the_time_and_not_above_it_where_updates_are_slow(clipping: str) -> None:
    """The first chunks of a layer are updated while its last ones are still being loaded."""
    found = plan("all streams", 1, clipping, 1)
    slow = msgspec.structs.replace(HardwareSpec.load("a6000"), device_gb_per_s=20.0)
    costs = cost_model(slow, MODEL, found.workload)
    time = uncontended_makespan_ns(policies.lower(found), costs)
    assert 0.97 * time <= LowerBound(found, costs).step_ns(found) <= time


def test_cores_and_copies_share_the_memory_of_the_host() -> None:
    """A bound includes that cores and copies share the host's memory.

    The evaluator without contention does not.
    """
    found = plan("the host updates", 1, "global", 1)
    hardware = HardwareSpec.load("h200")
    assert hardware.host_memory is not None
    slow = msgspec.structs.replace(
        hardware, host_memory=msgspec.structs.replace(hardware.host_memory, gb_per_s=60.0)
    )
    costs = cost_model(slow, MODEL, found.workload)
    schedule = policies.lower(found)
    assert (
        uncontended_makespan_ns(schedule, costs)
        < LowerBound(found, costs).step_ns(found)
        <= makespan_ns(schedule, costs)
    )


@pytest.mark.parametrize("clipping", ["global", "none"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_all_compute_and_all_traffic_of_the_host_s_memory_are_counted(
    name: str, clipping: str
) -> None:
    """The bound of compute counts each op of the lane `compute`.

    The bound of the host's memory counts all copies and updates.
    """
    found = plan(name, 4, clipping, 2)
    costs = cost_model(HardwareSpec.load("h200"), MODEL, found.workload)
    assert isinstance(costs, ContendedCosts)
    ops = policies.lower(found).ops
    counted = [op for op in ops if op.lane == "compute"]
    bound, flow = LowerBound(found, costs), _EarliestTimes(LowerBound(found, costs), found, 2)
    assert bound.compute_ns(found) == sum(costs.duration_ns(op) for op in counted)
    flow.end_ns(0)
    demands = [(costs.demand(op), costs.duration_ns(op)) for op in ops]
    traffic = sum(demand.traffic * time for demand, time in demands if demand)
    assert flow.host == pytest.approx(traffic / costs.sharing.capacity)


@pytest.mark.parametrize("offloaded", [("0-2", 3), ("1", 1), ("", 0)])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_the_inputs_of_offloading_layers_are_copied_without_a_gap(
    make_plan: Callable[..., Plan], group: int, offloaded: tuple[str, int]
) -> None:
    """With a slow link, only the copy of the first input may wait for a computation."""
    layers, count = offloaded
    found = make_plan(
        "overlapped",
        layers=3,
        accumulation=group,
        micro_batch_group=group,
        clipping="none",
        placement=Placement(offloaded_inputs=layers, gradients="all"),
    )
    slow = msgspec.structs.replace(HardwareSpec.load("h200"), d2h_curve=(), d2h_gb_per_s=1e-3)
    costs = cost_model(slow, found.model, found.workload)
    flow = _EarliestTimes(LowerBound(found, costs), found, 1)
    copy_ns = flow.inputs[1][0]
    flow._forward(blocks_of(found))
    assert flow.compute < copy_ns
    gaps = flow.stores - count * group * copy_ns
    assert 0 <= gaps < flow.compute
    assert gaps == 0 or group == 1


def test_a_recompute_waits_for_the_weights_of_its_layer(make_plan: Callable[..., Plan]) -> None:
    """With a slow link, a block is recomputed only after the copy of its weights."""
    found = make_plan("overlapped", clipping="none", placement=Placement(gradients="all"))
    slow = msgspec.structs.replace(HardwareSpec.load("h200"), h2d_curve=(), h2d_gb_per_s=1e-3)
    bound = LowerBound(found, cost_model(slow, found.model, found.workload))
    flow = _EarliestTimes(bound, found, 1)
    flow._backward([0])
    times = bound.duration_ns("recompute", "0", kept=False), bound.duration_ns("backward", "0")
    assert 0 < sum(times) < flow.loads
    assert flow.compute == flow.loads + sum(times)


@pytest.mark.parametrize("clipping", ["global", "none"])
@pytest.mark.parametrize("rate", [0.1, 10.0])
def test_a_bound_of_grouped_micro_batches_with_offloaded_inputs_is_not_above_the_time(
    make_plan: Callable[..., Plan], rate: float, clipping: str
) -> None:
    """Compute waits for the inputs of other micro-batches only when it needs them."""
    found = make_plan(
        "overlapped",
        layers=1,
        batch=16,
        sequence=128,
        accumulation=8,
        micro_batch_group=4,
        clipping=clipping,
        placement=Placement(offloaded_inputs="all", host_updated="all"),
    )
    slow = msgspec.structs.replace(
        HardwareSpec.load("h200"),
        h2d_curve=(),
        h2d_gb_per_s=rate,
        host_memory=None,
        peak_tflops={"bf16": 10.0},
    )
    costs = cost_model(slow, found.model, found.workload)
    time = makespan_ns(policies.lower(found), costs)
    assert 0.8 * time <= LowerBound(found, costs).step_ns(found) <= time
