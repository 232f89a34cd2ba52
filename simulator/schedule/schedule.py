"""Schedule: one optimizer step as a program of ops over buffers."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Collection
from pathlib import PurePath
from typing import NamedTuple

import msgspec

from megatrain.simulator.schedule.buffer import FLAGS, Buffer
from megatrain.simulator.schedule.op import LANES, Op, ScheduleError, base_buffer, parse_id
from megatrain.simulator.schedule.operands import (
    OPERANDS,
    KeptMoments,
    check_buffer,
    check_operands,
)
from megatrain.simulator.schedule.vector_clocks import VectorClocks


class IndexedSchedule(NamedTuple):
    """A schedule's lanes and dependencies as integers, for the fast simulators.

    An op is its index in program order, and a lane is its index in LANES.
    """

    lanes: list[int]
    """The lane of each op."""
    after: list[tuple[int, ...]]
    """The dependencies of each op. -1 stands for an op that the schedule does not have."""
    fault: str
    """An error text about the first dependency that does not come before its op in program order.
    Empty if there is no such dependency."""
    micro_batches: tuple[int, ...]
    """The last compute op of each micro-batch, in the order of the micro-batches."""


class Sizes(NamedTuple):
    """The ops of a schedule grouped by size (`Op.size`)."""

    ops: tuple[Op, ...]
    """One op of each size."""
    which: list[int]
    """For each op of the schedule in program order, the index of its size in `ops`."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The program of one optimizer step.

    All lanes are empty between two steps. Persistent buffers hold the state from one step to the
    next.
    """

    policy: str
    """The policy that made it."""
    buffers: tuple[Buffer, ...]
    """Every buffer that an op touches."""
    ops: tuple[Op, ...]
    """The ops in program order."""

    @functools.cached_property
    def by_id(self) -> dict[str, Op]:
        """The ops by id."""
        return {op.id: op for op in self.ops}

    @functools.cached_property
    def buffer(self) -> dict[str, Buffer]:
        """The buffers by id."""
        return {buffer.id: buffer for buffer in self.buffers}

    @functools.cached_property
    def state(self) -> dict[tuple[str, str], str]:
        """(class of data, layer or micro-batch) -> the id of the persistent buffer with it."""
        return {
            (buffer.data, buffer.key): buffer.id for buffer in self.buffers if buffer.persistent
        }

    def dtype_of(self, name: str, layer: str) -> str:
        """Returns the dtype of the data of `layer` in a buffer. `name` is the id of the buffer or
        of a part of it.
        """
        buffer = self.buffer[base_buffer(name)]
        return (
            self.buffer[self.state[buffer.data, layer]].dtype
            if buffer.dtype == "home"
            else buffer.dtype
        )

    @functools.cached_property
    def lanes(self) -> dict[str, tuple[Op, ...]]:
        """Lane -> its ops, in the order of LANES. Lanes without ops are absent."""
        queues = {lane: tuple(op for op in self.ops if op.lane == lane) for lane in LANES}
        return {lane: queue for lane, queue in queues.items() if queue}

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the whole program, 16 hexadecimal digits. Two schedules with the same digest
        are equal, except that a policy from a file may be in another folder.
        """
        text = self.to_text().removeprefix(f"schedule {self.policy}")
        named = f"schedule {PurePath(self.policy).name}{text}"
        return hashlib.sha256(named.encode()).hexdigest()[:16]

    @functools.cached_property
    def compiled(self) -> IndexedSchedule:
        """The lanes and dependencies as integers."""
        place = {op.id: index for index, op in enumerate(self.ops)}
        lane_of = {lane: index for index, lane in enumerate(LANES)}
        lanes = [lane_of[op.lane] for op in self.ops]
        after = [
            tuple([place.get(other, -1) for other in op.after]) if op.after else ()
            for op in self.ops
        ]
        late = (
            f"{op.id}: depends on {name}, which is not before it"
            for index, op in enumerate(self.ops)
            for name, other in zip(op.after, after[index], strict=True)
            if not 0 <= other < index
        )
        fault = next(late, "")
        last: dict[int, int] = {}
        for index, op in enumerate(self.ops):
            if op.lane == "compute" and (micro := parse_id(op.id).micro) is not None:
                last[micro] = index
        return IndexedSchedule(lanes, after, fault, tuple([last[micro] for micro in sorted(last)]))

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The ops grouped by size. Raises ScheduleError if an op id cannot be parsed."""
        indices: dict[tuple[object, ...], int] = {}
        ops: list[Op] = []
        which: list[int] = []
        for op in self.ops:
            index = indices.setdefault(op.size, len(ops))
            if index == len(ops):
                ops.append(op)
            which.append(index)
        return Sizes(tuple(ops), which)

    def to_text(self) -> str:
        """Returns the schedule as text, one line per buffer and op."""
        lines = [f"schedule {self.policy}"]
        for buffer in self.buffers:
            words = [
                "buffer",
                buffer.id,
                str(buffer.bytes),
                buffer.data,
                buffer.dtype,
                *(flag for flag in FLAGS if getattr(buffer, flag)),
            ]
            lines.append(" ".join(words + ([f"knob={buffer.knob}"] if buffer.knob else [])))
        for op in self.ops:
            line = f"{op.id} {op.lane}"
            for field, names in (
                ("after", op.after),
                ("reads", op.reads),
                ("writes", op.writes),
                ("acquires", op.acquires),
                ("releases", op.releases),
            ):
                if names:
                    line += f" {field}={','.join(names)}"
            for field, value in (
                ("offset", op.offset),
                ("bytes", op.bytes),
                ("parameters", op.parameters),
                ("flops", op.flops),
                ("elements", op.elements),
                ("shape", op.shape),
                ("high_priority", int(op.high_priority)),
            ):
                if value:
                    line += f" {field}={value}"
            lines.append(line)
        return "\n".join(lines) + "\n"

    def check(self, moments: int | KeptMoments = 2) -> None:
        """Proves that the schedule is correct for any durations of its ops.

        Checks that:

        * ids are unique and can be parsed
        * only ops on the lane `update` have a high priority
        * dependencies are earlier in program order, so FIFO lanes cannot deadlock
        * if two ops touch the same buffer and one of them writes it, dependencies order the two, so
          no race is possible
        * a slot has one user at a time, and every slot is released at the end
        * in a schedule that the runtime can execute, each operand has the class of data, the dtype
          and the size that its op needs

        Args:
            moments: The number of moment values that the optimizer keeps for each parameter, two
                with AdamW, or a function that returns it for a range of a layer's parameters.

        Raises:
            ScheduleError: One of these does not hold.
        """
        self._check_buffers()
        kept = (
            (lambda _layer, _first, count: moments * count) if isinstance(moments, int) else moments
        )
        order = VectorClocks()
        place: dict[str, int] = {}
        held: set[str] = set()
        for index, op in enumerate(self.ops):
            if op.id in place:
                raise ScheduleError(
                    f"{op.id}: two ops have this id",
                    allowed="ids that are unique in the step",
                    fix="give the two different layers, phases, micro-batches or chunks in OpId",
                )
            if str(parse_id(op.id)) != op.id or op.lane not in LANES:
                raise ScheduleError(
                    f"{op.id}: not in its canonical form, or on no lane: {op.lane!r}",
                    allowed=f"the text of an OpId, and a lane of {', '.join(LANES)}",
                    fix="add the op with Builder.op, which takes an OpId and a lane",
                )
            if op.high_priority and op.lane != "update":
                raise ScheduleError(
                    f"{op.id}: a high priority on {op.lane}",
                    allowed="high_priority on the lane update",
                    fix="leave out high_priority, or name the lane update in Builder.op",
                )
            for dependency in op.after:
                if dependency not in place:
                    raise late_dependency(
                        f"{op.id}: depends on {dependency}, which is not before it"
                    )
            place[op.id] = index
            for name in map(base_buffer, op.buffers):
                if name not in self.buffer:
                    raise ScheduleError(
                        f"{op.id}: unknown buffer {name}",
                        allowed="buffers that the policy makes with persistent or slots",
                        fix="use the id that persistent or acquire returned",
                    )
            if self.is_typed:
                check_operands(op, self.buffer, self.dtype_of, kept)
            earlier = order.touch(op.lane, op.reads, op.writes)
            order.add(op.lane, [place[other] for other in op.after])
            for other in earlier:
                if not order.precedes(other, index):
                    raise ScheduleError(
                        f"race on {_contested(self.ops[other], op)}: nothing orders"
                        f" {self.ops[other].id} before {op.id}",
                        allowed="a dependency between two ops on a buffer that one of them writes",
                        fix="name every buffer that the op reads and writes in Builder.op, and keep"
                        " the dependencies that Builder derives",
                    )
            self._check_holds(op, held)
        if held:
            raise ScheduleError(
                f"never released: {', '.join(sorted(held))}",
                allowed="slots that are free at the end of the step",
                fix="call Builder.release after the last op that uses the slot",
            )

    def _check_buffers(self) -> None:
        """Raises ScheduleError unless ids are unique, each pool holds one class of data, and no two
        persistent buffers hold the same data.
        """
        if len(self.buffer) != len(self.buffers):
            ids = [buffer.id for buffer in self.buffers]
            raise ScheduleError(
                f"{next(name for name in ids if ids.count(name) > 1)}: two buffers have this id",
                allowed="one buffer for each pool and key",
                fix="give the pool or the key another name",
            )
        pools: dict[str, Buffer] = {}
        for buffer in self.buffers:
            first = pools.setdefault(buffer.pool, buffer)
            if buffer.data != first.data:
                raise ScheduleError(
                    f"{buffer.id} holds {buffer.data} and {first.id} {first.data}",
                    allowed="one class of data in all buffers of a pool",
                    fix="give one of them another pool",
                )
            if self.is_typed:
                check_buffer(buffer)
                if buffer.persistent and self.state[buffer.data, buffer.key] != buffer.id:
                    raise ScheduleError(
                        f"{buffer.id} and {self.state[buffer.data, buffer.key]}: two persistent"
                        " buffers hold the same data",
                        allowed="one persistent buffer for each class of data and key",
                        fix="make it once, or give one of them another key or class of data",
                    )

    @functools.cached_property
    def is_typed(self) -> bool:
        """Whether the operands of every op are in the order that its kind fixes. False for
        schedules of other systems, which can only be predicted.
        """
        return all(op.kind in OPERANDS for op in self.ops)

    def _check_holds(self, op: Op, held: set[str]) -> None:
        """Raises ScheduleError unless each slot has one user at a time in program order. Updates
        `held`, the slots in use.

        The op that acquires a slot must also write it, so dependencies make it wait for the slot's
        earlier users.
        """
        for slot in op.acquires:
            if slot in held or slot not in op.writes:
                raise ScheduleError(
                    f"{op.id}: acquires {slot}, which is"
                    f" {'held' if slot in held else 'not written by it'}",
                    allowed="a free slot that the op writes",
                    fix="take the slot with Builder.acquire",
                )
            held.add(slot)
        for name in map(base_buffer, op.buffers):
            if not self.buffer[name].persistent and name not in held:
                raise ScheduleError(
                    f"{op.id}: touches {name}, which is not acquired",
                    allowed="slots that an earlier op has written since Builder.acquire, and that"
                    " are not released",
                    fix="acquire the slot, emit the op that fills it, and release it after its last"
                    " use",
                )
        for slot in op.releases:
            if slot not in held:
                raise ScheduleError(
                    f"{op.id}: releases {slot}, which is not acquired",
                    allowed="one release of each acquired slot",
                    fix="call Builder.release once",
                )
            held.remove(slot)


def late_dependency(fault: str) -> ScheduleError:
    """Returns the error for a dependency that does not come before its op, `fault`."""
    return ScheduleError(
        fault, "dependencies on earlier ops", "let Builder derive the dependencies"
    )


def _contested(one: Op, other: Op) -> str:
    """Returns the buffer, or part of a buffer, that both ops touch and one of them writes."""
    pairs = itertools.chain(
        itertools.product(one.writes, other.buffers), itertools.product(one.reads, other.writes)
    )
    return next(
        name
        for name, known in pairs
        if name in (known, base_buffer(known)) or base_buffer(name) == known
    )


def serialized(schedule: Schedule) -> Schedule:
    """Returns a schedule of the same ops on the same lanes in which each op depends on the one
    before it, so that nothing overlaps.
    """
    ops = list(schedule.ops)
    for index, (before, op) in enumerate(itertools.pairwise(schedule.ops), 1):
        if op.lane != before.lane and before.id not in op.after:
            ops[index] = msgspec.structs.replace(op, after=(*op.after, before.id))
    return msgspec.structs.replace(schedule, ops=tuple(ops))


def restricted_to_kinds(schedule: Schedule, kinds: Collection[str]) -> Schedule:
    """Returns a schedule with only the ops of `kinds`, the dependencies among them, and the buffers
    that they touch.

    The result is for timing these ops alone. It does not pass `check` and computes nothing
    meaningful, because the ops that load its data are missing.
    """
    kept = {op.id: op for op in schedule.ops if op.kind in kinds}
    touched = {base_buffer(name) for op in kept.values() for name in op.buffers}
    ops = [
        msgspec.structs.replace(op, after=tuple([other for other in op.after if other in kept]))
        for op in kept.values()
    ]
    return msgspec.structs.replace(
        schedule,
        buffers=tuple([buffer for buffer in schedule.buffers if buffer.id in touched]),
        ops=tuple(ops),
    )
