"""SlotCache: a least-recently-used cache of layers in the slots of a pool."""

from __future__ import annotations

from megatrain.simulator.model.layer import LayerSpec
from megatrain.simulator.policies.building.builder import Builder


def pool_of(name: str, layer: LayerSpec) -> str:
    """Returns the pool for data of `layer`: `name` for decoder layers, and `name_vocabulary` for
    the embedding and the head, which have another size.
    """
    return name if layer.kind == "decoder" else f"{name}_vocabulary"


class SlotCache:
    """Keeps layers in the slots of one pool. A new layer takes the least recently used slot.

    With more slots, loads run further ahead of compute, and layers can stay until their next use.
    """

    def __init__(self, builder: Builder, pool: str, slots: int) -> None:
        self._builder, self.pool, self.slots = builder, pool, slots
        self._held: dict[str, str] = {}  # layer -> slot, least recently used first

    def find(self, layer: str) -> str | None:
        """Returns the slot that holds `layer`, or None, and marks it as just used."""
        if layer not in self._held:
            return None
        self._held[layer] = self._held.pop(layer)
        return self._held[layer]

    def peek(self, layer: str) -> str | None:
        """Returns the slot that holds `layer`, or None, without marking it as used."""
        return self._held.get(layer)

    def next_to_leave(self) -> str | None:
        """Returns the layer whose slot `take` would reuse, or None while a slot is free."""
        return next(iter(self._held)) if len(self._held) == self.slots else None

    def take(self, layer: str) -> str:
        """Returns a slot for `layer`, which no slot may hold yet. The caller emits the op that
        fills it.
        """
        leaving = self.next_to_leave()
        if leaving is not None:
            self._builder.release(self._held.pop(leaving))
        self._held[layer] = self._builder.acquire(self.pool)
        return self._held[layer]

    def clear(self) -> None:
        """Releases every slot."""
        for slot in self._held.values():
            self._builder.release(slot)
        self._held.clear()
