"""Builder: from a sequential program over buffers to a schedule with the fewest dependencies that keep its meaning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from megatrain.simulator.schedule import Buffer, Op, OpId, Order, Schedule, ScheduleError


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
        self._last_use: dict[str, int] = {}
        self._ops: list[dict[str, Any]] = []
        self._index: dict[str, int] = {}
        self._order = Order()

    def persistent(self, pool: str, key: str, size: int) -> str:
        """A buffer that keeps its content from step to step: its id. `size` in bytes."""
        buffer = Buffer(id=f"{pool}:{key}", bytes=size, persistent=True)
        self._buffers.append(buffer)
        return buffer.id

    def slots(self, pool: str, count: int, size: int, *, dynamic: bool = False) -> None:
        """A pool of `count` interchangeable buffers of `size` bytes."""
        made = [Buffer(id=f"{pool}:{index}", bytes=size, dynamic=dynamic) for index in range(count)]
        self._buffers += made
        self._free[pool] = deque(buffer.id for buffer in made)

    def acquire(self, pool: str) -> str:
        """The slot of `pool` that has been free for longest; its hold begins with the next op that writes it."""
        if not self._free[pool]:
            raise ScheduleError(f"policy {self._policy}: no slot of {pool} is free")
        slot = self._free[pool].popleft()
        self._fresh.add(slot)
        return slot

    def release(self, slot: str) -> None:
        """Ends the hold of `slot` with the last op that touched it."""
        self._ops[self._last_use[slot]]["releases"].append(slot)
        self._free[slot.partition(":")[0]].append(slot)

    def op(self, id: OpId, lane: str, reads: Iterable[str], writes: Iterable[str], **sizes: Any) -> str:
        """Appends an op; returns its id. `sizes`: Op's offset, bytes, parameters, flops, shape."""
        reads, writes, name = tuple(reads), tuple(writes), str(id)
        before = [op for op, _ in self._order.conflicts(reads, writes)]
        if self._serial and self._ops:
            before.append(self._ops[-1]["id"])
        after = self._fewest(lane, before)
        acquires = [slot for slot in writes if slot in self._fresh]
        self._fresh.difference_update(acquires)
        self._order.add(name, lane, after)
        self._order.touch(name, reads, writes)
        self._last_use.update(dict.fromkeys(reads + writes, len(self._ops)))
        self._index[name] = len(self._ops)
        self._ops.append({"id": name, "lane": lane, "after": after, "reads": reads, "writes": writes, "acquires": tuple(acquires), "releases": [], **sizes})
        return name

    def _fewest(self, lane: str, before: Iterable[str]) -> tuple[str, ...]:
        """Of the ops to wait for, those that neither the lane's order nor another of them implies. Latest first, so none is kept in vain."""
        kept: list[str] = []
        last = self._order.last(lane)
        for candidate in sorted(set(before), key=self._index.__getitem__, reverse=True):
            implied = (last,) if last else ()
            if not any(candidate == other or self._order.precedes(candidate, other) for other in (*implied, *kept)):
                kept.append(candidate)
        return tuple(reversed(kept))

    def build(self) -> Schedule:
        """The schedule so far."""
        ops = tuple(Op(**{**op, "releases": tuple(op["releases"])}) for op in self._ops)
        return Schedule(policy=self._policy, buffers=tuple(self._buffers), ops=ops)
