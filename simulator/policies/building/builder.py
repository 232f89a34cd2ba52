"""Builder: turns a sequential program over buffers into a schedule.

The schedule has the fewest dependencies that keep the meaning of the program.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack

import msgspec

from megatrain.simulator.schedule import (
    Buffer,
    BufferDtype,
    DataClass,
    Op,
    OpId,
    Schedule,
    ScheduleError,
)
from megatrain.simulator.schedule.buffer import DTYPES_OF, allocated_bytes
from megatrain.simulator.schedule.vector_clocks import VectorClocks


class Traits(TypedDict, total=False):
    """The optional fields of a `Buffer`. Most buffers leave them false or empty."""

    dynamic: bool
    chunk: bool
    staging: bool
    scales_with_tokens: bool
    per_gpu: bool
    knob: str


class Builder:
    """Collects ops in program order and derives their dependencies.

    An op waits for the earlier ops of other lanes that wrote what it reads, and for those that read
    or wrote what it writes. A dependency is left out if it follows from the order of the lanes and
    from other dependencies. There is no separate prefetching: with more slots in a pool, loads can
    run further ahead.
    """

    def __init__(self, policy: str, *, serial: bool = False, merged: bool = False) -> None:
        """Starts an empty program.

        Args:
            policy: The name of the policy, for the schedule.
            serial: Every op also waits for the op before it, so that nothing overlaps.
            merged: All buffers of a pool become one, except those that PyTorch allocates. This is
                enough to know the bytes of each pool, but no ops can be added.
        """
        self._policy, self._serial = policy, serial
        self._merged = merged
        self._pools: dict[str, Buffer] = {}
        """With `merged`: pool -> its first buffer."""
        self._pool_bytes: dict[str, int] = defaultdict(int)
        """With `merged`: pool -> the bytes that its buffers take together."""
        self._buffers: list[Buffer] = []
        self._free: dict[str, deque[str]] = {}  # by pool
        self._queue: dict[str, deque[str]] = {}  # by slot, the free ones of its pool
        self._fresh: set[str] = set()
        self._ops: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._releases: dict[int, list[str]] = {}
        self._order = VectorClocks()

    def persistent(
        self,
        pool: str,
        key: str,
        size: int,
        data: DataClass,
        dtype: BufferDtype | None = None,
        **traits: Unpack[Traits],
    ) -> str:
        """Adds a buffer of `size` bytes that keeps its content from step to step.

        Returns its id, `pool:key`. `key` is the layer or the micro-batch that the buffer belongs
        to. `dtype` may be left out for the default of the class of data.
        """
        name = f"{pool}:{key}"
        if self._merged:
            self._pool_bytes[pool] += allocated_bytes(pool, size)
            if pool in self._pools:
                return name
        buffer = Buffer(
            id=name,
            bytes=size,
            data=data,
            dtype=dtype or DTYPES_OF[data][0],
            persistent=True,
            **traits,
        )
        if self._merged:
            self._pools[pool] = buffer
        else:
            self._buffers.append(buffer)
        return name

    def slots(
        self,
        pool: str,
        count: int,
        size: int,
        data: DataClass,
        dtype: BufferDtype | None = None,
        **traits: Unpack[Traits],
    ) -> None:
        """Adds a pool of `count` interchangeable buffers of `size` bytes each."""
        kind = dtype or DTYPES_OF[data][0]
        merged = self._merged and not traits.get("dynamic", False)
        made = [
            Buffer(id=f"{pool}:{index}", bytes=size, data=data, dtype=kind, **traits)
            for index in range(min(count, 1) if merged else count)
        ]
        if not merged:
            self._buffers += made
            self._add_free(pool, made)
            return
        self._pool_bytes[pool] += count * allocated_bytes(pool, size)
        for buffer in made:
            self._pools.setdefault(pool, buffer)

    def _add_free(self, pool: str, slots: Sequence[Buffer]) -> None:
        self._free[pool] = free = deque([slot.id for slot in slots])
        self._queue |= dict.fromkeys(free, free)

    def keep(self, buffers: Sequence[Buffer]) -> None:
        """Adds buffers of another schedule under the same ids.

        All slots of a pool must be added in one call.
        """
        self._buffers += buffers
        slots = [buffer for buffer in buffers if not buffer.persistent]
        if slots:
            self._add_free(slots[0].pool, slots)

    def acquire(self, pool: str) -> str:
        """Returns the slot of `pool` that has been free for longest.

        It is held from the next op that writes it. Raises ScheduleError if no slot is free.
        """
        free = self._free[pool]
        if not free:
            raise ScheduleError(f"policy {self._policy}: no slot of {pool} is free")
        slot = free.popleft()
        self._fresh.add(slot)
        return slot

    def release(self, slot: str) -> None:
        """Frees `slot` after the last op that reads or writes it."""
        self._releases.setdefault(self._order.last(slot), []).append(slot)
        self._queue[slot].append(slot)

    def op(
        self, id: OpId, lane: str, reads: Iterable[str], writes: Iterable[str], **sizes: Any
    ) -> str:
        """Appends an op and returns its id.

        `sizes` are the fields `offset`, `bytes`, `parameters`, `flops`, `elements` and `shape` of
        `Op`.
        """
        reads, writes, name, order = tuple(reads), tuple(writes), str(id), self._order
        before = order.touch(lane, reads, writes)
        if self._serial and self._ops and self._ops[-1]["lane"] != lane:
            before.append(len(self._ops) - 1)
        before = order.add(lane, before)
        sizes["id"], sizes["lane"], sizes["reads"], sizes["writes"] = name, lane, reads, writes
        if before:
            sizes["after"] = tuple([self._names[other] for other in before])
        if self._fresh:
            acquired = self._fresh.intersection(writes)
            if acquired:
                self._fresh -= acquired
                sizes["acquires"] = tuple([slot for slot in writes if slot in acquired])
        self._names.append(name)
        self._ops.append(sizes)
        return name

    def build(self) -> Schedule:
        """Returns the schedule of all ops so far."""
        for index, slots in self._releases.items():
            self._ops[index]["releases"] = tuple(slots)
        ops = tuple([Op(**op) for op in self._ops])
        merged = [
            msgspec.structs.replace(first, id=f"{pool}:all", bytes=self._pool_bytes[pool])
            for pool, first in self._pools.items()
        ]
        return Schedule(policy=self._policy, buffers=(*merged, *self._buffers), ops=ops)
