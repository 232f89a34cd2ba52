"""Placing: which layers' weights, gradients and optimizer state stay on the device, and whose activations are stored, in the memory that there is.

A byte of residency saves so many bytes of copying a step: weights 3 (up for the update and again for backward, down once), gradients,
low plane and moments 2. A stored layer saves its recompute, for many more bytes. How much of either pays depends on which lane is
short, so the search enumerates: stored layers in steps, the rest of the memory filled with state in two orders, class by class and
layer by layer. Layers are taken from the front: their update is due first, while later ones have the forward pass to stream in. Stored
activations from the back: they are needed again first. What cannot hold its checkpoints parks them on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import msgspec

from megatrain.simulator.plan import Placement, Plan
from megatrain.simulator.policies._layerwise import gradient_bytes
from megatrain.simulator.specs import DTYPE_BYTES

CLASSES = ("weights", "gradients", "low", "moments")
EVERYTHING = Placement(**dict.fromkeys(CLASSES, "all"))
_STEPS = 8  # numbers of stored layers that are tried, evenly spread
Peak = Callable[[Plan], int]
"""predicted device peak of a plan, in bytes"""


def placed(plan: Plan, placement: Placement) -> Plan:
    """`plan` with another placement."""
    return msgspec.structs.replace(plan, knobs=msgspec.structs.replace(plan.knobs, placement=placement))


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


def candidates(plan: Plan, peak: Peak) -> Iterator[Placement]:
    """Placements worth a try for `plan`, all of which fit its device memory as far as `peak` tells; none where nothing fits."""
    limit, decoders = plan.device_limit_bytes, plan.model.layers
    base = Placement()
    need = peak(placed(plan, base))
    if need > limit:
        base = Placement(parked="all")
        need = peak(placed(plan, base))
    if need > limit:
        return
    yield base
    one = peak(placed(plan, msgspec.structs.replace(base, stored=str(decoders - 1)))) - need  # its activations, less the checkpoint
    most = min(decoders, (limit - need) // max(one, 1))
    everything = msgspec.structs.replace(base, **dict.fromkeys(CLASSES, "all"))
    spare = limit - peak(placed(plan, everything))
    if spare >= 0:
        yield msgspec.structs.replace(everything, stored=_last(decoders, min(decoders, spare // max(one, 1))))
    for stored in sorted({round(most * step / _STEPS) for step in range(_STEPS + 1)}):
        kept = msgspec.structs.replace(base, stored=_last(decoders, stored))
        room = limit - peak(placed(plan, kept))
        for by_class in (True, False):
            filled = msgspec.structs.replace(kept, **_fill(plan, room, by_class=by_class))
            if room >= 0 and peak(placed(plan, filled)) <= limit:
                yield filled


def _last(decoders: int, count: int) -> str:
    """The last `count` decoder layers."""
    layers = [str(index) for index in range(decoders)]
    return ranges(layers, set(layers[decoders - count :]))


def _fill(plan: Plan, room: int, *, by_class: bool) -> dict[str, str]:
    """Per class, the layers whose bytes fit into `room` together, from the front."""
    stack = plan.model.stack
    width = DTYPE_BYTES[plan.workload.dtype]
    pairs = [(name, layer) for name in CLASSES for layer in stack] if by_class else [(name, layer) for layer in stack for name in CLASSES]
    chosen: dict[str, set[str]] = {name: set() for name in CLASSES}
    for name, layer in pairs:
        per_parameter = {"weights": width, "low": 4 - width, "moments": 8, "gradients": gradient_bytes(plan, layer)}[name]
        size = -(-per_parameter * stack[layer].elements // 256) * 256
        if size > room:
            break
        room -= size
        chosen[name].add(layer)
    return {name: ranges(list(stack), layers) for name, layers in chosen.items()}
