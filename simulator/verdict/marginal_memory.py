"""Predicts how much faster a step would be with one more GiB of device or host memory.

The search is repeated with the additional memory. The gain is approximate: if there are more than
two micro-batches, the time of two is extrapolated.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.metrics import tokens_per_second
from megatrain.simulator.planner.assessment import (
    Choice,
    estimate,
    first_knobs,
    plan_account,
    with_knobs,
)
from megatrain.simulator.planner.filling import GIB, Filling, all_on_host, ranges
from megatrain.simulator.planner.search import best_of_policy, best_placed
from megatrain.simulator.planner.slot_search import (
    FILLED,
    GRADIENT_SLOTS,
    GRADIENT_STAGING,
    ONE_COPY,
    WEIGHT_SLOTS,
    intervals,
)
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan


class MarginalMemory(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of one more GiB of memory on the device or on the host."""

    place: str
    """`device` or `host`."""
    step_seconds: float
    """Predicted seconds of one step with the additional memory."""
    tokens_per_second: float
    """Predicted tokens per second with the additional memory."""
    gain: float
    """Relative gain in tokens/s: 0.01 is 1 % more. 0 if the memory gains nothing."""
    knobs: Knobs | None = None
    """Knobs of the plan that uses the additional memory. None if the memory gains nothing."""


def one_more_gib(
    choice: Choice, hardware: HardwareSpec, costs: CostModel
) -> tuple[MarginalMemory, ...]:
    """Returns the effect of one more GiB of device memory, and of one more GiB of host memory.

    Returns () if the choice does not fit, if its policy is only for prediction, or if the machine
    has unified memory, where nothing streams.
    """
    if not choice.feasible or hardware.unified or policies.find(choice.plan.policy).prediction_only:
        return ()
    work, effects = choice.plan.workload, []
    before = tokens_per_second(work, choice.step_seconds)
    for place in ("device", "host"):
        knobs, share = _better(choice, place, costs)
        seconds = choice.step_seconds * share
        speed = tokens_per_second(work, seconds)
        effects.append(
            MarginalMemory(
                place=place,
                step_seconds=seconds,
                tokens_per_second=speed,
                gain=speed / before - 1,
                knobs=knobs,
            )
        )
    return tuple(effects)


def _better(choice: Choice, place: str, costs: CostModel) -> tuple[Knobs | None, float]:
    """Returns the best knobs with one more GiB in `place`, and their step time divided by the step
    time of `choice`.

    Returns None and 1 if no knobs are faster.
    """
    plan, limit = choice.plan, f"{place}_limit_bytes"
    roomier = msgspec.structs.replace(
        plan,
        **{limit: getattr(plan, limit) + GIB},
        knobs=first_knobs(plan),
        digest="",
        prediction=None,
    )
    policy = policies.find(plan.policy)
    if not policy.obeys_everything:
        if not policy.places_state and _has_plenty(plan, place, costs):
            return None, 1.0
        again = best_of_policy(roomier, costs)
        return (
            (again.plan.knobs, again.step_seconds / choice.step_seconds)
            if again.step_seconds < choice.step_seconds
            else (None, 1.0)
        )
    if _needs_nothing(choice) or (place == "host" and _holds_everything(plan, costs)):
        return None, 1.0
    now = estimate(plan, costs).step_seconds
    found = best_placed(roomier, costs, now * 1e9 - costs.step_overhead_ns)
    if found is None or found.step_seconds >= now:
        return None, 1.0
    return found.plan.knobs, found.step_seconds / now


def _has_plenty(plan: Plan, place: str, costs: CostModel) -> bool:
    """Returns whether the most slots that a search tries fit in `place`, at every checkpoint
    interval, with all layers in the fields of the placement that a search fills. If they do, more
    memory gains nothing.
    """
    # Layers with saved activations save attention, too.
    filled = {*FILLED} & {*policies.find(plan.policy).placements} - {"saved_attention"}
    most: dict[str, Any] = {
        "weight_slots": max(WEIGHT_SLOTS),
        "gradient_slots": max(GRADIENT_SLOTS),
        "gradient_staging": max(GRADIENT_STAGING),
        "chunk_bytes": ONE_COPY,
        "placement": Placement(**dict.fromkeys(filled, "all")),
    }
    for interval in intervals(plan.model.layers):
        large = with_knobs(plan, groups=2, checkpoint_interval=interval, **most)
        try:
            account = plan_account(large, policies.outline(large), costs)
        except UserError:  # the policy accepts only one value of some knob
            return False
        if {
            "device": account.device_peak_bytes > account.device_limit_bytes,
            "host": account.host_peak_bytes > account.host_limit_bytes,
        }[place]:
            return False
    return True


def _needs_nothing(choice: Choice) -> bool:
    """Returns whether the plan copies nothing and recomputes nothing, so that more memory gains
    nothing.
    """
    plan = choice.plan
    return not choice.streams and len(plan.placed("saved_activations")) == plan.model.layers


def _holds_everything(plan: Plan, costs: CostModel) -> bool:
    """Returns whether the host can hold all state, all layer inputs and all attention outputs, so
    that more host memory gains nothing.
    """
    filling = Filling(plan, costs)
    attention = ranges([layer.name for layer in plan.model.decoders], filling.offloadable)
    everything = Placement(
        offloaded_inputs="all",
        saved_attention=attention,
        offloaded_attention=attention,
        host_updated=all_on_host(plan),
    )
    account = filling.account(with_knobs(plan, placement=everything))
    return account.host_peak_bytes <= plan.host_limit_bytes
