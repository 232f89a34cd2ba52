"""shared_step: makes a plan for several GPUs of one host from a plan for one GPU.

Each GPU trains as many micro-batches as the given plan has, so a step of N GPUs has N times the
tokens. All state is in host memory, and each GPU owns a part of each layer. The saved activations,
the batch of a micro-batch and the bytes of a copy are those of the given plan. Only a few variants
are compared. They differ in three things:

* the micro-batch groups, whose gradients are summed before they are exchanged,
* the number of slots,
* the layers whose inputs are offloaded: the same as in the given plan, none, or the first half.

If none of these variants fits, they are tried once more with all layers recomputed.
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
"""The fewest weight and gradient slots with which a collective can run during compute."""


def shared_step(plan: Plan, hardware: HardwareSpec, gpus: int) -> Choice:
    """Returns the fastest plan for `gpus` GPUs that fits, or one that does not fit if none does.

    Args:
        plan: A plan for one GPU.
        hardware: The machine of the plan.
        gpus: The number of GPUs. Each may use the device memory of the plan. They share its host
            memory, unless each GPU of the machine has its own.

    Raises UserError if the policy of the plan cannot share the step, or if the step would have too
    many micro-batches.
    """
    per_gpu = plan.workload.accumulation
    if per_gpu * gpus > MOST_MICRO_BATCHES:
        raise UserError(
            "gpus",
            found=f"{per_gpu:,} micro-batches on each of {gpus} GPUs",
            allowed=f"{MOST_MICRO_BATCHES // gpus:,}, which is {MOST_MICRO_BATCHES:,} in a step",
            fix="lower --accumulation, or raise --batch",
        )
    tried: list[Choice] = []
    for recomputes in (False, True):
        for variant in _variants(plan, hardware, gpus, recomputes=recomputes):
            try:
                costs = cost_model(hardware, variant.model, variant.workload, gpus)
                tried.append(assess(variant, costs))
            except UserError:
                if not shares(plan, gpus):
                    raise
        best = min(tried, key=lambda choice: (not choice.feasible, choice.step_seconds))
        if best.feasible:
            break
    return best


def shares(plan: Plan, gpus: int) -> bool:
    """Returns whether `gpus` GPUs can share the step of `plan`, which is for one GPU."""
    if plan.workload.accumulation * gpus > MOST_MICRO_BATCHES:
        return False
    for variant in _variants(plan, None, 2):
        with contextlib.suppress(UserError):
            policy_library.lower(variant)
            return True
    return False


def _variants(
    plan: Plan, hardware: HardwareSpec | None, gpus: int, *, recomputes: bool = False
) -> Iterator[Plan]:
    """Yields the plans to try. With `recomputes`, all layers recompute their activations."""
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
