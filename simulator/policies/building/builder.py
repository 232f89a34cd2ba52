"""Builder: turns a sequential program over buffers into a schedule.

The schedule has the fewest dependencies that keep the meaning of the program.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, TypedDict, Unpack, get_args

import msgspec

from megatrain.simulator.schedule import (
    LANES,
    Buffer,
    BufferDtype,
    DataClass,
    Op,
    OpId,
    Schedule,
    ScheduleError,
)
from megatrain.simulator.schedule.buffer import DTYPES_OF
from megatrain.simulator.schedule.schedule import IndexedSchedule
from megatrain.simulator.schedule.vector_clocks import VectorClocks

_LANES = {lane: index for index, lane in enumerate(LANES)}
_COMPUTE = _LANES["compute"]
_SIZES = ("offset", "bytes", "parameters", "flops", "elements", "shape", "high_priority")
_CLASSES: tuple[str, ...] = get_args(DataClass)


def unknown_lane(id: OpId, lane: str) -> ScheduleError:
    """Returns the error for an op on a lane that does not exist."""
    return ScheduleError(
        f"{id}: unknown lane {lane!r}", ", ".join(LANES), "name one of these in Builder.op"
    )


def refuse(id: OpId, sizes: Iterable[str]) -> None:
    """Raises ScheduleError if the layer of an op is not a string, or if one of the names in `sizes`
    is no size of `Op`.
    """
    if not isinstance(id.layer, str):
        allowed, fix = "a string, such as '3'", "pass the name of the layer to OpId"
        raise ScheduleError(f"{id}: layer {id.layer!r}", allowed, fix)
    for name in sizes:
        if name not in _SIZES:
            allowed, fix = ", ".join(_SIZES), "pass one of these to Builder.op"
            raise ScheduleError(f"{id}: unknown size {name!r}", allowed, fix)


def checked_dtype(pool: str, data: DataClass, dtype: BufferDtype | None) -> BufferDtype:
    """Returns `dtype`, or if it is None the default of the class of data.

    Raises ScheduleError if the pool has no place, the class is unknown, or there is no default.
    """
    if not pool.startswith(("device.", "host.")):
        allowed = "device.NAME or host.NAME"
        raise ScheduleError(f"pool {pool!r}", allowed, "begin its name with the place")
    if data not in _CLASSES:
        allowed, fix = ", ".join(_CLASSES), "name one of these classes of data"
        raise ScheduleError(f"pool {pool}: unknown class of data {data!r}", allowed, fix)
    if dtype is None and data not in DTYPES_OF:
        raise ScheduleError(
            f"pool {pool}: no dtype for {data}",
            allowed="bf16, fp32, or the dtype of layer_state",
            fix="pass dtype, such as plan.workload.dtype",
        )
    return dtype or DTYPES_OF[data][0]


class Traits(TypedDict, total=False):
    """The optional fields of a `Buffer`. Most buffers leave them false or empty."""

    dynamic: bool
    chunk: bool
    staging: bool
    scales_with_tokens: bool
    per_gpu: bool
    sharded: bool
    matrix_products: bool
    knob: str


class Builder:
    """Collects ops in program order and derives their dependencies.

    An op waits for the earlier ops of other lanes that wrote a buffer that it reads, or that read
    or wrote a buffer that it writes. A dependency is left out if it follows from the order of the
    lanes and from other dependencies. There is no separate prefetch: with more slots in a pool,
    loads can run further ahead.
    """

    def __init__(self, policy: str, *, serial: bool = False) -> None:
        """Starts an empty program.

        Args:
            policy: The name of the policy, for the schedule.
            serial: Every op also waits for the op before it, so that nothing overlaps.
        """
        self._policy, self._serial = policy, serial
        self._buffers: list[Buffer] = []
        self._free: dict[str, deque[str]] = {}
        """Pool -> its free slots, the one that was freed first in front."""
        self._queue: dict[str, deque[str]] = {}
        """Slot -> the free slots of its pool."""
        self._fresh: set[str] = set()
        """Slots that were acquired, and that no op has written since."""
        self._ids: list[OpId] = []
        self._lanes: list[int] = []
        self._reads: list[tuple[str, ...]] = []
        self._writes: list[tuple[str, ...]] = []
        self._after: list[tuple[int, ...]] = []
        self._sizes: list[dict[str, Any]] = []
        self._acquires: dict[int, tuple[str, ...]] = {}
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
        to. Without `dtype`, it has the default dtype of its class of data (`DTYPES_OF`).
        """
        name = f"{pool}:{key}"
        self._buffers.append(
            Buffer(
                id=name,
                bytes=size,
                data=data,
                dtype=checked_dtype(pool, data, dtype),
                persistent=True,
                **traits,
            )
        )
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
        kind = checked_dtype(pool, data, dtype)
        buffers = [
            Buffer(id=f"{pool}:{index}", bytes=size, data=data, dtype=kind, **traits)
            for index in range(count)
        ]
        self._buffers += buffers
        self._add_free(pool, [buffer.id for buffer in buffers])

    def _add_free(self, pool: str, slots: Sequence[str]) -> None:
        self._free[pool] = free = deque(slots)
        self._queue |= dict.fromkeys(free, free)

    def keep(self, buffers: Sequence[Buffer]) -> None:
        """Adds buffers that were made before, under the same ids. All slots of a pool must be added
        in one call.
        """
        self._buffers += buffers
        slots = [buffer for buffer in buffers if not buffer.persistent]
        if slots:
            self._add_free(slots[0].pool, [slot.id for slot in slots])

    def acquire(self, pool: str) -> str:
        """Returns the slot of `pool` that has been free for longest. Raises ScheduleError if no
        slot is free.

        The next op that writes the slot acquires it in the schedule.
        """
        slot = self._next_free(pool)
        self._fresh.add(slot)
        return slot

    def _next_free(self, pool: str) -> str:
        """Takes the slot of `pool` that has been free for longest. Raises ScheduleError if there is
        no such pool, or no slot is free.
        """
        if pool not in self._free:
            allowed, fix = ", ".join(self._free) or "none", "make the pool with Builder.slots"
            raise ScheduleError(f"no pool {pool} of slots", allowed, fix)
        free = self._free[pool]
        if not free:
            raise ScheduleError(
                f"no slot of {pool} is free",
                allowed="an acquire while the pool has a free slot",
                fix="release a slot first, or make more of them in Builder.slots",
            )
        return free.popleft()

    def _free_slots_with(self, slot: str) -> deque[str]:
        """Returns the free slots of the pool of `slot`. Raises ScheduleError if there is no such
        slot.
        """
        if slot not in self._queue:
            allowed = "a slot that Builder.acquire returned"
            raise ScheduleError(f"release of {slot}", allowed, "release what was acquired")
        return self._queue[slot]

    def release(self, slot: str) -> None:
        """Frees `slot`. In the schedule, the last op so far that uses the slot releases it.

        Raises ScheduleError if there is no such slot, or no op has used it.
        """
        free = self._free_slots_with(slot)
        if not self._order.touched(slot):
            allowed, fix = "slots that an op has used", "emit the op that fills the slot first"
            raise ScheduleError(f"release of {slot}, which no op has used", allowed, fix)
        self._releases.setdefault(self._order.last(slot), []).append(slot)
        free.append(slot)

    def op(
        self, id: OpId, lane: str, reads: Collection[str], writes: Collection[str], **sizes: Any
    ) -> None:
        """Appends an op.

        Args:
            id: The id of the op, unique in the program.
            lane: The lane that runs the op.
            reads: The ids of the buffers that the op reads, in the order of its kind.
            writes: The ids of the buffers that the op writes, in the order of its kind.
            **sizes: The fields `offset`, `bytes`, `parameters`, `flops`, `elements`, `shape` and
                `high_priority` of `Op`.
        """
        if lane not in _LANES:
            raise unknown_lane(id, lane)
        if not isinstance(id.layer, str):
            refuse(id, sizes)
        reads, writes = tuple(reads), tuple(writes)
        also = None
        if self._serial and self._ids and self._lanes[-1] != _LANES[lane]:
            also = len(self._ids) - 1
        if self._fresh:
            acquired = tuple([slot for slot in writes if slot in self._fresh])
            if acquired:
                self._fresh.difference_update(acquired)
                self._acquires[len(self._ids)] = acquired
        self._ids.append(id)
        self._lanes.append(_LANES[lane])
        self._reads.append(reads)
        self._writes.append(writes)
        self._after.append(tuple(self._order.append(lane, reads, writes, also)))
        self._sizes.append(sizes)

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
        """Appends one op for each chunk of a layer.

        Args:
            id: The id of the ops, without the number of the chunk.
            lane: As in `op`.
            reads: As in `op`.
            writes: As in `op`.
            chunks: (number, first parameter, number of parameters) of each chunk.
            parted: The buffers of `reads` and `writes` of which each op touches only the part that
                belongs to its chunk. Each op touches the whole of the other buffers.
            size: The field of `Op` with the size of a chunk.
            width: Units of `size` and of `offset` per parameter.
        """
        for number, first, count in chunks:
            part = {name: f"{name}#{number}" for name in parted}
            self.op(
                msgspec.structs.replace(id, chunk=number),
                lane,
                [part.get(name, name) for name in reads],
                [part.get(name, name) for name in writes],
                offset=int(width * first),
                **{size: int(width * count)},
            )

    def build(self) -> Schedule:
        """Returns the schedule of all ops so far."""
        try:
            ops = self._ops()
        except TypeError:
            for id, sizes in zip(self._ids, self._sizes, strict=True):
                refuse(id, sizes)
            raise
        schedule = Schedule(policy=self._policy, buffers=tuple(self._buffers), ops=ops)
        vars(schedule).update(
            compiled=IndexedSchedule(self._lanes, self._after, "", self._micro_batches())
        )
        return schedule

    def _ops(self) -> tuple[Op, ...]:
        """Returns all ops so far."""
        names = [str(id) for id in self._ids]
        return tuple(
            [
                Op(
                    id=name,
                    lane=LANES[self._lanes[index]],
                    after=tuple([names[other] for other in self._after[index]]),
                    reads=self._reads[index],
                    writes=self._writes[index],
                    acquires=self._acquires.get(index, ()),
                    releases=tuple(self._releases.get(index, ())),
                    **self._sizes[index],
                )
                for index, name in enumerate(names)
            ]
        )

    def _micro_batches(self) -> tuple[int, ...]:
        """Returns `IndexedSchedule.micro_batches`."""
        last: dict[int, int] = {}
        for index, (id, lane) in enumerate(zip(self._ids, self._lanes, strict=True)):
            if lane == _COMPUTE and id.micro is not None:
                last[id.micro] = index
        return tuple([last[micro] for micro in sorted(last)])
