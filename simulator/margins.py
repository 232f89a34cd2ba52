"""Margins: what one more GiB of device or of host memory would buy, tried around one choice.

For a policy that obeys a placement the memory is given to more layers, in the planner's orders and with one stored layer more or as many; on the host, to the
placements that only the host was too small for. For others the search is done again. A new search may gain more.
The fastest is found with whole layers as copies; of more than two micro-batches, the ratio of two is taken as that of all: a gain is `about`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from megatrain.simulator import policies
from megatrain.simulator.assessment import Choice, plan_account, varied
from megatrain.simulator.costs import CostModel
from megatrain.simulator.errors import UserError
from megatrain.simulator.filling import GIB, Filling, last
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.metrics import tokens_per_second
from megatrain.simulator.placing import PlacementSearch
from megatrain.simulator.plan import Knobs, Placement, Plan
from megatrain.simulator.slot_search import GRADIENT_SLABS, GRADIENT_SLOTS, ONE_COPY, WEIGHT_SLOTS, SlotSearch, intervals

_USUAL_SLOTS = {"weight_slots": 2, "gradient_slots": 2, "state_slots": 4}  # those that a search begins with


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """One GiB more in a place."""

    place: str
    """`device` or `host`"""
    step_seconds: float
    tokens_per_second: float
    gain: float
    """of tokens/s: 0.01 is 1 % more; 0 where it buys nothing"""
    knobs: Knobs | None = None
    """what would be chosen then; None where it buys nothing"""


def one_more_gib(choice: Choice, hardware: HardwareSpec, costs: CostModel) -> tuple[Margin, ...]:
    """For each place; none for a choice that does not fit, for another system's, and on a unified machine, where nothing streams."""
    if not choice.feasible or hardware.unified or policies.is_prediction_only(choice.plan.policy):
        return ()
    found = []
    for place in ("device", "host"):
        knobs, share = _better(choice, place, costs)
        seconds = choice.step_seconds * share
        speeds = [tokens_per_second(choice.plan.workload, time) for time in (seconds, choice.step_seconds)]
        found.append(Margin(place=place, step_seconds=seconds, tokens_per_second=speeds[0], gain=speeds[0] / speeds[1] - 1, knobs=knobs))
    return tuple(found)


def _better(choice: Choice, place: str, costs: CostModel) -> tuple[Knobs | None, float]:
    """The knobs that more memory allows, and their time over the choice's."""
    plan = choice.plan
    more = {"device": ("device_limit_bytes", plan.device_limit_bytes), "host": ("host_limit_bytes", plan.host_limit_bytes)}[place]
    roomier = msgspec.structs.replace(plan, **{more[0]: more[1] + GIB})
    if not policies.places(plan.policy):
        if _has_plenty(plan, place, costs):
            return None, 1.0
        again = SlotSearch(roomier, costs).best()
        return (again.plan.knobs, again.step_seconds / choice.step_seconds) if again.step_seconds < choice.step_seconds else (None, 1.0)
    search = PlacementSearch(roomier, costs)
    wider: list[Plan] = []
    if place == "device":
        for slots in ({}, _USUAL_SLOTS):
            wider += search.filling.wider(varied(roomier, **slots))
            wider += search.filling.with_other_inputs(varied(roomier, **slots))
    else:
        wider += _freed(search.filling, roomier, plan.host_limit_bytes)
    now = search.time(plan)
    found = search.faster(now, plan, list(dict.fromkeys(other for other in wider if search.filling.account(other).fits)))
    return (found[1].knobs, found[0] / now) if found else (None, 1.0)


def _has_plenty(plan: Plan, place: str, costs: CostModel) -> bool:
    """The most slots that a search tries fit in the place as it is, at every checkpoint interval."""
    most = {"weight_slots": max(WEIGHT_SLOTS), "gradient_slots": max(GRADIENT_SLOTS), "gradient_slabs": max(GRADIENT_SLABS), "chunk_bytes": ONE_COPY}
    for interval in intervals(plan.model.layers):
        large = varied(plan, accumulation=2, checkpoint_interval=interval, **most)
        try:
            account = plan_account(large, policies.outline(large), costs)
        except UserError:  # a policy for which some knob is fixed
            return False
        if {"device": account.device_peak_bytes > account.device_limit_bytes, "host": account.host_peak_bytes > account.host_limit_bytes}[place]:
            return False
    return True


def _freed(filling: Filling, plan: Plan, before: int) -> Iterator[Plan]:
    """What fits and does not with only `before` bytes of host memory. Nothing, where those hold everything as it is."""
    everything = varied(plan, placement=Placement(parked="all", host_updated="all"))
    if filling.account(everything).host_peak_bytes <= before:
        return
    for slots, updated in itertools.product(({}, _USUAL_SLOTS), (plan.knobs.placement, Placement(host_updated="all"))):
        for stored in sorted({0, len(plan.placed("stored"))}):
            base = Placement(stored=last(plan.model.layers, stored))
            for other in filling.filled(varied(plan, placement=updated, **slots), base):
                if not filling.account(msgspec.structs.replace(other, host_limit_bytes=before)).fits:
                    yield other
