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
from megatrain.simulator.assessment import Choice, assess, plan_account
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.placing import PlacementSearch
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.policy import PolicyWarning
from megatrain.simulator.slot_search import SlotSearch
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

__all__ = ["Choice", "assess", "plan_account", "rank", "search"]


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
