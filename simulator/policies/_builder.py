"""Builder: from a sequential program over buffers to a schedule with the fewest dependencies that keep its meaning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TypedDict, Unpack

from megatrain.simulator.order import Order
from megatrain.simulator.schedule import Buffer, BufferDtype, DataClass, Op, OpId, Schedule, ScheduleError
from megatrain.simulator.schedule.buffer import DTYPE_OF


class Traits(TypedDict, total=False):
    """Fields of a `Buffer` that are false or empty for most."""

    dynamic: bool
    chunk: bool
    staging: bool
    scales_with_tokens: bool
    per_gpu: bool
    knob: str


class Builder:
    """Collects ops in program order.

    An op waits for every earlier op of another lane that wrote what it reads, or touched what it writes, unless that order
    already follows from the lanes and the other dependencies. More slots in a pool let loads run further ahead: that is all there
    is to prefetching. With `serial`, every op also waits for the one before it, so nothing overlaps.
    """

    def __init__(self, policy: str, *, serial: bool = False) -> None:
        self._policy, self._serial = policy, serial
        self._buffers: list[Buffer] = []
        self._free: dict[str, deque[str]] = {}
        self._fresh: set[str] = set()
        self._ops: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._releases: dict[int, list[str]] = {}
        self._order = Order()

    def persistent(
        self, pool: str, key: str, size: int, data: DataClass, dtype: BufferDtype | None = None, **traits: Unpack[Traits]
    ) -> str:  # fmt: skip
        """Adds a buffer of `size` bytes that keeps its content from step to step; returns its id, `pool:key`.

        `key` is the layer or the micro-batch that it belongs to. `dtype` may be left out where the class of data has only one.
        """
        buffer = Buffer(id=f"{pool}:{key}", bytes=size, data=data, dtype=dtype or DTYPE_OF[data], persistent=True, **traits)
        self._buffers.append(buffer)
        return buffer.id

    def slots(
        self, pool: str, count: int, size: int, data: DataClass, dtype: BufferDtype | None = None, **traits: Unpack[Traits]
    ) -> None:  # fmt: skip
        """Adds a pool of `count` interchangeable buffers of `size` bytes each."""
        kind = dtype or DTYPE_OF[data]
        made = [Buffer(id=f"{pool}:{index}", bytes=size, data=data, dtype=kind, **traits) for index in range(count)]
        self._buffers += made
        self._free[pool] = deque(buffer.id for buffer in made)

    def keep(self, buffers: Sequence[Buffer]) -> None:
        """Adds buffers of another schedule, under the ids that they have there."""
        self._buffers += buffers
        for buffer in buffers:
            if not buffer.persistent:
                self._free.setdefault(buffer.pool, deque()).append(buffer.id)

    def acquire(self, pool: str) -> str:
        """The slot of `pool` that has been free for longest; its hold begins with the next op that writes it."""
        if not self._free[pool]:
            raise ScheduleError(f"policy {self._policy}: no slot of {pool} is free")
        slot = self._free[pool].popleft()
        self._fresh.add(slot)
        return slot

    def release(self, slot: str) -> None:
        """Ends the hold of `slot` with the last op that touched it."""
        self._releases.setdefault(self._order.last(slot), []).append(slot)
        self._free[slot.partition(":")[0]].append(slot)

    def op(self, id: OpId, lane: str, reads: Iterable[str], writes: Iterable[str], **sizes: Any) -> str:
        """Appends an op; returns its id. `sizes`: Op's offset, bytes, parameters, flops, shape."""
        reads, writes, name, index, order = tuple(reads), tuple(writes), str(id), len(self._ops), self._order
        before = order.touch(lane, reads, writes)
        if self._serial and index and self._ops[-1]["lane"] != lane:
            before.append(index - 1)
        if len(before) > 1:
            before = self._fewest(before)
        order.add(lane, before)
        op = {"id": name, "lane": lane, "after": tuple([self._names[other] for other in before]) if before else (), "reads": reads, "writes": writes, **sizes}
        if self._fresh:
            acquired = self._fresh.intersection(writes)
            if acquired:
                self._fresh -= acquired
                op["acquires"] = tuple([slot for slot in writes if slot in acquired])
        self._names.append(name)
        self._ops.append(op)
        return name

    def _fewest(self, before: list[int]) -> list[int]:
        """Of the ops to wait for, those that none of the others implies. Latest first, so none is kept in vain."""
        latest, *others = sorted(set(before), reverse=True)
        kept = [latest]
        for candidate in others:
            if not any(self._order.precedes(candidate, other) for other in kept):
                kept.append(candidate)
        return kept[::-1]

    def build(self) -> Schedule:
        """The schedule so far."""
        for index, slots in self._releases.items():
            self._ops[index]["releases"] = tuple(slots)
        ops = tuple([Op(**op) for op in self._ops])
        return Schedule(policy=self._policy, buffers=tuple(self._buffers), ops=ops)
