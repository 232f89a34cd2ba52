"""Planner: which policy and which knobs train this model fastest on this machine, in the memory that there is.

It enumerates and never bisects: more slots or smaller copies can be slower once lanes slow each other. What is enumerated hangs on what
the policy lets one choose: slots (`slot_search.py`), or also where each layer's data is (`placing.py`).

Not searched: the workload (batch, dtype, clipping, loss chunk): it decides the arithmetic, so it is the user's. A smaller batch is only
suggested, where nothing fits.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.assessment import Choice, RunnerUp, assess, plan_account, varied
from megatrain.simulator.capacity import usable
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.costs.changed import Changed
from megatrain.simulator.errors import UserError
from megatrain.simulator.evaluator import makespan_ns
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.placing import PlacementSearch
from megatrain.simulator.plan import Knobs, Plan
from megatrain.simulator.policies.policy import PolicyWarning
from megatrain.simulator.slot_search import GRADIENT_SLABS, GRADIENT_SLOTS, ONE_COPY, WEIGHT_SLOTS, SlotSearch
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

__all__ = ["Choice", "assess", "candidates", "plan_account", "rank", "search"]


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
    """The best plan of each policy: those that fit, fastest first, then the nearest misses. Limits in bytes, the machine's by default.
    `policies`: by default those that the runtime executes and that may be the fastest; one that is only for prediction has no knobs to search. On a
    machine of one memory nothing streams: `resident` alone, since another system's offload would keep in it what it has there already.

    `source` and `hardware_name` go into the plans, the names of model and machine by default. Raises UserError for an unknown policy and for costs that were
    not measured.
    """
    names = policy_library.contenders() if policies is None else list(dict.fromkeys(policies))
    for name in names:
        policy_library.find(name)
    if hardware.unified:
        names = [name for name in names if name == "resident"]
    if not names:
        raise UserError(
            "policy", found="one that streams, on a machine of one memory, where there is nothing to copy", allowed="resident", fix="leave --policy out"
        )
    first = Plan(
        policy=names[0],
        hardware=hardware_name or hardware.name,
        source=source or model.name,
        model=model,
        workload=workload,
        device_limit_bytes=hardware.device_bytes if device_limit is None else device_limit,
        host_limit_bytes=hardware.host_bytes if host_limit is None else host_limit,
    )
    costs = cost_model(hardware, model, workload)
    plans = [msgspec.structs.replace(first, policy=name) for name in names]
    return sorted(_searched(plans, costs), key=rank)


def _searched(plans: list[Plan], costs: CostModel) -> list[Choice]:
    """The best plan of each policy. One that refuses, or fails, is left out with a PolicyWarning unless it is the only one."""
    choices: list[Choice] = []
    refused: UserError | None = None
    for plan in plans:
        try:
            choices.append(_best(plan, costs))
        except UserError as error:
            if len(plans) > 1:
                warnings.warn(f"left out: {error}", PolicyWarning, stacklevel=3)
            refused = refused or error
    if refused and not choices:
        raise refused
    return choices


def _best(plan: Plan, costs: CostModel) -> Choice:
    """The best plan of one policy."""
    if policy_library.is_prediction_only(plan.policy):
        return assess(plan, costs)
    return PlacementSearch(plan, costs).best() if policy_library.places(plan.policy) else SlotSearch(plan, costs).best()


def rank(choice: Choice) -> tuple[bool, int, int, float, str]:
    """What fits before what does not, and of that the one that lacks least of what cannot be bought: device memory."""
    account = choice.account
    lacking = max(account.device_peak_bytes - account.device_limit_bytes, 0)
    return not choice.feasible, lacking, account.excess_bytes, choice.step_seconds, choice.plan.policy


def candidates(
    model: ModelSpec, hardware: HardwareSpec, workload: Workload, *, source: str = "", hardware_name: str = "",
    device_limit: int | None = None, host_limit: int | None = None, policies: list[str] | None = None,
) -> list[Choice]:  # fmt: skip
    """The best plan of each policy, best first. On a unified machine both limits hold for the one memory that there is. Where the search finds
    none that fits, the most frugal plan of a policy is taken if that does. Where no policy is named, one that even with free copies takes longer than
    the best plan of those that obey a placement is not searched: that saves half of the time.
    """
    names = policy_library.contenders() if policies is None else policies
    if hardware.unified:
        device_limit = host_limit = min(device_limit or hardware.device_bytes, host_limit or hardware.host_bytes)

    def found_by(chosen: list[str]) -> list[Choice]:
        return search(
            model, hardware, workload, source=source, hardware_name=hardware_name, device_limit=device_limit, host_limit=host_limit, policies=chosen
        )  # fmt: skip

    bounded: list[RunnerUp] = []
    if hardware.unified or names != policy_library.contenders():
        found = found_by(names)
    else:
        later = [name for name in names if name != "resident" and not policy_library.places(name)]
        first = sorted((name for name in names if name not in later), key=policy_library.places)  # the likely winner last: its schedule is still known then
        found = found_by(first)
        if found[0].feasible:
            bounded = [RunnerUp(policy=name, step_seconds=_least_seconds(name, found[0], hardware), at_least=True) for name in later]
            bounded = [entry for entry in bounded if entry.step_seconds >= found[0].step_seconds]
        if hopeful := [name for name in later if name not in [entry.policy for entry in bounded]]:
            found = sorted([*found, *found_by(hopeful)], key=rank)
    own = [choice for choice in found if not policy_library.is_prediction_only(choice.plan.policy)]
    if own and not own[0].feasible:
        costs = cost_model(hardware, model, workload)
        fitting = (footprint for footprint in usable(own[0].plan, hardware, costs, names) if footprint.account().fits)
        if footprint := next(fitting, None):
            choice = assess(footprint.placed(), costs)
            found = [choice, *(other for other in found if other.plan.policy != choice.plan.policy)]
    return [_beside(found, bounded), *found[1:]]


def _beside(found: list[Choice], bounded: list[RunnerUp]) -> Choice:
    """The best choice, with the best of what it was chosen before."""
    best, *others = found
    tried = [RunnerUp(policy=other.plan.policy, knobs=other.plan.knobs, step_seconds=other.step_seconds) for other in others if _is_rival(other)]
    if best.runner_up:
        tried.append(best.runner_up)
    tried += bounded
    return msgspec.structs.replace(best, runner_up=min(tried, key=lambda entry: entry.step_seconds, default=None) if _is_rival(best) else None)


def _is_rival(choice: Choice) -> bool:
    return choice.feasible and not policy_library.is_prediction_only(choice.plan.policy)


def _least_seconds(name: str, best: Choice, hardware: HardwareSpec) -> float:
    """A bound that no knobs of the policy `name` beat, for the model and workload of `best`: the evaluator's time of at most two micro-batches with as many
    slots as are ever tried and copies that take none, through slabs and without, behind the compute of the others.
    """
    costs = cost_model(hardware, best.plan.model, best.plan.workload)
    free, least = Changed(costs, lambda op: op, {"h2d": 0.0, "d2h": 0.0}), []
    for slabs in (0, max(GRADIENT_SLABS)):
        knobs = Knobs(weight_slots=max(WEIGHT_SLOTS), gradient_slots=max(GRADIENT_SLOTS), gradient_slabs=slabs, chunk_bytes=ONE_COPY)
        try:
            schedule = policy_library.lower_anew(varied(msgspec.structs.replace(best.plan, policy=name, knobs=knobs), accumulation=2))  # the best stays known
        except UserError:  # a policy for which some knob is fixed; without slabs nothing can be summed
            continue
        one = sum(free.duration_ns(op) for op in schedule.lanes["compute"] if op.id.endswith(".m1"))
        least.append(makespan_ns(schedule, free) + max(best.plan.workload.accumulation - 2, 0) * one)
    return min(least, default=0) / 1e9
