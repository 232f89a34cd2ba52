"""Chooses the batch and the gradient accumulation for a given number of tokens per step.

With larger micro-batches, the weights are loaded fewer times per step, unless micro-batches go
through the model in groups. Smaller micro-batches leave more memory for weights and optimizer
state. The search works in five steps:

1. List every split of the step into equal micro-batches, from the largest batch to the smallest.
2. Skip a split if its compute time alone is longer than the best step so far, with a margin of 5 %.
3. Time a few simple plans of each remaining split with the evaluator. Skip a split if none of them
   fits in memory.
4. Stop after five splits in a row that are slower than the best.
5. Search the best split in full. Also search the second best, if its time is within 5 %.

All splits compute the same sums for loss and gradient. They differ only in rounding.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.engine.evaluator import two_groups_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import (
    Choice,
    InShortGroups,
    first_knobs,
    group_sizes,
    plan_account,
    schedule_to_time,
    with_knobs,
)
from megatrain.simulator.planner.filling import last
from megatrain.simulator.planner.loss_chunk import with_loss_chunk
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import candidates, rank
from megatrain.simulator.planner.slot_search import ONE_COPY, intervals
from megatrain.simulator.schedule.plan import Placement, Plan

_FINALISTS = 2  # splits that are searched in full, at most
_CLOSE = 1.05  # a split is considered if its quick time is within this factor of the best
# Splits in a row that may be slower than the best. Smaller batches load weights more often, but a
# batch that is small enough can save the activations of every layer, and then is fast again.
_PATIENCE = 5
_MOST_MICRO_BATCHES = 64


def splits(workload: Workload, step_tokens: int) -> list[Workload]:
    """Returns `workload` with every batch and accumulation that make up `step_tokens` tokens.

    The largest batch is first. Raises UserError if `step_tokens` is not a whole number of
    sequences.

    >>> work = Workload(batch=1, sequence=1024)
    >>> [(split.batch, split.accumulation) for split in splits(work, 6144)]
    [(6, 1), (3, 2), (2, 3), (1, 6)]
    """
    rows, rest = divmod(step_tokens, workload.sequence)
    if rest or not rows:
        nearest = max(round(step_tokens / workload.sequence), 1) * workload.sequence
        raise UserError(
            "--tokens-per-step",
            found=step_tokens,
            allowed=f"whole sequences of {workload.sequence} tokens",
            fix=f"use {nearest}, or change --seq",
        )
    most = _MOST_MICRO_BATCHES if workload.gradients == "exact" else 1
    counts = [count for count in range(1, min(rows, most) + 1) if rows % count == 0]
    return [
        msgspec.structs.replace(workload, batch=rows // count, accumulation=count)
        for count in counts
        if rows // count <= 2**20
    ]


def best_split(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    step_tokens: int,
    *,
    source: str = "",
    hardware_name: str = "",
    device_limit: int | None = None,
    host_limit: int | None = None,
    policies: list[str] | None = None,
    choose_chunk: bool = False,
) -> list[Choice]:
    """Returns the `candidates` of the fastest split of `step_tokens` tokens, the best plan first.

    The batch and accumulation of `workload` are ignored. With `choose_chunk`, the splits that are
    searched in full have the loss chunk that `with_loss_chunk` chooses for each. The other
    arguments are those of `candidates`. If no split fits in memory, the smallest batch is searched,
    so the result says how much memory is missing. Raises UserError as `candidates` and `splits` do.
    """
    tried = splits(workload, step_tokens)
    names = policy_library.sensible(
        policy_library.contenders() if policies is None or hardware.unified else policies,
        unified=hardware.unified,
    )
    times: list[tuple[int, int]] = []
    refused: list[UserError] = []
    for index, work in enumerate(tried):
        if times and index - min(times)[1] > _PATIENCE:
            break
        costs = cost_model(hardware, model, work)
        plan = Plan(
            policy=next(
                (name for name in names if policy_library.find(name).places_state), names[0]
            ),
            hardware=hardware.name,
            source=model.name,
            model=model,
            workload=work,
            device_limit_bytes=device_limit or hardware.device_bytes,
            host_limit_bytes=host_limit or hardware.host_bytes,
        )
        if (
            not times
            or LowerBound(plan, costs).compute_ns(
                with_knobs(plan, placement=Placement(saved_activations="all"))
            )
            < _CLOSE * min(times)[0]
        ):
            plan = msgspec.structs.replace(plan, knobs=first_knobs(plan))
            try:
                quick_times = [_time_ns(quick, costs) for quick in _quick(plan, costs)]
            except UserError as error:  # such as a policy that sums no gradients
                refused.append(error)
                continue
            if quick_times:
                times.append((min(quick_times), index))
    chosen = [
        tried[index] for time, index in sorted(times)[:_FINALISTS] if time < _CLOSE * min(times)[0]
    ]
    found: list[list[Choice]] = []
    # If no split fits, the smallest batch that the policies accept is searched.
    for work in chosen or reversed(tried):
        try:
            chunked = (
                with_loss_chunk(
                    model,
                    hardware,
                    work,
                    device_limit=device_limit,
                    host_limit=host_limit,
                    policies=policies,
                )
                if choose_chunk
                else work
            )
            choices = candidates(
                model,
                hardware,
                chunked,
                source=source,
                hardware_name=hardware_name,
                policies=policies,
                device_limit=device_limit,
                host_limit=host_limit,
            )
        except UserError as error:
            refused.append(error)
            continue
        found.append(choices)
        if not chosen:
            break
    if not found:
        raise refused[0]
    return min(found, key=lambda choices: rank(choices[0]))


def _quick(plan: Plan, costs: CostModel) -> Iterator[Plan]:
    """Yields a few simple plans that fit in memory.

    If the policy obeys every field of the placement, these plans save the activations of no layer,
    or of as many layers as fit, once with single micro-batches and once with the largest groups
    that fit. For other policies, there is one plan for each checkpoint interval.
    """
    if policy_library.find(plan.policy).obeys_everything:
        single, *larger = group_sizes(plan)
        yield from _quick_in_groups(plan, costs, single)
        for size in reversed(larger):
            if grouped := list(_quick_in_groups(plan, costs, size)):
                yield from grouped
                return
        return
    for interval in intervals(plan.model.layers):
        for slots, staging in ((2, 2), (1, 1)):
            small = with_knobs(
                plan,
                weight_slots=slots,
                gradient_slots=slots,
                gradient_staging=staging,
                checkpoint_interval=interval,
            )
            try:
                fits = plan_account(
                    small, policy_library.outline(with_knobs(small, chunk_bytes=ONE_COPY)), costs
                ).fits
            except UserError:  # the policy accepts only one value of some knob
                continue
            if fits:
                yield small
                break


def _quick_in_groups(plan: Plan, costs: CostModel, size: int) -> Iterator[Plan]:
    """Yields simple plans that fit, with groups of `size` micro-batches.

    The policy must place state.
    """
    search = PlacementSearch(with_knobs(plan, micro_batch_group=size), costs)
    for base in (Placement(), Placement(offloaded_inputs="all")):
        most = search.filling.most_saved(search.plan, base)
        if most < 0:
            continue
        for saved in (0, most):
            placement = msgspec.structs.replace(
                base, saved_activations=last(plan.model.layers, saved)
            )
            yield from itertools.islice(search.filling.filled(search.plan, placement), 1)
        return


def _time_ns(plan: Plan, costs: CostModel) -> int:
    """Returns the predicted step time in ns, without contention.

    Each layer is copied in one piece. Two groups of micro-batches are timed, and each further group
    adds the time of the second.
    """
    group = plan.knobs.micro_batch_group
    timing = InShortGroups(costs, group)
    schedule = schedule_to_time(with_knobs(plan, chunk_bytes=ONE_COPY, groups=2), timing)
    makespan, further = two_groups_ns(schedule, timing, min(group, 2))
    return makespan + max(plan.workload.accumulation // group - 2, 0) * further
