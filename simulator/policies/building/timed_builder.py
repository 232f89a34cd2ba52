"""TimedBuilder: builds schedules that are only timed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal, Unpack

from megatrain.simulator.policies.building.builder import (
    Builder,
    Traits,
    checked_dtype,
    refuse,
    unknown_lane,
)
from megatrain.simulator.policies.building.latest_uses import LatestUses
from megatrain.simulator.schedule import (
    LANES,
    BufferDtype,
    DataClass,
    Op,
    OpId,
    Schedule,
    Sizes,
    saves_activations,
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
        self._uses = LatestUses()
        self._append = self._uses.append
        self._lanes = self._uses.lanes
        self._last: dict[int, int] = {}
        """Micro-batch -> its last compute op so far."""
        self._indices: dict[tuple[object, ...], int] = {}
        """The values that make up the size of an op -> the index of that size."""
        self._which: list[int] = []
        """`Sizes.which` so far."""
        self._chunk_sizes: dict[tuple[object, ...], tuple[Sequence[Any], list[int]]] = {}
        """(kind, layer unless it is a decoder layer, width) -> the last chunks of `in_chunks` with
        them, and the index of the size of each."""
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
        checked_dtype(pool, data, dtype)
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
        checked_dtype(pool, data, dtype)
        self._add_free(pool, [f"{pool}:{index}" for index in range(count)])

    def acquire(self, pool: str) -> str:
        return self._next_free(pool)

    def release(self, slot: str) -> None:
        self._free_slots_with(slot).append(slot)

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
        if lane not in _LANES:
            raise unknown_lane(id, lane)
        micro, number, op = id.micro, _LANES[lane], len(self._lanes)
        also = op - 1 if self._serial and op and self._lanes[-1] != number else None
        self._after.append(self._append(number, reads, writes, also))
        if number == _COMPUTE and micro is not None:
            self._last[micro] = op
        try:
            self._which.append(self._size(id, lane, reads, writes, sizes))
        except (AttributeError, TypeError):
            refuse(id, sizes)
            raise

    def in_chunks(
        self,
        id: OpId,
        lane: str,
        reads: Collection[str],
        writes: Collection[str],
        chunks: Sequence[tuple[int, int, int]],
        parted: Collection[str],
        size: Literal["bytes", "parameters"],
        width: float = 1,
    ) -> None:
        if self._serial or lane == "compute":
            super().in_chunks(id, lane, reads, writes, chunks, parted, size, width)
            return
        if lane not in _LANES:
            raise unknown_lane(id, lane)
        if not isinstance(id.layer, str):
            refuse(id, [size])
        kind, layer, number = id.kind, id.layer, _LANES[lane]
        self._after += self._uses.append_chunks(number, reads, writes, parted, len(chunks))
        key = kind, "" if layer.isdigit() else layer, width
        known = self._chunk_sizes.get(key)
        if known is None or known[0] is not chunks:
            of_count = {
                count: self._size(id, lane, reads, writes, {size: int(width * count)})
                for _, _, count in chunks
            }
            known = chunks, [of_count[count] for _, _, count in chunks]
            self._chunk_sizes[key] = known
        self._which += known[1]

    def _size(
        self,
        id: OpId,
        lane: str,
        reads: Collection[str],
        writes: Collection[str],
        sizes: dict[str, Any],
    ) -> int:
        """Returns the index of the size of an op in `Sizes.ops`."""
        kind, layer, adds = id.kind, id.layer, False
        for buffer in writes:
            if buffer in reads:
                adds = True
                break
        # Only a forward pass saves activations, and the search for them would slow down the others.
        saves = kind == "forward" and saves_activations(writes)
        key = (kind, "" if layer.isdigit() else layer, lane, adds, saves, *sizes, *sizes.values())
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self._of_size)
            self._of_size.append(
                Op(id=str(id), lane=lane, reads=tuple(reads), writes=tuple(writes), **sizes)
            )
        return index

    def build(self) -> Schedule:
        schedule = Schedule(policy=self._policy, buffers=(), ops=())
        last = tuple([self._last[micro] for micro in sorted(self._last)])
        vars(schedule).update(
            compiled=IndexedSchedule(self._lanes, self._after, "", last),
            sizes=Sizes(tuple(self._of_size), self._which),
        )
        return schedule
