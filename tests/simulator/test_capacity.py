"""What fits at most, where the host is too small and state moves to the device."""

from __future__ import annotations

import msgspec

from megatrain.simulator.assessment import assess
from megatrain.simulator.capacity import largest_batch, usable
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Plan
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload


def test_state_that_moves_to_the_device_needs_no_slots() -> None:
    """All weights are there: the slots that they would stream through are not counted, which makes room for one sequence more."""
    model, hardware = ModelSpec.load("olmoe-1b-7b"), HardwareSpec.load("gb200")
    work = Workload(batch=2, sequence=4096, accumulation=2, loss_chunk=4096)
    plan = Plan(
        policy="overlapped", hardware=hardware.name, source=model.name, model=model, workload=work,
        device_limit_bytes=hardware.device_bytes * 3 // 4, host_limit_bytes=hardware.host_bytes // 4,
    )  # fmt: skip
    costs = cost_model(hardware, model, work)
    most = largest_batch(usable(plan, hardware, costs, ["overlapped"]), work)
    assert most == 110  # 109 with them
    wide = msgspec.structs.replace(plan, workload=msgspec.structs.replace(work, batch=most))
    fitting = [footprint for footprint in usable(wide, hardware, costs, ["overlapped"]) if footprint.account().fits]
    assert fitting
    for footprint in fitting:
        assert assess(footprint.placed(), costs).feasible
