"""TimedBuilder: builds schedules that are only timed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Unpack

from megatrain.simulator.policies.building.builder import Builder, Traits
from megatrain.simulator.policies.building.latest_uses import LatestUses
from megatrain.simulator.schedule import (
    LANES,
    BufferDtype,
    DataClass,
    Op,
    OpId,
    Schedule,
    ScheduleError,
    Sizes,
)
from megatrain.simulator.schedule.schedule import IndexedSchedule

_LANES = {lane: index for index, lane in enumerate(LANES)}
_COMPUTE = _LANES["compute"]


class TimedBuilder(Builder):
    """A builder whose schedule has `compiled` and `sizes`, but no buffers and no ops.

    This is enough to time a step, and takes a third of the time of `Builder`.
    """

    def __init__(self, policy: str, *, serial: bool = False) -> None:
        super().__init__(policy, serial=serial)
        self._append = LatestUses().append
        self._last: dict[int, int] = {}
        """Micro-batch -> its last compute op so far."""
        self._indices: dict[tuple[object, ...], int] = {}
        """The values that make up the size of an op -> the index of that size."""
        self._which: list[int] = []
        """`Sizes.which` so far."""
        self._of_size: list[Op] = []
        """One op of each size."""

    def persistent(
        self,
        pool: str,
        key: str,
        size: int,
        data: DataClass,
        dtype: BufferDtype | None = None,
        **traits: Unpack[Traits],
    ) -> str:
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
        self._add_free(pool, [f"{pool}:{index}" for index in range(count)])

    def acquire(self, pool: str) -> str:
        free = self._free[pool]
        if not free:
            raise ScheduleError(f"policy {self._policy}: no slot of {pool} is free")
        return free.popleft()

    def release(self, slot: str) -> None:
        self._queue[slot].append(slot)

    def op(
        self,
        id: OpId,
        lane: str,
        reads: Collection[str],
        writes: Collection[str],
        *,
        offset: int = 0,
        **sizes: Any,
    ) -> None:
        kind, layer, _, micro, _ = id
        number, op = _LANES[lane], len(self._lanes)
        also = op - 1 if self._serial and op and self._lanes[-1] != number else None
        self._lanes.append(number)
        self._after.append(self._append(number, reads, writes, also))
        if number == _COMPUTE and micro is not None:
            self._last[micro] = op
        adds = False
        for buffer in writes:
            if buffer in reads:
                adds = True
        named = "" if layer.isdigit() else layer
        key = (kind, named, number, adds, *sizes, *sizes.values())
        size = self._indices.get(key)
        if size is None:
            size = self._indices[key] = len(self._of_size)
            self._of_size.append(
                Op(id=str(id), lane=lane, reads=tuple(reads), writes=tuple(writes), **sizes)
            )
        self._which.append(size)

    def build(self) -> Schedule:
        schedule = Schedule(policy=self._policy, buffers=(), ops=())
        last = tuple([self._last[micro] for micro in sorted(self._last)])
        vars(schedule).update(
            compiled=IndexedSchedule(self._lanes, self._after, "", last),
            sizes=Sizes(tuple(self._of_size), self._which),
        )
        return schedule
