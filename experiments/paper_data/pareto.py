"""Pareto: a sweep of schedules and knobs, for 7B on an H200 with 512 GiB of host memory and 32 x
1024 tokens per step. The simulation takes about 30 s.

Policies with a fixed placement are predicted with several numbers of slots, staging buffers and
checkpoint intervals. `overlapped` has the planner's placement under many limits of device memory.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from megatrain.experiments.paper_data.answers import answer, ours
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.schedule.plan import Knobs, Plan

MODEL, MACHINE = "qwen2.5-7b", "h200-4x"
WORK = Workload(batch=32, sequence=1024)
INTERVALS = (1, 2, 4, 7)
SLOTS = {"sequential": (1,), "double_buffer": (2,), "k_buffer": (1, 3, 4, 8)}
STAGING = (0, 2, 12)
DEVICE_GIB = (*range(18, 60, 3), *range(60, 130, 8), 133)


def simulate() -> Any:
    """Returns the data of `Sweep` in paper_figures."""
    model, machine = ModelSpec.load(MODEL), HardwareSpec.load(MACHINE)
    costs, found = cost_model(machine, model, WORK), []
    for policy, slots in SLOTS.items():
        for count, staging, interval in itertools.product(slots, STAGING, INTERVALS):
            knobs = Knobs(
                weight_slots=count,
                gradient_staging=staging,
                checkpoint_interval=interval,
                chunk_bytes=2**28,
            )
            plan = Plan(
                policy=policy,
                hardware=MACHINE,
                source=MODEL,
                model=model,
                workload=WORK,
                device_limit_bytes=machine.device_bytes,
                host_limit_bytes=machine.host_bytes,
                knobs=knobs,
            )
            found.append(
                {
                    "weight_slots": count,
                    "gradient_staging": staging,
                    **msgspec.to_builtins(answer(assess(plan, costs), machine)),
                }
            )
    for gib in DEVICE_GIB:
        hardware = msgspec.structs.replace(machine, device_bytes=gib * 2**30)
        for policies in (["overlapped"], ["resident"]):
            found.append(
                {
                    "weight_slots": 0,
                    "gradient_staging": 0,
                    **msgspec.to_builtins(ours(model, hardware, WORK, policies)),
                }
            )
    return {
        "model": MODEL,
        "machine": MACHINE,
        "host_gib": machine.host_bytes / 2**30,
        "plans": [plan for plan in found if plan["fits"]],
    }
