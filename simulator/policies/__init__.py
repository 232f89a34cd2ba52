"""Scheduling policies: each public module of this folder is one, and has `lower(plan) -> Schedule`.

A policy writes an optimizer step as a sequential program over buffers; the builder derives the dependencies, lanes and slots give
the overlap. To add one, add a file: it is found by its name (see docs/adding.md). One whose module says `PREDICTION_ONLY = True` is another
system's: it can be simulated and compared, not executed. One that says `DOMINATED_BY = NAME` is a yardstick: planned only when asked for. `PLACES = True` says that it obeys
the placement of weights, gradients and optimizer state.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

import msgspec

from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies._evaluation import forward_only
from megatrain.simulator.schedule import Schedule


def names() -> list[str]:
    """Every policy that the runtime executes."""
    return [name for name in _all() if not is_prediction_only(name)]


def contenders() -> list[str]:
    """Those of `names` among which the fastest is."""
    return [name for name in names() if not dominated_by(name)]


def dominated_by(name: str) -> str:
    """The policy that can do all that this one can; empty where there is none."""
    return str(getattr(importlib.import_module(f"{__name__}.{name}"), "DOMINATED_BY", ""))


def peers() -> list[str]:
    """Every policy that is only for prediction: what other systems do."""
    return [name for name in _all() if is_prediction_only(name)]


def _all() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def is_prediction_only(name: str) -> bool:
    """Of a policy that there is."""
    return bool(getattr(importlib.import_module(f"{__name__}.{name}"), "PREDICTION_ONLY", False))


def places(name: str) -> bool:
    """The policy keeps each layer's data where the plan's placement says."""
    return bool(getattr(importlib.import_module(f"{__name__}.{name}"), "PLACES", False))


def lower(plan: Plan) -> Schedule:
    """The schedule of `plan` under its policy. Raises UserError for an unknown policy or a knob that the policy cannot use."""
    if plan.policy not in _all():
        raise UserError("plan: policy", found=repr(plan.policy), allowed=", ".join((*names(), *peers())), fix="name one of these")
    return _lowered(msgspec.structs.replace(plan, digest="", prediction=None, device_limit_bytes=1, host_limit_bytes=1))


@functools.lru_cache(maxsize=2)
def _lowered(plan: Plan) -> Schedule:
    """Kept for the last two plans: who times a plan goes on to assess it and then to explain it, at 0.4 s a lowering for 120 dense billions."""
    return lower_anew(plan)


def lower_anew(plan: Plan) -> Schedule:
    """`lower` of a plan whose policy is known, without looking whether it was done before."""
    schedule: Schedule = importlib.import_module(f"{__name__}.{plan.policy}").lower(plan)
    return schedule


def outline(plan: Plan) -> Schedule:
    """`lower` for whom only the buffers matter: without ops where the policy can tell them alone, in a tenth of the time."""
    module = importlib.import_module(f"{__name__}.{plan.policy}")
    schedule: Schedule = module.outline(plan) if hasattr(module, "outline") else lower(plan)
    return schedule


def owes(plan: Plan) -> bool:
    """A step of `plan` leaves its update to the next one."""
    says = getattr(importlib.import_module(f"{__name__}.{plan.policy}"), "owes", None)
    return bool(says and says(plan))


def drain(plan: Plan) -> Schedule | None:
    """What a step of `plan` leaves to be done before its state is whole, on buffers of the step's; None where it leaves nothing."""
    module = importlib.import_module(f"{__name__}.{plan.policy}")
    return module.drain(plan) if hasattr(module, "drain") else None


def evaluation(plan: Plan) -> Schedule:
    """The micro-batches of one step, forward with loss and nothing else, on buffers of the step's: what measures a model between steps.

    Raises UserError for a policy whose weights stream through slots of unknown names.
    """
    return forward_only(plan, outline(plan))


def verified(plan: Plan) -> Schedule:
    """The plan's schedule, checked. Raises UserError where it is not the one whose digest the plan carries."""
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
    """`verified`, for the runtime. Raises UserError also for a policy that is only for prediction."""
    schedule = verified(plan)
    if is_prediction_only(plan.policy):
        raise UserError(
            "plan: policy",
            found=f"{plan.policy}, another system's, which is only for prediction",
            allowed=", ".join(names()),
            fix="plan with one of these, or use that system itself",
        )
    return schedule
