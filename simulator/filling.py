"""Filling: as many layers' weights, gradients and optimizer state on the device as its memory holds, in several orders.

Layers are taken from the front: their update is due first, while later ones have the forward pass to stream in. Stored activations are taken from the
back: they are needed again first. Attention is kept of none of the recomputed layers or of as many as fit, where it is a tenth of their recompute.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

import msgspec

from megatrain.simulator import policies
from megatrain.simulator.arithmetic import StateClass, contributions, cost_keys, state_bytes
from megatrain.simulator.assessment import plan_account, varied
from megatrain.simulator.costs import CostModel
from megatrain.simulator.memory import Account
from megatrain.simulator.plan import Knobs, Placement, Plan
from megatrain.simulator.schedule import Op
from megatrain.simulator.specs import EMBEDDING

CLASSES: tuple[StateClass, ...] = ("weights", "gradients", "low", "moments")
GIB = 2**30

_TRIMMED: tuple[StateClass, ...] = ("moments", "low")
_LEAST_ATTENTION = 0.1  # of a recompute's time: below, what keeping it saves is no three per cent of a step


def ranges(layers: list[str], chosen: set[str]) -> str:
    """`chosen` as a placement writes it, in the order of `layers`.

    >>> ranges(["e", "0", "1", "2", "h"], {"e", "0", "1"}), ranges(["0", "1"], {"0", "1"})
    ('e,0-1', 'all')
    """
    if chosen >= set(layers):
        return "all"
    parts: list[str] = []
    for numbered, run in itertools.groupby((layer for layer in layers if layer in chosen), key=str.isdigit):
        if not numbered:
            parts += run
            continue
        numbers = [int(layer) for layer in run]
        for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            first, *others = (number for _, number in group)
            parts.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(parts)


def last(decoders: int, count: int) -> str:
    """The last `count` decoder layers."""
    layers = [str(index) for index in range(decoders)]
    return ranges(layers, set(layers[decoders - count :]))


def host_updating(plan: Plan, every: int = 1) -> Plan:
    """`plan`, the host's cores updating the first, and every so many further, of the layers whose weights stream."""
    layers, resident = list(plan.model.stack), plan.placed("weights")
    streamed = [layer for layer in layers if layer not in resident]
    return varied(plan, placement=msgspec.structs.replace(plan.knobs.placement, host_updated=ranges(layers, set(streamed[::every]))))


def updated_like(plan: Plan, other: Plan) -> Plan:
    """`plan`, the host's cores updating of its streamed layers as many as of the other's: all, every other one, or none."""
    updated, streamed = other.placed("host_updated"), set(other.model.stack) - other.placed("weights")
    if not updated:
        return varied(plan, placement=msgspec.structs.replace(plan.knobs.placement, host_updated=""))
    return host_updating(plan, every=1 if updated >= streamed else 2)


def classes_of(plan: Plan) -> list[StateClass]:
    """Those of CLASSES that the plan has: fp32 weights have no low half."""
    return [name for name in CLASSES if state_bytes(plan, name, EMBEDDING)]


