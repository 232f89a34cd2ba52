"""Changes one knob of a plan at a time, and makes room for each change.

A search adds to a plan what fits in the memory that is left. So it misses a change that needs more
memory but gains more than what this memory holds now: larger copies in place of the moments of one
layer, or one more layer on the device in place of a weight slot. `changes` ignores the memory, and
`fitting` then gives up something else, in several ways.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from megatrain.simulator.model.layer import EMBEDDING
from megatrain.simulator.planner.assessment import exchanged_bytes, with_knobs
from megatrain.simulator.planner.filling import (
    CLASSES,
    Filling,
    host_updating,
    in_slots,
    last,
    ranges,
    updated_like,
)
from megatrain.simulator.schedule.plan import Plan

FEW_SLOTS = {"gradient_slots": 1, "state_slots": 2}
"""Numbers of slots that need less memory and often suffice."""
_MORE_LAYERS = (1, 2)  # decoder layers that receive memory in one change
_MORE_SLOTS = (1, 2, 4)  # weight slots that are added in one change
_LARGER = (2, 4)  # factors by which copies become larger in one change


class MakingRoom:
    """Changes plans of one model and workload, and makes them fit again."""

    def __init__(self, filling: Filling, usual: Plan) -> None:
        """`usual` has the numbers of slots with which a search begins."""
        self._filling, self._usual = filling, usual

    def changes(self, plan: Plan, largest_chunk: int) -> Iterator[Plan]:
        """Yields plans that differ from `plan` by one change, whether they fit or not.

        The changes are: more layers on the device, the state of the embedding or of the head there,
        larger copies of up to `largest_chunk` bytes, gradients that are exchanged whole, more
        weight slots, the usual or a few slots, another share of host updates, other memory for the
        layer inputs, other saved attention outputs, and one more layer or all layers that save
        their activations.
        """
        knobs, placement, layers = plan.knobs, plan.knobs.placement, plan.model.layers
        for more in _MORE_LAYERS:
            yield self._with_more_layers(plan, more)
        for end in (EMBEDDING, plan.model.head):
            yield self._with_end(plan, end)
        for factor in _LARGER:
            if factor * knobs.chunk_bytes <= largest_chunk:
                yield with_knobs(plan, chunk_bytes=factor * knobs.chunk_bytes)
        if plan.gpus > 1 and 0 < knobs.exchange_bytes < exchanged_bytes(plan):
            yield with_knobs(plan, exchange_bytes=exchanged_bytes(plan))
        for more in _MORE_SLOTS:
            if knobs.weight_slots + more <= len(in_slots(plan)):
                yield with_knobs(plan, weight_slots=knobs.weight_slots + more)
        usual = self._usual.knobs
        names = ("weight_slots", "gradient_slots", "state_slots")
        yield with_knobs(
            plan, **{name: max(getattr(knobs, name), getattr(usual, name)) for name in names}
        )
        yield self._with_few_slots(plan)
        yield _placed(plan, host_updated="")
        yield host_updating(plan, every=2)
        yield host_updating(plan)
        yield _placed(plan, offloaded_inputs="" if placement.offloaded_inputs else "all")
        yield _without_attention(plan)
        if not placement.saved_attention:
            for attention in self._filling.with_attention(plan, placement):
                yield with_knobs(plan, placement=attention)
        saved = len(plan.placed("saved_activations"))
        for count in sorted({min(saved + 1, layers), layers} - {saved}):
            yield _placed(plan, saved_activations=last(layers, count))

    def fitting(self, plan: Plan) -> Iterator[Plan]:
        """Yields `plan` if it fits, and otherwise plans that fit and are like it.

        Each of these gives up one thing: state on the device, whole layers on the device, weight
        slots, other slots, layer inputs on the device, attention outputs, or saved activations.
        State is given up in this order: moments and low halves, gradients, weights. If other slots,
        layer inputs or attention outputs are too little, whole layers are given up with them. If
        layer inputs are too little, weight slots are given up with them in another plan. If all
        weight slots but one are too little, whole layers are given up with them, too. One more
        plan that gives up whole layers saves more activations in the memory that is then left.
        """
        fits, room = self._fits, self._filling.room
        if fits(plan):
            yield plan
            return
        less = self._filling.trimmed(plan)
        if room(less) < 0:
            less = self._filling.trimmed(less, ("gradients",))
        if room(less) < 0:
            less = updated_like(self._filling.trimmed(less, ("weights",)), plan)
        offloading, without = _placed(plan, offloaded_inputs="all"), _without_attention(plan)
        others = [less]
        for kept in dict.fromkeys((plan, offloading)) if in_slots(plan) else ():
            slots = (
                with_knobs(kept, weight_slots=count)
                for count in range(plan.knobs.weight_slots - 1, 0, -1)
            )
            one_slot = with_knobs(kept, weight_slots=1)
            others.append(
                next(filter(fits, slots), None) or self._filling.with_fewer_layers(one_slot)
            )
        leaner = (plan, self._with_few_slots(plan), offloading, without)
        others += map(self._filling.with_fewer_layers, dict.fromkeys(leaner))
        others.append(self._filling.saving_most(self._filling.with_fewer_layers(plan)))
        for kept in dict.fromkeys((plan, without)):
            saved = len(kept.placed("saved_activations"))
            most = self._filling.most_saved(kept, kept.knobs.placement)
            if most >= 0:
                count = min(most, saved)
                others.append(_placed(kept, saved_activations=last(plan.model.layers, count)))
        yield from filter(fits, dict.fromkeys(others))

    def _fits(self, plan: Plan) -> bool:
        return self._filling.account(plan).fits

    def _with_more_layers(self, plan: Plan, more: int) -> Plan:
        """Returns `plan` with `more` decoder layers more on the device, in each class of state of
        which the plan keeps the first layers, but not all, on the device.

        The host updates the same share of the streamed layers as in `plan`.
        """
        layers, held = list(plan.model.stack), dict[str, str]()
        for name in CLASSES:
            kept = plan.placed(name)
            count = sum(plan.model.stack[layer].kind == "decoder" for layer in kept)
            if layers[0] in kept and count < plan.model.layers:
                held[name] = ranges(layers, {*kept, *layers[: 1 + count + more]})
        return updated_like(_placed(plan, **held), plan)

    def _with_end(self, plan: Plan, end: str) -> Plan:
        """Returns `plan` with the state of its embedding or head on the device, in each class of
        which the plan keeps the state of any layer there. `end` is the name of this layer.

        A fill that adds whole layers first reaches the head last, if at all. The host updates the
        same share of the streamed layers as in `plan`.
        """
        layers = list(plan.model.stack)
        held = {name: kept for name in CLASSES if (kept := plan.placed(name))}
        texts = {name: ranges(layers, {*kept, end}) for name, kept in held.items()}
        return updated_like(_placed(plan, **texts), plan)

    def _with_few_slots(self, plan: Plan) -> Plan:
        """Returns `plan` with at most `FEW_SLOTS`."""
        fewer = {name: min(getattr(plan.knobs, name), most) for name, most in FEW_SLOTS.items()}
        return with_knobs(plan, **fewer)


def _placed(plan: Plan, **changes: str) -> Plan:
    """Returns `plan` with new values for fields of its placement."""
    return with_knobs(plan, placement=msgspec.structs.replace(plan.knobs.placement, **changes))


def _without_attention(plan: Plan) -> Plan:
    """Returns `plan` without saved attention outputs of layers."""
    return _placed(plan, saved_attention="", offloaded_attention="")
