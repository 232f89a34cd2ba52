"""Lower bounds of a plan's step: close to what the evaluator finds, and more than compute's own work where something else takes longer."""

from __future__ import annotations

import msgspec
import pytest

from megatrain.simulator import policies
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine import makespan_ns as shared_makespan_ns
from megatrain.simulator.evaluator import makespan_ns
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.least import Least
from megatrain.simulator.plan import Knobs, Placement, Plan
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

MODEL = ModelSpec.load("qwen2.5-1.5b")
PLACEMENTS = {
    "all streams": Placement(),
    "weights stay": Placement(weights="all"),
    "gradients stay": Placement(gradients="all"),
    "half stays": Placement(weights="e,0-13", low="e,0-13", moments="e,0-13", gradients="e,0-13"),
    "all stays": Placement(weights="all", low="all", moments="all", gradients="all"),
    "the host updates": Placement(host_updated="all"),
    "the host updates half": Placement(weights="e,0-13", host_updated="14-27"),
    "parked": Placement(weights="all", low="all", moments="all", gradients="all", parked="all"),
    "stored": Placement(stored="14-27"),
}


def plan(name: str, batch: int, clipping: str, accumulation: int) -> Plan:
    work = Workload(batch=batch, sequence=1024, clipping=clipping, accumulation=accumulation)  # type: ignore[arg-type]
    return Plan(
        policy="overlapped", hardware="h200", source=MODEL.name, model=MODEL, workload=work, device_limit_bytes=2**40, host_limit_bytes=2**40,
        knobs=Knobs(weight_slots=3, gradient_slots=3, state_slots=8, chunk_bytes=2**26, weights_ahead=1, placement=PLACEMENTS[name]),
    )  # fmt: skip


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clipping", ["global", "none"])
@pytest.mark.parametrize("batch", [1, 16], ids=["short of link", "short of compute"])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_with_enough_slots_a_bound_is_near_the_time_without_contention(name: str, batch: int, clipping: str, accumulation: int) -> None:
    found = plan(name, batch, clipping, accumulation)
    costs = cost_model(HardwareSpec.load("a6000"), MODEL, found.workload)
    bound, time = Least(found, costs).step_ns(found), makespan_ns(policies.lower(found), costs)
    assert 0.75 * time <= bound


def test_a_bound_counts_what_compute_waits_for() -> None:
    """Where the link is short, copies before the first forward pass take longer than all of compute."""
    found = plan("all streams", 1, "global", 1)
    least = Least(found, cost_model(HardwareSpec.load("a6000"), MODEL, found.workload))
    assert least.step_ns(found) > 2 * least.compute_ns(found)


def test_cores_and_copies_share_the_memory_of_the_host() -> None:
    """The evaluator lets them run at full speed beside each other; the bound does not."""
    found = plan("the host updates", 1, "global", 1)
    hardware = HardwareSpec.load("h200")
    assert hardware.host_memory is not None
    slow = msgspec.structs.replace(hardware, host_memory=msgspec.structs.replace(hardware.host_memory, gb_per_s=60.0))
    costs = cost_model(slow, MODEL, found.workload)
    schedule = policies.lower(found)
    assert makespan_ns(schedule, costs) < Least(found, costs).step_ns(found) <= shared_makespan_ns(schedule, costs)
