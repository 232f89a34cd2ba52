"""Ratio: every system's speed at the same number of sequences per step, for 7B and 14B on a GH200,
on an H200 whose host has 512 GiB, and on an H100 whose host has 256 GiB. The simulation takes about
90 s.

Sequences have 1,024 tokens and layers are eager. For every system, a micro-batch that does not fit
is split into 2, 4, 8 or 16. The published code is the version without pinned copies.
"""

from __future__ import annotations

from typing import Any

from megatrain.experiments.paper_data.answers import (
    GIB,
    PredictedStep,
    ours,
    paper_schedule,
    stated_format,
    workloads,
)
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import simulate as simulate_schedule
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.metrics import tflops_6n
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import plan_account
from megatrain.simulator.policies import lower
from megatrain.simulator.policies.megatrain_code import Ablation, lower_ablated
from megatrain.simulator.schedule.plan import Plan

MODELS = ("qwen2.5-7b", "qwen2.5-14b")
MACHINES = ("gh200-96", "h200-4x", "h100-sxm")
BATCHES = (1, 4, 8, 16, 32, 96)
SEQUENCE = 1024
SYSTEMS = ("megatrain_code", "zero3_offload", "fsdp2_offload")


def simulate() -> Any:
    """Returns the data of `RatioData` in paper_figures."""
    points = []
    for machine in MACHINES:
        hardware = HardwareSpec.load(machine)
        for name in MODELS:
            model = ModelSpec.load(name)
            for batch in BATCHES:
                found = {system: other_system(system, model, hardware, batch) for system in SYSTEMS}
                with stated_format() as state:
                    stated = paper_schedule(model, hardware, batch, SEQUENCE, state=state)
                best = ours(model, hardware, Workload(batch=batch, sequence=SEQUENCE))
                found |= {"paper_stated": _point(stated), "ours": _point(best)}
                points.append(
                    {"machine": machine, "model": name, "sequences": batch, "systems": found}
                )
    return {"sequence": SEQUENCE, "points": points}


def _point(answer: PredictedStep) -> dict[str, Any]:
    return {
        "fits": answer.fits,
        "batch": answer.batch,
        "accumulation": answer.accumulation,
        "step_s": answer.step_s,
        "tflops": answer.tflops,
        "device_gib": answer.device_gib,
        "host_gib": answer.host_gib,
        "busy_share": None,
    }


def other_system(
    policy: str, model: ModelSpec, hardware: HardwareSpec, sequences: int
) -> dict[str, Any]:
    """Returns the fields of `RatioPoint` for the first split of `sequences` that fits. If none
    fits, it is the last split, with `fits` false.
    """
    for size, accumulation in workloads(sequences):
        work = Workload(batch=size, accumulation=accumulation, sequence=SEQUENCE)
        plan = Plan(
            policy=policy,
            hardware=hardware.name,
            source=model.name,
            model=model,
            workload=work,
            device_limit_bytes=hardware.device_bytes,
            host_limit_bytes=hardware.host_bytes,
        )
        code = policy == "megatrain_code"
        schedule = lower_ablated(plan, Ablation(copies=False)) if code else lower(plan)
        costs = cost_model(hardware, model, work)
        account = plan_account(plan, schedule, costs)
        if account.fits:
            break
    timeline = simulate_schedule(schedule, costs)
    seconds = (timeline.makespan_ns + costs.step_overhead_ns) / 1e9
    return {
        "fits": account.fits,
        "batch": size,
        "accumulation": accumulation,
        "step_s": seconds,
        "tflops": tflops_6n(model, work, seconds),
        "device_gib": account.device_peak_bytes / GIB,
        "host_gib": account.host_peak_bytes / GIB,
        "busy_share": timeline.busy_ns("compute") / timeline.makespan_ns,
    }
