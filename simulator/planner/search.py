"""Searches for the policy and the knobs that train a model fastest within the memory limits.

Each policy is searched on its own. If the policy places state, `placement_search.py` searches its
placements and slots. For the other policies, `slot_search.py` searches their slots. Both enumerate
candidates instead of bisecting, because more slots or smaller copies can make a step slower when
lanes slow each other.

The workload (batch, dtype, clipping, loss chunk, token piece) is not searched, because it changes
the result of training. A smaller batch is only suggested if nothing fits. Commands whose user names
no batch or no loss chunk choose them before this search (`batch_splits.py`, `loss_chunk.py`).
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base import plugins
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.engine.evaluator import uncontended_makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import (
    Choice,
    Estimate,
    RunnerUp,
    assess,
    estimate,
    first_knobs,
    group_sizes,
    plan_account,
    with_knobs,
)
from megatrain.simulator.planner.capacity import fitting
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.slot_search import (
    GRADIENT_SLOTS,
    GRADIENT_STAGING,
    ONE_COPY,
    WEIGHT_SLOTS,
    SlotSearch,
)
from megatrain.simulator.policies.policy import PolicyWarning
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

_LEAST_GAIN = 1.01  # a size of groups is searched only if it may be faster by this factor
# The best plan of each size of groups is polished, unless it is slower than the best plan of all
# sizes by this factor.
_MOST_POLISHED = 1.02

_Found = TypeVar("_Found", bound=Estimate)

__all__ = ["Choice", "assess", "candidates", "plan_account", "rank", "search"]


@plugins.unchanging()
def search(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    source: str = "",
    hardware_name: str = "",
    device_limit: int | None = None,
    host_limit: int | None = None,
    policies: Iterable[str] | None = None,
) -> list[Choice]:
    """Returns the best plan of each policy.

    Plans that fit come first, the fastest at the front. Plans that do not fit follow, ordered by
    the bytes that they lack. A machine with unified memory has nothing to stream. Only policies
    that copy nothing are searched there, and the lower of the two limits applies to its memory.

    Args:
        model: The model to train.
        hardware: The machine, with its measured or datasheet rates.
        workload: Batch, sequence length, dtype and the other settings of a step.
        source: Where the weights are, for the plans. The default is the model's name.
        hardware_name: Name or file of the machine, for the plans. The default is its name.
        device_limit: Device memory in bytes. The default is the machine's.
        host_limit: Host memory in bytes. The default is the machine's.
        policies: Names of the policies to search. The default is every policy that the runtime can
            execute and that may be the fastest. A policy that is only for prediction has no knobs,
            so it is assessed and not searched.

    Raises UserError for an unknown policy, and for costs that were not measured.
    """
    plans = plans_of(
        model,
        hardware,
        workload,
        source=source,
        hardware_name=hardware_name,
        device_limit=device_limit,
        host_limit=host_limit,
        policies=policies,
    )
    costs = cost_model(hardware, model, workload)
    return sorted(_searched(plans, costs), key=rank)


def _names(policies: Iterable[str]) -> list[str]:
    """Returns the different names in `policies`. Raises UserError if there are none, or for a value
    that is neither a name nor a path.
    """
    given = list(policies)
    wrong = [value for value in given if not isinstance(value, str | os.PathLike)]
    if wrong or not given:
        found = [
            f"the class {value.__name__}" if isinstance(value, type) else repr(value)
            for value in wrong
        ]
        raise UserError(
            "policies",
            found=found[0] if found else "none",
            allowed="names of policies or paths of their files, or None for all policies",
            fix="name one, or leave `policies` out",
        )
    return list(dict.fromkeys(map(os.fspath, given)))


def plans_of(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    source: str = "",
    hardware_name: str = "",
    device_limit: int | None = None,
    host_limit: int | None = None,
    policies: Iterable[str] | None = None,
) -> list[Plan]:
    """Returns the plan of each policy from which `search` begins, with its `first_knobs`.

    The arguments are those of `search`. Raises UserError for an unknown policy, and if none of the
    policies makes sense on the machine.
    """
    names = policy_library.contenders() if policies is None else _names(policies)
    for name in names:
        policy_library.find(name)
    names = policy_library.sensible(names, unified=hardware.unified)
    names = policy_library.updating(names, workload)
    if not names:
        raise UserError(
            "policy",
            found="one that streams, on a machine with one memory, where there is nothing to copy",
            allowed=", ".join(policy_library.sensible(policy_library.names(), unified=True)),
            fix="leave --policy out",
        )
    device, host = hardware.memory_limits(device_limit, host_limit)
    first = Plan(
        policy=names[0],
        hardware=hardware_name or hardware.name,
        source=source or model.name,
        model=model,
        workload=workload,
        device_limit_bytes=device,
        host_limit_bytes=host,
    )
    plans = (msgspec.structs.replace(first, policy=name) for name in names)
    return [msgspec.structs.replace(plan, knobs=first_knobs(plan)) for plan in plans]


def _searched(plans: list[Plan], costs: CostModel) -> list[Choice]:
    """Returns the best choice for each of `plans`, which differ in their policies.

    A policy whose search raises UserError is left out, with a PolicyWarning. If no policy is left,
    the first of these errors is raised.
    """
    choices: list[Choice] = []
    refused: list[UserError] = []
    for plan in plans:
        try:
            choices.append(best_of_policy(plan, costs))
        except UserError as error:
            refused.append(error)
    if refused and not choices:
        raise refused[0]
    for reason in refused:
        warnings.warn(f"left out: {reason}", PolicyWarning, stacklevel=3)
    return choices


def best_of_policy(plan: Plan, costs: CostModel) -> Choice:
    """Returns the best choice for the policy of `plan`. It has only knobs and fields of the
    placement that the policy declares.
    """
    policy = policy_library.find(plan.policy)
    if policy.prediction_only:
        return assess(plan, costs)
    if not policy.places_state:
        return SlotSearch(plan, costs).best()
    best = best_placed(plan, costs)
    if best is None:
        choice = assess(PlacementSearch(plan, costs).nearest_miss(), costs)
    else:
        choice = assess(best.plan, costs, best.step_seconds)
        choice = msgspec.structs.replace(choice, runner_up=best.runner_up)
    if policy.obeys_everything:
        return choice
    # `PlacementSearch` expects a policy that obeys everything.
    search = SlotSearch(plan, costs)
    return min(search.filled(_declared(choice.plan, costs)), search.best(), key=rank)


def _declared(plan: Plan, costs: CostModel) -> Choice:
    """Returns `plan` without the knobs and the fields of the placement that its policy does not
    declare, and its prediction.
    """
    policy, unset = policy_library.find(plan.policy), Knobs()
    placement = msgspec.structs.replace(
        plan.knobs.placement,
        **{name: "" for name in Placement.__struct_fields__ if name not in policy.placements},
    )
    knobs = {
        name: getattr(unset, name)
        for name in Knobs.__struct_fields__
        if name != "placement" and name not in policy.knobs
    }
    return assess(with_knobs(plan, placement=placement, **knobs), costs)


def best_placed(plan: Plan, costs: CostModel, most_ns: float = math.inf) -> Estimate | None:
    """Returns the fastest plan that fits, with its runner-up, for a policy that places state.

    Returns None if no plan fits. A size of micro-batch groups is skipped if every plan with it
    takes `most_ns` or longer.
    """
    return fastest(
        [
            PlacementSearch(with_knobs(plan, micro_batch_group=size), costs)
            for size in group_sizes(plan)
        ],
        most_ns,
    )


def fastest(searches: list[PlacementSearch], most_ns: float = math.inf) -> Estimate | None:
    """Returns the fastest plan that fits of several searches, with its runner-up.

    Returns None if no plan fits. A search is skipped if each of its plans takes `most_ns` or
    longer, or if it cannot gain 1 % over the searches before. The searches differ in the size of
    micro-batch groups. The results are polished, except those that are much slower than `most_ns`
    or than the best.

    If the layers of the result rebuild outputs, plans whose layers save them are tried, too.
    """
    if len(searches) > 1:
        # The most promising size comes first, so its step time excludes most plans of the others.
        searches = sorted(searches, key=PlacementSearch.rough_ns)
    found: list[tuple[Estimate, PlacementSearch]] = []
    for search in searches:
        limit = min((entry.step_seconds * 1e9 for entry, _ in found), default=math.inf)
        if search.least_ns() < min(limit / _LEAST_GAIN, most_ns) and (best := search.best(limit)):
            found.append((best, search))
    if not found:
        return None
    limit = _MOST_POLISHED * min(most_ns / 1e9, *(entry.step_seconds for entry, _ in found))
    polished = [
        (search.polished(entry) if entry.step_seconds <= limit else entry, search)
        for entry, search in found
    ]
    bests = [entry for entry, _ in polished]
    if saving := _saving_outputs(*min(polished, key=lambda pair: rank(pair[0]))):
        bests.append(saving)
    return _with_runner_up(sorted(bests, key=rank), [])


def _saving_outputs(best: Estimate, search: PlacementSearch) -> Estimate | None:
    """Returns a plan whose layers save outputs instead of rebuilding them, or None if it cannot be
    faster than `best`, the fastest plan of `search`, whose layers rebuild them.

    If `best` saves the activations of some layers and recomputes others, the memory of the outputs
    saves more time if it holds the activations of further layers. Otherwise, `best` without
    `rebuild_outputs` is returned. If it saves all activations and then does not fit, other
    placements are searched, unless the lowest of their lower bounds leaves too little room for the
    waiting of `best`.
    """
    plan, saved = best.plan, len(best.plan.placed("saved_activations"))
    if not plan.knobs.rebuild_outputs or 0 < saved < plan.model.layers:
        return None
    same = estimate(with_knobs(plan, rebuild_outputs=0), search.costs)
    if same.feasible or not saved:
        return same
    saving = PlacementSearch(with_knobs(search.plan, rebuild_outputs=0), search.costs)
    likely, limit = saving.likely(), search.time(plan)
    if likely is None or likely[0] + search.waiting_ns(plan)[0] >= limit:
        return None
    found = saving.best(limit)
    return saving.polished(found) if found else None


def rank(choice: Estimate) -> tuple[bool, int, int, float, str]:
    """Returns a sort key that puts the best choice first.

    Plans that fit come first, by step time. The others are ordered by the bytes of device memory
    that they lack, because host memory is easier to add, and then by all bytes that they lack.
    """
    account = choice.account
    lacking = max(account.device_peak_bytes - account.device_limit_bytes, 0)
    return (
        not choice.feasible,
        lacking,
        account.excess_bytes,
        choice.step_seconds,
        choice.plan.policy,
    )


@plugins.unchanging()
def candidates(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    source: str = "",
    hardware_name: str = "",
    device_limit: int | None = None,
    host_limit: int | None = None,
    policies: list[str] | None = None,
) -> list[Choice]:
    """Returns the best plan of each policy, as `search` does, and the runner-up of the best one.

    There are two other differences from `search`:

    1. If `policies` is None, the policies that place state or copy nothing are searched first. Any
       other policy is skipped if it would be slower than the best plan even with copies that take
       no time. This halves the time of the search.
    2. If no plan of `search` fits, the plans that need the least memory (`capacity.py`) are tried,
       and the first that fits is improved.

    Raises UserError as `search` does.
    """
    names = policy_library.contenders() if policies is None else policies

    def best_of(chosen: list[str]) -> list[Choice]:
        return search(
            model,
            hardware,
            workload,
            source=source,
            hardware_name=hardware_name,
            device_limit=device_limit,
            host_limit=host_limit,
            policies=chosen,
        )

    bounded: list[RunnerUp] = []
    if hardware.unified or names != policy_library.contenders():
        choices = best_of(names)
    else:
        later = [
            name
            for name in policy_library.updating(names, workload)
            if policy_library.find(name).streams and not policy_library.find(name).places_state
        ]
        # The likely winner is searched last, so that its schedule is still cached afterwards.
        first = sorted(
            (name for name in names if name not in later),
            key=lambda name: policy_library.find(name).places_state,
        )
        choices = best_of(first)
        if choices[0].feasible:
            bounded = [
                RunnerUp(
                    policy=name,
                    step_seconds=_least_seconds(name, choices[0], hardware),
                    at_least=True,
                )
                for name in later
            ]
            bounded = [entry for entry in bounded if entry.step_seconds >= choices[0].step_seconds]
        if hopeful := [name for name in later if name not in [entry.policy for entry in bounded]]:
            choices = sorted([*choices, *best_of(hopeful)], key=rank)
    own = [
        choice for choice in choices if not policy_library.find(choice.plan.policy).prediction_only
    ]
    if own and not own[0].feasible:
        costs = cost_model(hardware, model, workload)
        if least := _least(own[0].plan, hardware, costs, names):
            choice = assess(least, costs)
            choices = [
                choice,
                *(other for other in choices if other.plan.policy != choice.plan.policy),
            ]
    return [_with_runner_up(choices, bounded), *choices[1:]]


def best_estimate(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    device_limit: int | None = None,
    host_limit: int | None = None,
    policies: list[str] | None = None,
    most_seconds: float = math.inf,
) -> Estimate | None:
    """Returns the memory and the time of the first of `candidates`, or None if it does not fit.

    The arguments are those of `candidates`, and `most_seconds`: if every plan takes that many
    seconds per step or longer, the result may be None or any such plan. With a single policy that
    obeys every field of the placement, the plan is not lowered in full, which saves time. Raises
    UserError as `candidates` does.
    """
    if not policies or len(policies) > 1 or not policy_library.find(policies[0]).obeys_everything:
        best = candidates(
            model,
            hardware,
            workload,
            device_limit=device_limit,
            host_limit=host_limit,
            policies=policies,
        )[0]
        return best if best.feasible else None
    (plan,) = plans_of(
        model,
        hardware,
        workload,
        device_limit=device_limit,
        host_limit=host_limit,
        policies=policies,
    )
    costs = cost_model(hardware, model, workload)
    if placed := best_placed(plan, costs, most_seconds * 1e9):
        return placed
    least = _least(PlacementSearch(plan, costs).nearest_miss(), hardware, costs, policies)
    return estimate(least, costs) if least else None


def _least(plan: Plan, hardware: HardwareSpec, costs: CostModel, names: list[str]) -> Plan | None:
    """Returns the first plan that fits among those that need the least memory, or None.

    If its policy places state, it is improved by a climb. `names` are the policies. Model, workload
    and limits are those of `plan`.
    """
    footprint = fitting(plan, hardware, costs, names)
    if footprint is None:
        return None
    least = footprint.placed()
    if policy_library.find(least.policy).obeys_everything:
        return PlacementSearch(least, costs, more=True).improved(least)
    return least


def _with_runner_up(found: list[_Found], bounded: list[RunnerUp]) -> _Found:
    """Returns the first of `found` with its runner-up.

    The runner-up is the fastest entry among three kinds: the other choices that fit, the present
    runner-up of the first choice, and the policies of `bounded`, which were skipped because of a
    lower bound.
    """
    best, *others = found
    tried = [
        RunnerUp(policy=other.plan.policy, knobs=other.plan.knobs, step_seconds=other.step_seconds)
        for other in others
        if _is_rival(other)
    ]
    if best.runner_up and best.runner_up.knobs != best.plan.knobs:
        tried.append(best.runner_up)
    tried += bounded
    return msgspec.structs.replace(
        best,
        runner_up=(
            min(tried, key=lambda entry: entry.step_seconds, default=None)
            if _is_rival(best)
            else None
        ),
    )


def _is_rival(choice: Estimate) -> bool:
    """Returns whether the plan fits and the runtime can execute it."""
    return choice.feasible and not policy_library.find(choice.plan.policy).prediction_only


def _least_seconds(name: str, best: Choice, hardware: HardwareSpec) -> float:
    """Returns a lower bound, in seconds, of the step time of policy `name` with any knobs.

    Model and workload are those of `best`. The bound is the evaluator's time of at most two
    micro-batches, with the most slots that a search tries, with copies that take no time, and with
    all activations saved if the policy can do so. Each further micro-batch adds its compute time.
    The times with and without gradient staging are computed, and the smaller one is the bound. It
    is 0 if the policy accepts neither.
    """
    costs = cost_model(hardware, best.plan.model, best.plan.workload)
    free, least = ScaledCosts(costs, lambda op: op, {"h2d": 0.0, "d2h": 0.0}), []
    saves = "saved_activations" in policy_library.find(name).placements
    placement = Placement(saved_activations="all" if saves else "")
    for staging in (0, max(GRADIENT_STAGING)):
        knobs = Knobs(
            weight_slots=max(WEIGHT_SLOTS),
            gradient_slots=max(GRADIENT_SLOTS),
            gradient_staging=staging,
            chunk_bytes=ONE_COPY,
            placement=placement,
        )
        try:
            # `lower_uncached` keeps the schedule of the best plan in the cache of `lower`.
            schedule = policy_library.lower_uncached(
                with_knobs(msgspec.structs.replace(best.plan, policy=name, knobs=knobs), groups=2)
            )
        except UserError:
            # The policy accepts only one value of some knob, or it sums gradients in staging
            # buffers and so cannot do without them.
            continue
        micro_batch_ns = sum(
            free.duration_ns(op) for op in schedule.lanes["compute"] if op.id.endswith(".m1")
        )
        least.append(
            uncontended_makespan_ns(schedule, free)
            + max(best.plan.workload.accumulation - 2, 0) * micro_batch_ns
        )
    return min(least, default=0) / 1e9
