"""Pareto: a sweep of schedules and knobs, 7B on an H200 with 512 GiB of host memory, 32 x 1024 tokens. Some 30 s.

The policies with fixed places over slots, slabs and checkpoint intervals; `overlapped` as the planner places it under each of many limits of device memory.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from megatrain.experiments.figures.answers import answer, ours
from megatrain.simulator.assessment import assess
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Knobs, Plan
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

MODEL, MACHINE = "qwen2.5-7b", "h200-4x"
WORK = Workload(batch=32, sequence=1024)
INTERVALS = (1, 2, 4, 7)
SLOTS = {"sequential": (1,), "double_buffer": (2,), "k_buffer": (1, 3, 4, 8)}
SLABS = (0, 2, 12)
DEVICE_GIB = (*range(18, 60, 3), *range(60, 130, 8), 133)


def simulate() -> Any:
    model, machine = ModelSpec.load(MODEL), HardwareSpec.load(MACHINE)
    costs, found = cost_model(machine, model, WORK), []
    for policy, slots in SLOTS.items():
        for count, slabs, interval in itertools.product(slots, SLABS, INTERVALS):
            knobs = Knobs(weight_slots=count, gradient_slabs=slabs, checkpoint_interval=interval, chunk_bytes=2**28)
            plan = Plan(
                policy=policy, hardware=MACHINE, source=MODEL, model=model, workload=WORK, device_limit_bytes=machine.device_bytes,
                host_limit_bytes=machine.host_bytes, knobs=knobs,
            )  # fmt: skip
            found.append({"weight_slots": count, "gradient_slabs": slabs, **msgspec.to_builtins(answer(assess(plan, costs), machine))})
    for gib in DEVICE_GIB:
        hardware = msgspec.structs.replace(machine, device_bytes=gib * 2**30)
        for policies in (["overlapped"], ["resident"]):
            found.append({"weight_slots": 0, "gradient_slabs": 0, **msgspec.to_builtins(ours(model, hardware, WORK, policies))})
    return {"model": MODEL, "machine": MACHINE, "host_gib": machine.host_bytes / 2**30, "plans": [plan for plan in found if plan["fits"]]}
