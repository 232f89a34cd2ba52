"""Schedule: the one program that the simulator plays and the runtime executes.

Ops stand in program order. Each belongs to a lane; a lane runs its ops one at a time, in that order. An op starts when its lane
reaches it and all of its dependencies have ended. It names the buffers that it reads and writes, in the order that its kind fixes
(the table below), and those whose hold begins (`acquires`) or ends (`releases`) with it. It has sizes, never a duration.

| kind | reads | writes |
|---|---|---|
| load_weights (h2d) | host weights | weight slot |
| embed | embedding weights, tokens | hidden |
| forward | weights, hidden | hidden |
| head | head weights, hidden, tokens | gradient of the weights, gradient of hidden, loss |
| recompute | weights, hidden | saved activations[, hidden] |
| backward | weights, saved activations, hidden, gradient of the output | gradient of the weights, gradient of the input |
| embed_backward | tokens, gradient of hidden | gradient of the weights |
| save_gradients (d2h) | device gradient | host slab or host gradient |
| accumulate_gradients (cpu) | slab | host gradient |
| norm | gradient | the layer's sum of squares |
| clip | every sum of squares | the clip coefficient |
| update, cpu_update | gradient[, clip coefficient] | weights[, low plane], moments |

An op that writes its gradient *and reads it* adds to what is there; one that only writes it overwrites.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

LANES = ("compute", "update", "h2d", "d2h", "cpu")
"""FIFO queues: three or four CUDA streams and one host thread."""

CODES = {
    "W": "load_weights", "E": "embed", "F": "forward", "H": "head", "R": "recompute", "B": "backward", "EB": "embed_backward",
    "G": "save_gradients", "A": "accumulate_gradients", "N": "norm", "C": "clip", "U": "update", "UC": "cpu_update",
}  # fmt: skip
_CODE_OF = {kind: code for code, kind in CODES.items()}
_ID = re.compile(r"(?P<code>[A-Z]+)(?P<layer>\d+|e|h)?(?P<phase>[frbh])?(?:\.m(?P<micro>\d+))?(?:\.c(?P<chunk>\d+))?")


class ScheduleError(ValueError):
    """The schedule breaks one of its rules; the text names the ops and the buffer."""


class OpId(NamedTuple):
    """What an op id says: `W12b.m0.c3` is chunk 3 of loading layer 12's weights for the backward pass of micro-batch 0.

    Phases: `f` forward, `r` recompute, `b` backward, `h` head (where it uses the tied embedding's layer).
    """

    kind: str
    layer: str = ""
    phase: str = ""
    micro: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        micro = "" if self.micro is None else f".m{self.micro}"
        chunk = "" if self.chunk is None else f".c{self.chunk}"
        return f"{_CODE_OF[self.kind]}{self.layer}{self.phase}{micro}{chunk}"


@functools.lru_cache(maxsize=1 << 16)
def parse_id(text: str) -> OpId:
    """The parts of an op id. Raises ScheduleError for a text that is none.

    >>> parse_id("W12b.m0.c3")
    OpId(kind='load_weights', layer='12', phase='b', micro=0, chunk=3)
    >>> str(parse_id("Geh.m1.c0"))
    'Geh.m1.c0'
    """
    match = _ID.fullmatch(text)
    if match is None or match["code"] not in CODES:
        raise ScheduleError(f"op id {text!r}: want CODE[LAYER][PHASE][.mMICRO][.cCHUNK] with a code of {', '.join(CODES)}")
    number = {key: None if match[key] is None else int(match[key]) for key in ("micro", "chunk")}
    return OpId(CODES[match["code"]], match["layer"] or "", match["phase"] or "", number["micro"], number["chunk"])


class Buffer(msgspec.Struct, frozen=True, kw_only=True):
    """Memory with a name, `PLACE.POOL:KEY`: `device.weights:0` is a slot, `host.moments:12` is layer 12's own."""

    id: str
    bytes: int
    persistent: bool = False
    """holds state from step to step (never acquired or released); otherwise a slot, free at both ends of a step"""
    dynamic: bool = False
    """allocated by the framework while a layer runs (saved activations), not by the plan"""

    @property
    def place(self) -> str:
        """`device` or `host`."""
        return self.id.partition(".")[0]

    @property
    def allocated(self) -> int:
        """Bytes it takes in its pool: whole pages on the host, which registers pages; whole 256-byte lines on the device."""
        unit = 4096 if self.place == "host" else 256
        return -(-self.bytes // unit) * unit

    @property
    def pool(self) -> str:
        return self.id.partition(":")[0]


class Op(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One unit of work on one lane."""

    id: str
    lane: str
    after: tuple[str, ...] = ()
    """ids of ops of other lanes that must end first; order inside a lane needs none"""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    acquires: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    offset: int = 0
    """of a copy: first byte"""
    bytes: int = 0
    """of a copy: how many"""
    parameters: int = 0
    """of an elementwise op: parameters of the layer, padding included"""
    flops: int = 0
    """of a compute op"""
    elements: int = 0
    """of a compute op without FLOPs, the embedding's: elements moved"""
    shape: str = ""
    """of a compute op: key into a calibrated cost table"""

    @property
    def kind(self) -> str:
        return parse_id(self.id).kind

    @property
    def layer(self) -> str:
        return parse_id(self.id).layer

    @property
    def buffers(self) -> tuple[str, ...]:
        return self.reads + self.writes

    @property
    def amount(self) -> int:
        """What a compute op's duration is proportional to among its like: FLOPs, or elements moved."""
        return self.flops or self.elements

    @property
    def adds(self) -> bool:
        """It adds to what stands in its target."""
        return any(buffer in self.reads for buffer in self.writes)


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
    def lanes(self) -> dict[str, tuple[Op, ...]]:
        """The queue of each lane that has work, in the order of LANES."""
        queues = {lane: tuple(op for op in self.ops if op.lane == lane) for lane in LANES}
        return {lane: queue for lane, queue in queues.items() if queue}

    @functools.cached_property
    def digest(self) -> str:
        """Of the whole program, 16 hexadecimal digits: two schedules with one digest are the same."""
        return hashlib.sha256(self.to_text().encode()).hexdigest()[:16]

    def to_text(self) -> str:
        """One line per buffer and per op; `from_text` reads it back."""
        lines = [f"schedule {self.policy}"]
        lines += [
            " ".join(["buffer", buffer.id, str(buffer.bytes), *(flag for flag in ("persistent", "dynamic") if getattr(buffer, flag))])
            for buffer in self.buffers
        ]
        for op in self.ops:
            words = [op.id, op.lane]
            words += [f"{field}={','.join(getattr(op, field))}" for field in _LISTS if getattr(op, field)]
            words += [f"{field}={getattr(op, field)}" for field in (*_NUMBERS, "shape") if getattr(op, field)]
            lines.append(" ".join(words))
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> Schedule:
        """Raises ValueError for a line that is neither a buffer nor an op."""
        first, *lines = text.splitlines()
        buffers, ops = [], []
        for line in lines:
            name, second, *rest = line.split()
            if name == "buffer" and rest:
                buffers.append(Buffer(id=second, bytes=int(rest[0]), persistent="persistent" in rest, dynamic="dynamic" in rest))
                continue
            words = (word.split("=", 1) for word in rest)
            fields = {key: tuple(value.split(",")) if key in _LISTS else int(value) if key in _NUMBERS else value for key, value in words}
            ops.append(msgspec.convert({"id": name, "lane": second, **fields}, Op))
        return cls(policy=first.removeprefix("schedule "), buffers=tuple(buffers), ops=tuple(ops))

    def check(self) -> None:
        """Proves the schedule sound or raises ScheduleError: ids unique and parseable, dependencies earlier in program order (so acyclic
        and without deadlock on FIFO lanes), any two ops that touch one buffer, one of them writing, ordered by dependencies (so
        no race is possible, whatever the durations), slots held by one user at a time and all released at the end.
        """
        if len(self.buffer) != len(self.buffers):
            ids = [buffer.id for buffer in self.buffers]
            raise ScheduleError(f"{next(name for name in ids if ids.count(name) > 1)}: two buffers have this id")
        order = Order()
        seen: set[str] = set()
        held: dict[str, list[str]] = {}
        for op in self.ops:
            if op.id in seen:
                raise ScheduleError(f"{op.id}: the id stands twice")
            if str(parse_id(op.id)) != op.id or op.lane not in LANES:
                raise ScheduleError(f"{op.id}: not in its canonical form, or on no lane: {op.lane!r}")
            for dependency in op.after:
                if dependency not in seen:
                    raise ScheduleError(f"{op.id}: depends on {dependency}, which does not stand before it")
            seen.add(op.id)
            order.add(op.id, op.lane, op.after)
            for other, buffer in order.conflicts(op.reads, op.writes):
                if not order.precedes(other, op.id):
                    raise ScheduleError(f"race on {buffer}: nothing orders {other} before {op.id}")
            order.touch(op.id, op.reads, op.writes)
            self._check_holds(op, held, order)
        if held:
            raise ScheduleError(f"never released: {', '.join(sorted(held))}")

    def _check_holds(self, op: Op, held: dict[str, list[str]], order: Order) -> None:
        for slot in op.acquires:
            if slot in held or slot not in op.writes:
                raise ScheduleError(f"{op.id}: acquires {slot}, which is {'held' if slot in held else 'not written by it'}")
            held[slot] = []
        for name in op.buffers:
            if name not in self.buffer:
                raise ScheduleError(f"{op.id}: unknown buffer {name}")
            if self.buffer[name].persistent:
                continue
            if name not in held:
                raise ScheduleError(f"{op.id}: touches {name}, which nothing holds")
            held[name].append(op.id)
        for slot in op.releases:
            users = held.pop(slot, None)
            late = next((user for user in users or [] if user != op.id and not order.precedes(user, op.id)), None)
            if users is None or late is not None:
                raise ScheduleError(f"{op.id}: releases {slot}, which {'nothing holds' if users is None else f'{late} may still be using'}")


_LISTS = ("after", "reads", "writes", "acquires", "releases")
_NUMBERS = ("offset", "bytes", "parameters", "flops", "elements")


class Order:
    """Happens-before among ops, by vector clocks: per op, how far each lane must have come before it starts.

    Policies derive their dependencies from it and `Schedule.check` proves them with it, each from scratch.
    """

    def __init__(self) -> None:
        self._clock: dict[str, dict[str, int]] = {}
        self._place: dict[str, tuple[str, int]] = {}
        self._last_in_lane: dict[str, str] = {}
        self._last_write: dict[str, str] = {}
        self._reads_since: dict[str, list[str]] = {}

    def add(self, op: str, lane: str, after: Iterable[str]) -> None:
        """Puts `op` at the end of `lane`, behind the ops `after`."""
        clock: dict[str, int] = {}
        before = [self._last_in_lane[lane]] if lane in self._last_in_lane else []
        for other in (*before, *after):
            for key, count in self._clock[other].items():
                clock[key] = max(clock.get(key, 0), count)
            other_lane, index = self._place[other]
            clock[other_lane] = max(clock.get(other_lane, 0), index)
        self._clock[op] = clock
        self._place[op] = (lane, self._place[before[0]][1] + 1 if before else 1)
        self._last_in_lane[lane] = op

    def last(self, lane: str) -> str | None:
        """The op at the end of `lane`."""
        return self._last_in_lane.get(lane)

    def precedes(self, first: str, second: str) -> bool:
        """`first` has ended whenever `second` starts."""
        lane, index = self._place[first]
        return self._clock[second].get(lane, 0) >= index

    def conflicts(self, reads: Iterable[str], writes: Iterable[str]) -> list[tuple[str, str]]:
        """Earlier ops, each with the buffer, that an op with these accesses must wait for: write-read, read-write, write-write."""
        found = [(self._last_write[buffer], buffer) for buffer in reads if buffer in self._last_write]
        for buffer in writes:
            found += [(reader, buffer) for reader in self._reads_since.get(buffer, ())]
            if buffer in self._last_write:
                found.append((self._last_write[buffer], buffer))
        return found

    def touch(self, op: str, reads: Iterable[str], writes: Iterable[str]) -> None:
        """Records the accesses of `op`."""
        for buffer in reads:
            self._reads_since.setdefault(buffer, []).append(op)
        for buffer in writes:
            self._last_write[buffer] = op
            self._reads_since[buffer] = []
