"""shared_step: searches for the best plan for several GPUs, of one host or of several.

Each GPU trains as many micro-batches as the given plan for one GPU has, so a step of N GPUs has N
times the tokens. Each GPU owns an N-th of the state and may use the device memory of the given
plan. The GPUs of a host share its host memory, unless each GPU of the machine has its own.

The search is that for one GPU (`placement_search.py`), with the schedule of a rank. It chooses what
each GPU keeps on the device, slots, bytes of a copy, saved activations and offloaded inputs. It
also tries each size of the micro-batch groups whose gradients are summed before they are exchanged,
and begins once with exchanges in pieces and once with exchanges of whole gradients. If nothing
fits, the plans that need the least memory are tried (`capacity.py`).
"""

from __future__ import annotations

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import costs_of
from megatrain.simulator.costs.several_gpus import sharing_host_memory
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.workload import MOST_MICRO_BATCHES
from megatrain.simulator.planner.assessment import (
    Choice,
    Estimate,
    assess,
    exchanged_bytes,
    first_knobs,
    group_sizes,
    with_knobs,
)
from megatrain.simulator.planner.capacity import MemoryFootprint, fitting
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import fastest
from megatrain.simulator.schedule.plan import Knobs, Plan


def shared_step(plan: Plan, hardware: HardwareSpec, gpus: int, hosts: int = 1) -> Choice:
    """Returns the fastest plan for `gpus` GPUs that fits, or one that does not fit if none does.

    Args:
        plan: A plan for one GPU, with the model, the workload and the memory limits. Its knobs are
            not used.
        hardware: The machine of the plan, which is each of the hosts.
        gpus: The number of GPUs.
        hosts: The number of hosts that have these GPUs.

    Raises UserError if the policy of the plan cannot share the step, if the step would have too
    many micro-batches, or if there are several hosts and the machine has no rate of the network.
    """
    if refusal := obstacle(plan, gpus, hosts):
        raise refusal
    first = of_all(plan, hardware, gpus, hosts)
    searches = [
        PlacementSearch(grouped, costs_of(grouped, hardware))
        for grouped in (in_groups(first, size) for size in group_sizes(first))
    ]
    best = fastest(searches)
    if best:
        best = _exchanging_whole(best, first, hardware) or best
        chosen = best.plan
    else:
        footprint = least_fitting(first, hardware)
        chosen = footprint.placed() if footprint else searches[0].nearest_miss()
    choice = assess(chosen, costs_of(chosen, hardware), best.step_seconds if best else None)
    return msgspec.structs.replace(choice, runner_up=best.runner_up if best else None)


def _exchanging_whole(best: Estimate, first: Plan, hardware: HardwareSpec) -> Estimate | None:
    """Returns a plan that is faster than `best` and was found by a search whose plans exchange
    gradients whole, or None.

    `first` is the plan of `of_all`. The search for `best` begins with exchanges in pieces. From
    there, it may not find a plan that gives up state for larger exchanges.
    """
    grouped = in_groups(first, best.plan.workload.sum_group)
    whole = with_knobs(grouped, exchange_bytes=exchanged_bytes(grouped))
    found = fastest([PlacementSearch(whole, costs_of(whole, hardware))], best.step_seconds * 1e9)
    return found if found and found.step_seconds < best.step_seconds else None


def least_fitting(plan: Plan, hardware: HardwareSpec) -> MemoryFootprint | None:
    """Returns the first plan that fits among those that need the least memory, or None if none
    fits. `plan` is one of `of_all`. Plans without groups and with one group are tried.
    """
    sizes = group_sizes(plan)
    found = (
        fitting(grouped, hardware, costs_of(grouped, hardware), [plan.policy])
        for grouped in (in_groups(plan, size) for size in dict.fromkeys((sizes[0], sizes[-1])))
    )
    return next(filter(None, found), None)


def shares(plan: Plan, gpus: int, hosts: int = 1) -> bool:
    """Returns whether `gpus` GPUs of `hosts` hosts can share the step of `plan`, which is for one
    GPU.
    """
    return obstacle(plan, gpus, hosts) is None


def obstacle(plan: Plan, gpus: int, hosts: int = 1) -> UserError | None:
    """Returns why `gpus` GPUs of `hosts` hosts cannot share the step of `plan`, which is for one
    GPU, or None if they can.
    """
    per_gpu = plan.workload.accumulation
    if per_gpu * gpus > MOST_MICRO_BATCHES:
        return UserError(
            "gpus",
            found=f"{per_gpu:,} micro-batches on each of {gpus} GPUs",
            allowed=f"{MOST_MICRO_BATCHES // gpus:,}, which is {MOST_MICRO_BATCHES:,} in a step",
            fix="lower --accumulation, or raise --batch",
        )
    try:
        policy_library.outline(of_all(plan, None, gpus, hosts), merged=True)
    except UserError as refusal:
        return refusal
    return None


def alone(plan: Plan, hardware: HardwareSpec) -> Plan:
    """Returns the plan for one GPU from which `shared_step` begins its search for plans like
    `plan`, which is for several GPUs.
    """
    work, ranks = plan.workload, sharing_host_memory(hardware, plan.gpus_per_host)
    single = msgspec.structs.replace(
        plan,
        gpus=1,
        hosts=1,
        network_gb_per_s=None,
        digest="",
        prediction=None,
        host_limit_bytes=plan.host_limit_bytes * ranks,
        workload=msgspec.structs.replace(
            work, accumulation=work.accumulation // plan.gpus, sum_group=1
        ),
        knobs=Knobs(),  # a group of micro-batches may not divide the new accumulation
    )
    return msgspec.structs.replace(single, knobs=first_knobs(single))


def of_all(plan: Plan, hardware: HardwareSpec | None, gpus: int, hosts: int = 1) -> Plan:
    """Returns `plan`, which is for one GPU, for `gpus` GPUs of `hosts` hosts, with its
    `first_knobs`. With several hosts, it names the rate of the network that is predicted. Without
    `hardware`, the GPUs of a host share its memory.
    """
    shared = msgspec.structs.replace(
        plan,
        gpus=gpus,
        hosts=hosts,
        network_gb_per_s=hardware.network_gb_per_s if hardware and hosts > 1 else None,
        digest="",
        prediction=None,
        host_limit_bytes=plan.host_limit_bytes // sharing_host_memory(hardware, gpus // hosts),
        workload=msgspec.structs.replace(
            plan.workload, accumulation=plan.workload.accumulation * gpus, sum_group=1
        ),
    )
    return msgspec.structs.replace(shared, knobs=first_knobs(shared))


def in_groups(plan: Plan, size: int) -> Plan:
    """Returns `plan` with micro-batch groups of `size`, whose gradients are summed first."""
    grouped = msgspec.structs.replace(
        plan, workload=msgspec.structs.replace(plan.workload, sum_group=size)
    )
    room = first_knobs(grouped).exchange_bytes  # a group's sum has fp32 elements
    return with_knobs(grouped, micro_batch_group=size, exchange_bytes=room)
