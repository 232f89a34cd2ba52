"""Scheduling policies: how one optimizer step is ordered.

A policy writes a step as a sequential program over buffers. The builder derives the dependencies;
lanes and slots give the overlap. `Policy` is the interface and `registry.py` finds policies by name.
The functions below take a plan and ask the policy that it names.
"""

from __future__ import annotations

import functools

import msgspec

from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.evaluation import forward_only
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.policies.registry import find, registered
from megatrain.simulator.schedule import Schedule

__all__ = [
    "Policy",
    "contenders",
    "defers_update",
    "dominated_by",
    "evaluation",
    "executable",
    "find",
    "flush_update",
    "is_prediction_only",
    "lower",
    "lower_anew",
    "names",
    "outline",
    "peers",
    "places",
    "verified",
]


def names() -> list[str]:
    """Every registered policy that the runtime executes."""
    return [name for name in registered() if not find(name).prediction_only]


def contenders() -> list[str]:
    """The policies of `names` that no other one dominates: the fastest plan is one of theirs."""
    return [name for name in names() if not find(name).dominated_by]


def peers() -> list[str]:
    """Every registered policy of another system, which is only for prediction."""
    return [name for name in registered() if find(name).prediction_only]


def dominated_by(name: str) -> str:
    """The policy that can do all that `name` can; empty where there is none."""
    return find(name).dominated_by


def is_prediction_only(name: str) -> bool:
    """Whether the policy is another system's and cannot be executed."""
    return find(name).prediction_only


def places(name: str) -> bool:
    """Whether the policy keeps each layer's state where the plan's placement says."""
    return find(name).places_state


def lower(plan: Plan) -> Schedule:
    """The schedule of `plan` under its policy.

    Raises UserError for an unknown policy, for a plan that the policy refuses, and with the policy's
    name where the policy itself fails.
    """
    find(plan.policy)
    blank = msgspec.structs.replace(plan, digest="", prediction=None, device_limit_bytes=1, host_limit_bytes=1)
    return _lowered(blank)


@functools.lru_cache(maxsize=2)
def _lowered(plan: Plan) -> Schedule:
    """Cached because a plan is lowered three times: to time, assess and explain it. Lowering a dense
    120B model takes 0.4 s.
    """
    return lower_anew(plan)


def lower_anew(plan: Plan) -> Schedule:
    """`lower` without the cache."""
    policy = find(plan.policy)
    try:
        return policy.lower(plan)
    except UserError:
        raise
    except Exception as error:
        raise _failed(plan.policy, "lower", error) from error


def outline(plan: Plan, *, merged: bool = False) -> Schedule:
    """A schedule with the buffers of `lower`; its ops may be left out, which takes a tenth of the time.

    With `merged` the buffers of a pool may be one, for a caller that asks only for bytes.
    """
    policy = find(plan.policy)
    if type(policy).buffers is Policy.buffers:
        return lower(plan)
    try:
        return policy.buffers(plan, merged=merged)
    except UserError:
        raise
    except Exception as error:
        raise _failed(plan.policy, "buffers", error) from error


def _failed(name: str, method: str, error: Exception) -> UserError:
    """The error of a policy that failed in one of its methods."""
    text = str(error).splitlines()[0] if str(error) else ""
    return UserError(
        f"policy {name}",
        found=f"{type(error).__name__} in {method}: {text}",
        allowed="a schedule, or a UserError for a plan that the policy refuses",
        fix="mend the policy, or use another one",
    )


def defers_update(plan: Plan) -> bool:
    """Whether a step of `plan` leaves its update to the next one."""
    return find(plan.policy).defers_update(plan)


def flush_update(plan: Plan) -> Schedule | None:
    """The deferred update of a step of `plan`, on the step's buffers; None where none is deferred."""
    return find(plan.policy).flush_update(plan)


def evaluation(plan: Plan) -> Schedule:
    """The micro-batches of one step, forward with loss, on the step's buffers.

    Raises UserError for a policy whose buffers it cannot use.
    """
    return forward_only(plan, lower(plan))


def verified(plan: Plan) -> Schedule:
    """The plan's schedule, checked. Raises UserError where its digest is not the plan's."""
    schedule = lower(plan)
    if plan.digest != schedule.digest:
        raise UserError(
            "plan: digest",
            found=repr(plan.digest),
            allowed=f"{schedule.digest}, what policy {plan.policy} makes of it",
            fix="make the plan again with `megatrain plan`",
        )
    schedule.check()
    return schedule


def executable(plan: Plan) -> Schedule:
    """`verified`, for the runtime. Raises UserError for a policy that is only for prediction."""
    schedule = verified(plan)
    if is_prediction_only(plan.policy):
        raise UserError(
            "plan: policy",
            found=f"{plan.policy}, another system's, which is only for prediction",
            allowed=", ".join(names()),
            fix="plan with one of these, or use that system itself",
        )
    return schedule
