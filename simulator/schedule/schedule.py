"""Schedule: one optimizer step as a program of ops over buffers."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from megatrain.simulator.order import Order
from megatrain.simulator.schedule.buffer import FLAGS, Buffer
from megatrain.simulator.schedule.op import LANES, Op, ScheduleError, parse_id, whole
from megatrain.simulator.schedule.operands import OPERANDS, check_buffer, check_operands


class Compiled(NamedTuple):
    """A schedule's lanes and dependencies as integers, for the players: ops by their place in program order, lanes by theirs in LANES."""

    lanes: list[int]
    after: list[tuple[int, ...]]
    """-1 stands for an op that is not there"""
    fault: str
    """the first dependency that does not stand before its op; empty where all do"""


class Sizes(NamedTuple):
    """Ops of one size cost the same: kind, lane, bytes, parameters, FLOPs, shape, adding or not; the layer only where it is no decoder layer."""

    ops: tuple[Op, ...]
    """one of each size"""
    which: list[int]
    """for every op in program order, its size's place in `ops`"""


class Schedule(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One optimizer step. Steps follow each other with all lanes drained in between; persistent buffers carry the state."""

    policy: str
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]

    @functools.cached_property
    def by_id(self) -> dict[str, Op]:
        return {op.id: op for op in self.ops}

    @functools.cached_property
    def buffer(self) -> dict[str, Buffer]:
        return {buffer.id: buffer for buffer in self.buffers}

    @functools.cached_property
    def state(self) -> dict[tuple[str, str], str]:
        """(class of data, layer or micro-batch) -> the id of the persistent buffer that holds it."""
        return {(buffer.data, buffer.key): buffer.id for buffer in self.buffers if buffer.persistent}

    def dtype_of(self, name: str, layer: str) -> str:
        """The dtype of the data of `layer` in the buffer `name`, or in the buffer that `name` is a part of."""
        buffer = self.buffer[whole(name)]
        return self.buffer[self.state[buffer.data, layer]].dtype if buffer.dtype == "home" else buffer.dtype

    @functools.cached_property
    def lanes(self) -> dict[str, tuple[Op, ...]]:
        """The queue of each lane that has work, in the order of LANES."""
        queues = {lane: tuple(op for op in self.ops if op.lane == lane) for lane in LANES}
        return {lane: queue for lane, queue in queues.items() if queue}

    @functools.cached_property
    def digest(self) -> str:
        """Of the whole program, 16 hexadecimal digits: two schedules with one digest are the same."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:16]

    @functools.cached_property
    def compiled(self) -> Compiled:
        place = {op.id: index for index, op in enumerate(self.ops)}
        lane_of = {lane: index for index, lane in enumerate(LANES)}
        lanes = [lane_of[op.lane] for op in self.ops]
        after = [tuple([place.get(other, -1) for other in op.after]) if op.after else () for op in self.ops]
        late = [(self.ops[index], which) for index, places in enumerate(after) for which, other in enumerate(places) if not 0 <= other < index]
        fault = "".join(f"{op.id}: depends on {op.after[which]}, which does not stand before it" for op, which in late[:1])
        return Compiled(lanes, after, fault)

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Raises ScheduleError for an op id that cannot be read."""
        named: dict[str, str] = {}  # an id up to its micro-batch and chunk -> kind and layer, of decoder layers only the kind
        found: dict[tuple[object, ...], int] = {}
        ops: list[Op] = []
        which: list[int] = []
        for op in self.ops:
            start = op.id.partition(".")[0]
            name = named.get(start)
            if name is None:
                kind, layer, _, _, _ = parse_id(op.id)
                name = named[start] = kind if layer.isdigit() else f"{kind} {layer}"
            reads, adds = op.reads, False
            for buffer in op.writes:
                if buffer in reads:
                    adds = True
            key = (name, op.lane, op.bytes, op.parameters, op.flops, op.elements, op.shape, adds)
            size = found.get(key)
            if size is None:
                size = found[key] = len(ops)
                ops.append(op)
            which.append(size)
        return Sizes(tuple(ops), which)

    def to_text(self) -> str:
        """One line per buffer and per op; `from_text` reads it back."""
        lines = [f"schedule {self.policy}"]
        for buffer in self.buffers:
            words = ["buffer", buffer.id, str(buffer.bytes), buffer.data, buffer.dtype, *(flag for flag in FLAGS if getattr(buffer, flag))]
            lines.append(" ".join(words + ([f"knob={buffer.knob}"] if buffer.knob else [])))
        for op in self.ops:
            line = f"{op.id} {op.lane}"
            for field, names in (("after", op.after), ("reads", op.reads), ("writes", op.writes), ("acquires", op.acquires), ("releases", op.releases)):
                if names:
                    line += f" {field}={','.join(names)}"
            for field, value in (
                ("offset", op.offset),
                ("bytes", op.bytes),
                ("parameters", op.parameters),
                ("flops", op.flops),
                ("elements", op.elements),
                ("shape", op.shape),
            ):
                if value:
                    line += f" {field}={value}"
            lines.append(line)
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Raises ValueError for a line that is neither a buffer nor an op."""
        first, *lines = text.splitlines()
        buffers, ops = [], []
        for line in lines:
            name, second, *rest = line.split()
            if name == "buffer" and rest:
                size, data, dtype, *flags = rest
                knob = "".join(flag.removeprefix("knob=") for flag in flags if flag.startswith("knob="))
                set_flags = {flag: True for flag in flags if not flag.startswith("knob=")}
                buffers.append(msgspec.convert({"id": second, "bytes": int(size), "data": data, "dtype": dtype, "knob": knob, **set_flags}, Buffer))
                continue
            words = (word.split("=", 1) for word in rest)
            fields = {key: tuple(value.split(",")) if key in _LISTS else int(value) if key in _NUMBERS else value for key, value in words}
            ops.append(msgspec.convert({"id": name, "lane": second, **fields}, Op))
        return cls(policy=first.removeprefix("schedule "), buffers=tuple(buffers), ops=tuple(ops))

    def check(self) -> None:
        """Proves the schedule sound or raises ScheduleError: ids unique and parseable, dependencies earlier in program order (so acyclic
        and without deadlock on FIFO lanes), any two ops that touch one buffer, one of them writing, ordered by dependencies (so
        no race is possible, whatever the durations), slots held by one user at a time and all released at the end. In a schedule that
        this runtime can execute, also that every operand holds the data that its op takes, in the right dtype and number of bytes.
        """
        self._check_buffers()
        order = Order()
        place: dict[str, int] = {}
        held: set[str] = set()
        for index, op in enumerate(self.ops):
            if op.id in place:
                raise ScheduleError(f"{op.id}: the id stands twice")
            if str(parse_id(op.id)) != op.id or op.lane not in LANES:
                raise ScheduleError(f"{op.id}: not in its canonical form, or on no lane: {op.lane!r}")
            for dependency in op.after:
                if dependency not in place:
                    raise ScheduleError(f"{op.id}: depends on {dependency}, which does not stand before it")
            place[op.id] = index
            for name in map(whole, op.buffers):
                if name not in self.buffer:
                    raise ScheduleError(f"{op.id}: unknown buffer {name}")
            if self.is_typed:
                check_operands(op, self.buffer, self.dtype_of)
            earlier = order.touch(op.lane, op.reads, op.writes)
            order.add(op.lane, [place[other] for other in op.after])
            for other in earlier:
                if not order.precedes(other, index):
                    raise ScheduleError(f"race on {_contested(self.ops[other], op)}: nothing orders {self.ops[other].id} before {op.id}")
            self._check_holds(op, held)
        if held:
            raise ScheduleError(f"never released: {', '.join(sorted(held))}")

    def _check_buffers(self) -> None:
        """Ids are unique, a pool holds one class of data, and so does each layer's state."""
        if len(self.buffer) != len(self.buffers):
            ids = [buffer.id for buffer in self.buffers]
            raise ScheduleError(f"{next(name for name in ids if ids.count(name) > 1)}: two buffers have this id")
        pools: dict[str, Buffer] = {}
        for buffer in self.buffers:
            first = pools.setdefault(buffer.pool, buffer)
            if buffer.data != first.data:
                raise ScheduleError(f"{buffer.id} holds {buffer.data} and {first.id} {first.data}: the buffers of a pool hold one class of data")
            if self.is_typed:
                check_buffer(buffer)
                if buffer.persistent and self.state[buffer.data, buffer.key] != buffer.id:
                    raise ScheduleError(f"{buffer.id} and {self.state[buffer.data, buffer.key]}: two persistent buffers hold the same data")

    @functools.cached_property
    def is_typed(self) -> bool:
        """Every op has operands in the order of the table above. Ops of other systems, which are only for prediction, do not."""
        return all(op.kind in OPERANDS for op in self.ops)

    def _check_holds(self, op: Op, held: set[str]) -> None:
        """A slot has one user at a time in program order. That those before have ended follows from the next one's first op writing it."""
        for slot in op.acquires:
            if slot in held or slot not in op.writes:
                raise ScheduleError(f"{op.id}: acquires {slot}, which is {'held' if slot in held else 'not written by it'}")
            held.add(slot)
        for name in map(whole, op.buffers):
            if not self.buffer[name].persistent and name not in held:
                raise ScheduleError(f"{op.id}: touches {name}, which nothing holds")
        for slot in op.releases:
            if slot not in held:
                raise ScheduleError(f"{op.id}: releases {slot}, which nothing holds")
            held.remove(slot)


def _contested(one: Op, other: Op) -> str:
    """The buffer, or the part of it, that `one` touches and `other` too, either of them writing."""
    pairs = itertools.chain(itertools.product(one.writes, other.buffers), itertools.product(one.reads, other.writes))
    return next(name for name, known in pairs if name in (known, whole(known)) or whole(name) == known)


def serialized(schedule: Schedule) -> Schedule:
    """The same ops on the same lanes, each behind the one before it: nothing overlaps."""
    ops = list(schedule.ops)
    for index, (before, op) in enumerate(itertools.pairwise(schedule.ops), 1):
        if op.lane != before.lane and before.id not in op.after:
            ops[index] = msgspec.structs.replace(op, after=(*op.after, before.id))
    return msgspec.structs.replace(schedule, ops=tuple(ops))


def restricted(schedule: Schedule, kinds: Collection[str]) -> Schedule:
    """Only the ops of `kinds`, with what they wait for among themselves, and only the buffers that they touch.

    Not sound in the sense of `check`, and what it computes means nothing: what the others would have loaded or acquired is not there. It says how long
    these ops take alone.
    """
    kept = {op.id: op for op in schedule.ops if op.kind in kinds}
    touched = {whole(name) for op in kept.values() for name in op.buffers}
    ops = [msgspec.structs.replace(op, after=tuple([other for other in op.after if other in kept])) for op in kept.values()]
    return msgspec.structs.replace(schedule, buffers=tuple([buffer for buffer in schedule.buffers if buffer.id in touched]), ops=tuple(ops))


_LISTS = ("after", "reads", "writes", "acquires", "releases")
_NUMBERS = ("offset", "bytes", "parameters", "flops", "elements")