class Filling:
    """Ways to fill the device's memory for one model and workload."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self.costs, self.owes = costs, policies.defers_update(plan)
        self._accounts: dict[tuple[Knobs, int, int], Account] = {}
        self.keeping = [layer.name for layer in plan.model.decoders if self._keeping_pays(plan, layer.name)]
        layers = list(plan.model.stack)
        ahead, state = CLASSES[:2], CLASSES[2:]
        self._orders = [
            [(name, layer) for name in CLASSES for layer in layers],
            [(name, layer) for layer in layers for name in CLASSES],
            [(name, layer) for name in ahead for layer in layers] + [(name, layer) for layer in layers for name in state],
        ]
        """(class, layer) pairs in the orders in which memory is given to them"""
        if not self.owes:  # the embedding's update is last, and nothing hides it: its moments first, the most of its state
            self._orders.append([(name, layer) for layer in layers for name in reversed(CLASSES)])
        self._sizes = _state_bytes(plan, self.owes)

    def _keeping_pays(self, plan: Plan, layer: str) -> bool:
        """The decoder layer's attention takes much of its recompute. CUDA's kernels of which it can be kept take no fp32."""
        if plan.workload.dtype != "bf16" or not plan.model.keeps_attention(layer):
            return False
        kept, full = (self.costs.duration_ns(Op(id=f"R{layer}.m0", lane="compute", **cost_keys(plan, "recompute", layer, kept=kept))) for kept in (True, False))
        return kept <= (1 - _LEAST_ATTENTION) * full

    def account(self, plan: Plan) -> Account:
        """The memory of `plan`."""
        key = plan.knobs, plan.device_limit_bytes, plan.host_limit_bytes
        if key not in self._accounts:
            self._accounts[key] = plan_account(plan, policies.outline(plan, merged=True), self.costs)
        return self._accounts[key]

    def room(self, plan: Plan) -> int:
        """Device bytes that are left."""
        account = self.account(plan)
        return account.device_limit_bytes - account.device_peak_bytes

    def most_stored(self, plan: Plan, placement: Placement) -> int:
        """How many of the last decoder layers can be stored besides `placement`; -1 where not even that fits. Each one more takes at least as much."""

        def lacking(count: int) -> int:
            return -self.room(varied(plan, placement=msgspec.structs.replace(placement, stored=last(plan.model.layers, count))))

        return bisect.bisect_right(range(plan.model.layers + 1), 0, key=lacking) - 1

    def with_attention(self, plan: Plan, placement: Placement) -> Iterator[Placement]:
        """The placement, and where that pays, the same with the attention kept of as many of the layers that it recomputes as fit."""
        yield placement
        held = varied(plan, placement=placement)
        stored, work = held.placed("stored"), plan.workload
        layers = [layer for layer in self.keeping if layer not in stored]
        if layers:
            one = max(plan.model.kept_attention(layer, work.tokens, work.dtype).bytes for layer in layers)
            count = min(self.room(held) // (one + 256), len(layers))
            if count > 0:
                names = [layer.name for layer in plan.model.decoders]
                yield msgspec.structs.replace(placement, attention=ranges(names, set(layers[len(layers) - count :])))

    def fills(self, plan: Plan, placement: Placement) -> Iterator[Plan]:
        """`plan` with `placement` and as much on the device besides as fits, in each order, updated by the host as `plan` is. Not all of them fit: the host
        may be too small, and so may the device without any of it.
        """
        empty = varied(plan, placement=placement)
        room = self.room(empty)
        for order in self._orders:
            first, chosen = self._added(empty, order, room)
            filled, chosen = self._added(first, order, self.room(first), chosen)  # what stays needs no slots, which leaves room for more
            updated = updated_like(filled, plan)
            if updated.knobs.placement.host_updated:  # what the host updates needs none either; a layer whose weights stay is not one of those
                own = [(name, layer) for name, layer in order if layer in chosen["weights"]]
                updated, _ = self._added(updated, own, self.room(updated), chosen)
            yield updated

    def _added(
        self, plan: Plan, order: list[tuple[StateClass, str]], room: int, chosen: dict[StateClass, set[str]] | None = None
    ) -> tuple[Plan, dict[StateClass, set[str]]]:
        """`plan` with what of `order` fits in `room` bytes besides what is `chosen`; and all that is chosen then, by class."""
        held = {name: set(chosen[name]) if chosen else set[str]() for name in CLASSES}
        for name, layer in order:
            size = self._sizes.get((name, layer), room + 1)
            if size <= room and layer not in held[name]:
                room -= size
                held[name].add(layer)
        texts = {name: ranges(list(plan.model.stack), layers) for name, layers in held.items()}
        return varied(plan, placement=msgspec.structs.replace(plan.knobs.placement, **texts)), held

    def filled(self, plan: Plan, base: Placement) -> Iterator[Plan]:
        """Of the `fills` of `base`, with and without attention kept, those that fit."""
        for placement in self.with_attention(plan, base):
            for fill in dict.fromkeys(self.fills(plan, placement)):
                if self.account(fill).fits:
                    yield fill

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Plans that fit and store one layer more than `plan`, as many, or one less. Some are filled a GiB beyond the device's limit, and what is too much
        is taken away again: what stays on the device can take the place of slots, which no fill up to the limit sees. One has another slot for weights, and
        gives as much state away.
        """
        yield from self._storing(plan, -1)
        yield from self.wider(plan)
        roomier = msgspec.structs.replace(plan, device_limit_bytes=plan.device_limit_bytes + GIB)
        for other in self.wider(roomier):
            other = self._trimmed(msgspec.structs.replace(other, device_limit_bytes=plan.device_limit_bytes))
            if self.account(other).fits:
                yield other
        if another := self.with_another_slot(plan):
            yield another

    def with_other_inputs(self, plan: Plan) -> Iterator[Plan]:
        """Plans that fit and store as many layers, with the inputs of recomputed layers on the host where `plan` has them on the device, and the other way."""
        placement = plan.knobs.placement
        yield from self.filled(plan, Placement(stored=placement.stored, parked="" if placement.parked else "all"))

    def with_another_slot(self, plan: Plan) -> Plan | None:
        """`plan` with one more slot for weights, and as much less of its state on the device; None where nothing streams, or that does not fit."""
        if plan.placed("weights") == set(plan.model.stack):
            return None
        other = self._trimmed(varied(plan, weight_slots=plan.knobs.weight_slots + 1))
        return other if self.account(other).fits else None

    def wider(self, plan: Plan) -> Iterator[Plan]:
        """Plans that fit and store as many layers as `plan`, or one more."""
        yield from self._storing(plan, 0)
        yield from self._storing(plan, 1)

    def _trimmed(self, plan: Plan) -> Plan:
        """`plan` without the moments and low planes of its last layers that the device cannot hold; of the last one of each, the smaller that is enough."""
        held = {name: [layer for layer in plan.model.stack if layer in plan.placed(name)] for name in _TRIMMED}
        while (lacking := -self.room(plan)) > 0:  # what leaves may need slots to stream through
            sizes = ((self._sizes.get((name, layers[-1]), 0), name) for name, layers in held.items() if layers)
            last_ones = [entry for entry in sizes if entry[0]]
            if not last_ones:
                break
            _, name = min((entry for entry in last_ones if entry[0] >= lacking), default=max(last_ones))
            held[name].pop()
            texts = {name: ranges(list(plan.model.stack), set(layers)) for name, layers in held.items()}
            plan = varied(plan, placement=msgspec.structs.replace(plan.knobs.placement, **texts))
        return plan

    def _storing(self, plan: Plan, more: int) -> Iterator[Plan]:
        count = len(plan.placed("stored")) + more
        if 0 <= count <= plan.model.layers:
            yield from self.filled(plan, Placement(stored=last(plan.model.layers, count), parked=plan.knobs.placement.parked))


def _state_bytes(plan: Plan, owes: bool) -> dict[tuple[StateClass, str], int]:
    """(class, layer) -> bytes on the device, of what may be there or not."""
    sizes = dict[tuple[StateClass, str], int]()
    for layer, spec in plan.model.stack.items():
        per_parameter = {name: state_bytes(plan, name, layer) for name in classes_of(plan)}
        if not owes and contributions(plan, layer) == 1:
            del per_parameter["gradients"]  # it stays on the device anyway
        sizes |= {(name, layer): -(-count * spec.elements // 256) * 256 for name, count in per_parameter.items()}
    return sizes
