"""Tests of the memory that NCCL keeps on each GPU of a plan for several GPUs."""

from __future__ import annotations

import msgspec

from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import plan_account
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

MODEL = ModelSpec.load("qwen2.5-0.5b")
RESERVED, FOR_EACH_PEER = 1292 * 2**20, 446 * 2**20


def _peak(machine: HardwareSpec, gpus: int) -> int:
    work = Workload(batch=2, sequence=256, accumulation=4)
    everything = Placement(weights="all", master_low="all", moments="all", gradients="all")
    plan = Plan(
        policy="overlapped",
        model=MODEL,
        workload=work,
        hardware=machine.name,
        source=MODEL.name,
        gpus=gpus,
        knobs=Knobs(placement=everything),
        device_limit_bytes=machine.device_bytes,
        host_limit_bytes=machine.host_bytes,
    )
    return plan_account(plan, lower(plan), cost_model(machine, MODEL, work)).device_peak_bytes


def test_only_a_plan_for_several_gpus_needs_memory_for_collectives() -> None:
    machine = HardwareSpec.load("h100-sxm")
    assert machine.collective_bytes == RESERVED
    without = msgspec.structs.replace(machine, collective_bytes=0, collective_peer_bytes=0)
    assert _peak(machine, 1) == _peak(without, 1)
    assert _peak(machine, 2) == _peak(without, 2) + RESERVED
    assert _peak(machine, 4) == _peak(without, 4) + RESERVED + 2 * FOR_EACH_PEER


def test_a_machine_that_states_no_memory_for_collectives_has_the_defaults() -> None:
    stated = HardwareSpec.load("h100-sxm")
    silent = msgspec.structs.replace(stated, collective_bytes=None, collective_peer_bytes=None)
    for gpus in (1, 2, 4):
        assert _peak(silent, gpus) == _peak(stated, gpus)
    (part,) = {
        msgspec.structs.replace(silent, collective_bytes=size).collectives(4) - size
        for size in (0, RESERVED)
    }
    assert part == 2 * FOR_EACH_PEER


def test_four_gpus_keep_what_was_measured() -> None:
    """GPU memory of a rank of four, without PyTorch's tensors, minus the same of one GPU (MiB,
    experiments/results/h100-x4-large-models). One prediction was 1,292 and ran out of memory.
    """
    of_four, alone = 76_679 - 74_778_138_624 / 2**20, 80_519 - 75.178 * 2**10
    measured = of_four - alone
    assert measured <= HardwareSpec.load("h100-sxm").collectives(4) / 2**20 <= 1.25 * measured


def test_a_calibrated_machine_keeps_its_collective_bytes() -> None:
    measured = HardwareSpec.load("experiments/results/h200-heldout/hardware.toml")
    kept = msgspec.structs.replace(measured, collective_bytes=RESERVED)
    assert _peak(kept, 2) == _peak(measured, 2) + RESERVED
