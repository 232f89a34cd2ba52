"""Placing: which layers' weights, gradients and optimizer state stay on the device, and whose activations are stored, in the memory that there is.

A byte of residency saves so many bytes of copying a step: weights 3 (up for the update and again for backward, down once), gradients,
low plane and moments 2. A stored layer saves its recompute, for many more bytes. How much of either pays depends on which lane is
short, so the search enumerates: stored layers in steps, the rest of the memory filled with state in two orders, class by class and
layer by layer. Layers are taken from the front: their update is due first, while later ones have the forward pass to stream in. Stored
activations from the back: they are needed again first. What cannot hold its checkpoints parks them on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from megatrain.simulator import policies
from megatrain.simulator.assessment import Choice, assess, plan_account, varied
from megatrain.simulator.costs import CostModel
from megatrain.simulator.engine import makespan_ns
from megatrain.simulator.memory import Account
from megatrain.simulator.plan import Placement, Plan
from megatrain.simulator.policies._layerwise import contributions, gradient_bytes
from megatrain.simulator.specs import DTYPE_BYTES

CLASSES = ("weights", "gradients", "low", "moments")
_STEPS = 8  # numbers of stored layers that are tried, evenly spread
_FINALISTS = 3
_CHUNKS = 8  # of the largest decoder layer, at most, in the copies of a plan
_LEAST_CHUNK, _USUAL_CHUNK = 16 * 2**20, 64 * 2**20
_MANY_OPS = 3000  # beyond, what many small copies would gain is not tried: it is per cents, and each try would take 0.1 s
_TIE = 1.001
_LEAN: tuple[dict[str, int], ...] = ({}, {"gradient_slots": 1}, {"weight_slots": 1, "gradient_slots": 1, "state_slots": 1})
"""Ever less memory in slots, where more does not fit"""


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


class PlacementSearch:
    """The search among the placements and slots of one plan."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        layer = max(spec.elements for spec in plan.model.decoders) * DTYPE_BYTES[plan.workload.dtype]
        self.coarse = max(_USUAL_CHUNK, 2 ** ((layer // 2).bit_length()))
        usual = max(_USUAL_CHUNK, 2 ** ((layer // _CHUNKS).bit_length()))
        self.owes = policies.drain(plan) is not None
        self.plan, self.costs = varied(plan, chunk_bytes=usual, weights_ahead=int(not self.owes)), costs

    def best(self) -> Choice:
        """The fastest plan that fits, or the one that misses by least."""
        for lean in _LEAN:
            plan = varied(self.plan, **lean)
            found = sorted((self._time(quick), index, quick, candidate) for index, (quick, candidate) in enumerate(map(self._quick, self._candidates(plan))))
            if found:
                finals = [(time, quick) for time, _, quick, _ in found[:1]]  # as it was ranked
                finals += [(self._time(candidate), candidate) for _, _, quick, candidate in found[:_FINALISTS] if candidate != quick]
                return self._refined(*min(finals, key=lambda entry: entry[0]))
        return self._nearest_miss()

    def _quick(self, candidate: Plan) -> tuple[Plan, Plan]:
        """The candidate with few large copies, if it fits so, for a quick and fair ranking; and as it is."""
        coarse = varied(candidate, chunk_bytes=self.coarse)
        return coarse if self._account(coarse).fits else candidate, candidate

    def _account(self, plan: Plan) -> Account:
        return plan_account(plan, policies.outline(plan), self.costs)

    def _time(self, plan: Plan) -> int:
        """Step of `plan` in ns, of at most two micro-batches."""
        return makespan_ns(policies.lower(varied(plan, accumulation=2)), self.costs)

    def _candidates(self, plan: Plan) -> Iterator[Plan]:
        """Plans worth a try, all of which fit."""
        decoders = plan.model.layers
        for base in (Placement(), Placement(parked="all")):
            room = self._room(varied(plan, placement=base))
            if room < 0:
                continue
            one = room - self._room(varied(plan, placement=msgspec.structs.replace(base, stored=str(decoders - 1))))
            everything = msgspec.structs.replace(base, **dict.fromkeys(CLASSES, "all"))
            spare = self._room(varied(plan, placement=everything)) // max(one, 1)
            if spare >= 0:
                yield from self._fitting(plan, msgspec.structs.replace(everything, stored=last(decoders, min(decoders, spare))))
            most = min(decoders, room // max(one, 1))
            for stored in sorted({round(most * step / _STEPS) for step in range(_STEPS + 1)}):
                kept = msgspec.structs.replace(base, stored=last(decoders, stored))
                space = self._room(varied(plan, placement=kept))
                fills = {self._fill(plan, space, by_class=by_class) for by_class in (True, False)}
                for fill in sorted(fills):
                    yield from self._fitting(plan, msgspec.structs.replace(kept, **dict(zip(CLASSES, fill, strict=True))))
            return

    def _room(self, plan: Plan) -> int:
        """Device bytes that are left."""
        account = self._account(plan)
        return account.device_limit_bytes - account.device_peak_bytes

    def _fitting(self, plan: Plan, placement: Placement) -> list[Plan]:
        candidate = varied(plan, placement=placement)
        return [candidate] if self._account(candidate).fits else []

    def _fill(self, plan: Plan, room: int, *, by_class: bool) -> tuple[str, ...]:
        """Per class, the layers whose bytes fit into `room` together, from the front."""
        stack, width = plan.model.stack, DTYPE_BYTES[plan.workload.dtype]
        pairs = [(name, layer) for name in CLASSES for layer in stack] if by_class else [(name, layer) for layer in stack for name in CLASSES]
        chosen: dict[str, set[str]] = {name: set() for name in CLASSES}
        for name, layer in pairs:
            if name == "gradients" and not self.owes and contributions(plan, layer) == 1:
                continue  # it stays on the device anyway
            per_parameter = {"weights": width, "low": 4 - width, "moments": 8, "gradients": gradient_bytes(plan, layer)}[name]
            size = -(-per_parameter * stack[layer].elements // 256) * 256
            if size <= room:
                room -= size
                chosen[name].add(layer)
        return tuple(ranges(list(stack), chosen[name]) for name in CLASSES)

    def _refined(self, time: int, plan: Plan) -> Choice:
        """`plan`, whose step takes `time` ns, with other slots and copies where that is faster by more than a tie."""
        time, plan = self._split(time, plan)
        knobs = plan.knobs
        changes = [{"state_slots": knobs.state_slots + 2}, {"chunk_bytes": 4 * knobs.chunk_bytes}, {"weight_slots": knobs.weight_slots + 1}]
        if len(policies.lower(plan).ops) <= _MANY_OPS:
            changes.append({"chunk_bytes": max(knobs.chunk_bytes // 4, _LEAST_CHUNK)})
        for change in changes:
            changed = varied(plan, **change)
            if policies.outline(changed).buffers != policies.outline(plan).buffers and self._account(changed).fits:
                found = self._time(changed)
                if found * _TIE < time:
                    plan, time = changed, found
        return assess(plan, self.costs)

    def _split(self, time: int, plan: Plan) -> tuple[int, Plan]:
        """With the host's cores updating all layers whose weights stream, every other one, or none, whichever is fastest."""
        stack, resident = plan.model.stack, plan.placed("weights")
        streamed = [layer for layer in stack if layer not in resident]
        for chosen in (streamed, streamed[::2]):
            placement = msgspec.structs.replace(plan.knobs.placement, host_updated=ranges(list(stack), set(chosen)))
            changed = varied(plan, placement=placement)
            if chosen and self._account(changed).fits:
                found = self._time(changed)
                if found * _TIE < time:
                    plan, time = changed, found
        return time, plan

    def _nearest_miss(self) -> Choice:
        """The plan above its limits by the fewest bytes: everything on the host, or as much on the device as it holds."""
        lean = varied(self.plan, **_LEAN[-1])
        misses = []
        for base in (Placement(), Placement(parked="all")):
            plan = varied(lean, placement=base)
            fill = self._fill(plan, max(self._room(plan), 0), by_class=True)
            misses += [plan, varied(lean, placement=msgspec.structs.replace(base, **dict(zip(CLASSES, fill, strict=True))))]
        return assess(min(misses, key=lambda plan: self._account(plan).excess_bytes), self.costs)
