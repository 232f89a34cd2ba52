"""Builder: from a sequential program over buffers to a schedule with the fewest dependencies that keep its meaning."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from megatrain.simulator.order import Order
from megatrain.simulator.schedule import Buffer, Op, OpId, Schedule, ScheduleError, allocated_bytes


class Builder:
    """Collects ops in program order.

    An op waits for every earlier op of another lane that wrote what it reads, or touched what it writes, unless that order
    already follows from the lanes and the other dependencies. More slots in a pool let loads run further ahead: that is all there
    is to prefetching. With `serial`, every op also waits for the one before it, so nothing overlaps.
    """

    def __init__(self, policy: str, *, serial: bool = False, merged: bool = False) -> None:
        """`merged`: only the bytes of each pool are asked for, so all of its buffers become one, except those that the framework allocates. No op can follow."""
        self._policy, self._serial = policy, serial
        self._merged: dict[str, int] | None = {} if merged else None
        self._buffers: list[Buffer] = []
        self._free: dict[str, deque[str]] = {}  # by pool
        self._queue: dict[str, deque[str]] = {}  # by slot, the free ones of its pool
        self._fresh: set[str] = set()
        self._ops: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._releases: dict[int, list[str]] = {}
        self._order = Order()

    def persistent(self, pool: str, key: str, size: int) -> str:
        """A buffer that keeps its content from step to step: its id. `size` in bytes."""
        if self._merged is not None:
            self._merged[pool] = self._merged.get(pool, 0) + allocated_bytes(pool, size)
            return f"{pool}:{key}"
        buffer = Buffer(id=f"{pool}:{key}", bytes=size, persistent=True)
        self._buffers.append(buffer)
        return buffer.id

    def slots(self, pool: str, count: int, size: int, *, dynamic: bool = False) -> None:
        """A pool of `count` interchangeable buffers of `size` bytes."""
        if self._merged is not None and not dynamic:
            if count:
                self._merged[pool] = self._merged.get(pool, 0) + count * allocated_bytes(pool, size)
            return
        made = [Buffer(id=f"{pool}:{index}", bytes=size, dynamic=dynamic) for index in range(count)]
        self._buffers += made
        self._free[pool] = free = deque([buffer.id for buffer in made])
        self._queue |= dict.fromkeys(free, free)

    def acquire(self, pool: str) -> str:
        """The slot of `pool` that has been free for longest; its hold begins with the next op that writes it."""
        free = self._free[pool]
        if not free:
            raise ScheduleError(f"policy {self._policy}: no slot of {pool} is free")
        slot = free.popleft()
        self._fresh.add(slot)
        return slot

    def release(self, slot: str) -> None:
        """Ends the hold of `slot` with the last op that touched it."""
        self._releases.setdefault(self._order.last(slot), []).append(slot)
        self._queue[slot].append(slot)

    def op(self, id: OpId, lane: str, reads: Iterable[str], writes: Iterable[str], **sizes: Any) -> str:
        """Appends an op; returns its id. `sizes`: Op's offset, bytes, parameters, flops, shape."""
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
        """The schedule so far."""
        for index, slots in self._releases.items():
            self._ops[index]["releases"] = tuple(slots)
        ops = tuple([Op(**op) for op in self._ops])
        merged = [Buffer(id=f"{pool}:all", bytes=size) for pool, size in (self._merged or {}).items()]
        return Schedule(policy=self._policy, buffers=(*merged, *self._buffers), ops=ops)
