"""shared_step: the plan for several GPUs of one host that is made from a plan for one.

Each GPU trains as many micro-batches as the plan has, so a step of N GPUs has N times the tokens.
All state is in host memory, in parts. No search finds this plan: it has the saved activations, the
micro-batch and the copies of the one it is made from. Only the groups of micro-batches whose
gradients are summed before they are exchanged, the number of slots, and whether no inputs of
layers, half of them or the same are offloaded, are tried. If nothing of this fits, all layers
recompute their activations.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.several_gpus import has_own_memory
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.workload import MOST_MICRO_BATCHES
from megatrain.simulator.planner.assessment import Choice, assess, group_sizes
from megatrain.simulator.schedule.plan import Plan

_SLOTS = 2
"""Slots of weights and gradients with which a collective runs during compute."""


def shared_step(plan: Plan, hardware: HardwareSpec, gpus: int) -> Choice:
    """Returns the fastest plan for `gpus` GPUs that fits, or one that does not fit if none does.

    Args:
        plan: a plan for one GPU.
        hardware: the machine of the plan.
        gpus: the number of GPUs. Each may use the device memory of the plan, and all share its host
            memory, unless each has host memory of its own.

    Raises UserError if the policy of the plan cannot share the step, or if the step would have too
    many micro-batches.
    """
    each_gpu = plan.workload.accumulation
    if each_gpu * gpus > MOST_MICRO_BATCHES:
        raise UserError(
            "gpus",
            found=f"{each_gpu:,} micro-batches on each of {gpus} GPUs",
            allowed=f"{MOST_MICRO_BATCHES // gpus:,}, which is {MOST_MICRO_BATCHES:,} in a step",
            fix="lower --accumulation, or raise --batch",
        )
    tried: list[Choice] = []
    for recomputes in (False, True):
        for each in _shared(plan, hardware, gpus, recomputes=recomputes):
            try:
                tried.append(assess(each, cost_model(hardware, each.model, each.workload, gpus)))
            except UserError:
                if not shares(plan, gpus):
                    raise
        best = min(tried, key=lambda choice: (not choice.feasible, choice.step_seconds))
        if best.feasible:
            break
    return best


def shares(plan: Plan, gpus: int) -> bool:
    """Returns whether the step of `plan`, which is for one GPU, can be shared among `gpus`."""
    if plan.workload.accumulation * gpus > MOST_MICRO_BATCHES:
        return False
    for each in _shared(plan, None, 2):
        with contextlib.suppress(UserError):
            policy_library.lower(each)
            return True
    return False


def _shared(
    plan: Plan, hardware: HardwareSpec | None, gpus: int, *, recomputes: bool = False
) -> Iterator[Plan]:
    """Yields the plans to try. `recomputes` saves no activations of any layer."""
    work, knobs = plan.workload, plan.knobs
    saved = {"saved_activations": "", "saved_attention": ""} if recomputes else dict[str, str]()
    own_memory = hardware is not None and has_own_memory(hardware)
    slots = dict.fromkeys((min(knobs.weight_slots, knobs.gradient_slots), _SLOTS))
    allowed = group_sizes(plan)
    groups = dict.fromkeys(
        size for size in (knobs.micro_batch_group, work.accumulation) if size in allowed
    )
    half = f"0-{max(plan.model.layers // 2 - 1, 0)}"
    offloaded = dict.fromkeys((knobs.placement.offloaded_inputs, "", half))
    for group, least, inputs in itertools.product(groups, slots, offloaded):
        yield msgspec.structs.replace(
            plan,
            gpus=gpus,
            digest="",
            prediction=None,
            host_limit_bytes=plan.host_limit_bytes // (1 if own_memory else gpus),
            workload=msgspec.structs.replace(
                work, accumulation=work.accumulation * gpus, sum_group=group
            ),
            knobs=msgspec.structs.replace(
                knobs,
                micro_batch_group=group,
                weight_slots=max(knobs.weight_slots, least),
                gradient_slots=max(knobs.gradient_slots, least),
                placement=msgspec.structs.replace(
                    knobs.placement,
                    weights="",
                    master_low="",
                    moments="",
                    gradients="",
                    host_updated="",
                    offloaded_inputs=inputs,
                    **saved,
                ),
            ),
        )
