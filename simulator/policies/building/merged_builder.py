"""MergedBuilder: builds schedules of which only the bytes of each pool are used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any, Unpack

import msgspec

from megatrain.simulator.policies.building.builder import Builder, Traits, checked_dtype
from megatrain.simulator.schedule import Buffer, BufferDtype, DataClass, OpId, Schedule
from megatrain.simulator.schedule.buffer import allocated_bytes


class MergedBuilder(Builder):
    """A builder that merges all buffers of a pool into one, except those that PyTorch allocates.

    Ops have no effect, so a store may also emit them while it is made.
    """

    def __init__(self, policy: str) -> None:
        super().__init__(policy)
        self._pools: dict[str, Buffer] = {}
        """Pool -> a buffer like those that it has."""
        self._pool_bytes: dict[str, int] = defaultdict(int)
        """Pool -> the bytes that its buffers take together."""
        self._units: dict[str, int] = {}
        """Pool of persistent buffers -> the bytes of the smallest buffer in it."""

    def persistent(
        self,
        pool: str,
        key: str,
        size: int,
        data: DataClass,
        dtype: BufferDtype | None = None,
        **traits: Unpack[Traits],
    ) -> str:
        unit = self._units.get(pool)
        if unit is None:
            unit = self._units[pool] = allocated_bytes(pool, 1)
            kind = checked_dtype(pool, data, dtype)
            self._pools[pool] = Buffer(
                id=pool, bytes=0, data=data, dtype=kind, persistent=True, **traits
            )
        self._pool_bytes[pool] += -(-size // unit) * unit
        return f"{pool}:{key}"

    def slots(
        self,
        pool: str,
        count: int,
        size: int,
        data: DataClass,
        dtype: BufferDtype | None = None,
        **traits: Unpack[Traits],
    ) -> None:
        if traits.get("dynamic", False):
            super().slots(pool, count, size, data, dtype, **traits)
        elif count:
            self._pool_bytes[pool] += count * allocated_bytes(pool, size)
            kind = checked_dtype(pool, data, dtype)
            self._pools[pool] = Buffer(id=pool, bytes=0, data=data, dtype=kind, **traits)

    def keep(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            self._pool_bytes[buffer.pool] += buffer.allocated
            self._pools.setdefault(buffer.pool, buffer)

    def acquire(self, pool: str) -> str:
        return f"{pool}:0"

    def release(self, slot: str) -> None:
        pass

    def op(
        self, id: OpId, lane: str, reads: Collection[str], writes: Collection[str], **sizes: Any
    ) -> None:
        pass

    def build(self) -> Schedule:
        merged = [
            msgspec.structs.replace(buffer, id=f"{pool}:all", bytes=self._pool_bytes[pool])
            for pool, buffer in self._pools.items()
        ]
        return Schedule(policy=self._policy, buffers=(*merged, *self._buffers), ops=())
