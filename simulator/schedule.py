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
| loss | head weights, hidden, tokens | loss |
| recompute | weights, hidden[, attention] | saved activations[, hidden] |
| backward | weights, saved activations, hidden, gradient of the output[, attention] | gradient of the weights, gradient of the input |
| embed_backward | tokens, gradient of hidden | gradient of the weights |
| save_gradients (d2h) | device gradient | host slab or host gradient |
| accumulate_gradients (cpu) | slab | host gradient |
| load_second (h2d) | host moments | a chunk of moments, of which only the second is loaded |
| norm | gradient | the layer's sum of squares |
| ratios | gradient, moments | sums of g^2 / v by 64 elements, v the second moment after this step |
| clip | every sum of squares, every loss | the clip coefficient, NaN where one of them is not finite |
| clip of a layer | its sum of squares or its sums of g^2 / v, every loss | its coefficient, or its tensors' learning rate factors, likewise |
| update, cpu_update | gradient, clip coefficient or factors[, weights] | weights[, low plane], moments[, weight slot] |
| load_state (h2d), save_state (d2h) | one buffer per class | the same classes elsewhere |
| load_gradients (h2d) | host gradient | device gradient |
| save_activations (d2h), load_activations (h2d) | hidden | hidden |

and, in schedules of other systems, which are only for prediction, so what they read and write is in no fixed order:

| kind | what its bytes are |
|---|---|
| cpu_adam (cpu) | read and written by a fused, vectorised AdamW of the host |
| host_pass (cpu) | read and written by an elementwise pass of all the host's threads: copying, scaling, zeroing |
| thread_pass (cpu) | the same by one thread |
| device_pass (compute) | read and written in device memory: copies, casts, the loss's elementwise passes |

A forward that also writes saved activations keeps them for its backward. One that also writes attention, in `device.attention`, keeps that layer's attention
output and log-sum-exp: its recompute takes them instead of computing them, and its backward needs them. An update does nothing where its coefficient is NaN;
one that also reads weights takes the old ones from there, one that also writes a weight slot leaves a copy of the new ones in it. An op that writes its
gradient *and reads it* adds to what is there; one that only writes it overwrites. `host.moments:12#3` is part 3 of a buffer: two parts never overlap, the
whole overlaps every part.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
from collections.abc import Collection
from typing import NamedTuple

import msgspec

from megatrain.simulator.order import Order

LANES = ("compute", "update", "h2d", "d2h", "cpu")
"""FIFO queues: three or four CUDA streams and one host thread."""

CODES = {
    "W": "load_weights", "E": "embed", "F": "forward", "H": "head", "HL": "loss", "R": "recompute", "B": "backward", "EB": "embed_backward",
    "G": "save_gradients", "GL": "load_gradients", "L": "load_state", "S": "save_state", "P": "save_activations", "PL": "load_activations",
    "A": "accumulate_gradients", "N": "norm", "Q": "ratios", "LV": "load_second", "C": "clip", "U": "update", "UC": "cpu_update",
    "UA": "cpu_adam", "HP": "host_pass", "TP": "thread_pass", "DP": "device_pass",
}  # fmt: skip
_CODE_OF = {kind: code for code, kind in CODES.items()}
KEPT = "-kept"
"""what the layer's part of `Op.shape` ends with where a recompute need not compute the attention"""
_ID = re.compile(r"(?P<code>[A-Z]+)(?P<layer>\d+|e|h)?(?P<phase>[frbh])?(?:\.m(?P<micro>\d+))?(?:\.c(?P<chunk>\d+))?")


def is_kept(shape: str) -> bool:
    """Of a recompute that need not compute the attention.

    >>> is_kept("qwen2-8x8-1:1x8-v9-kept/1x8-bf16")
    True
    """
    return shape.partition("/")[0].endswith(KEPT)


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
        kind, layer, phase, micro, chunk = self
        text = f"{_CODE_OF[kind]}{layer}{phase}"
        if micro is not None:
            text += f".m{micro}"
        return text if chunk is None else f"{text}.c{chunk}"


def whole(name: str) -> str:
    """The buffer that `name` is, or is a part of.

    >>> whole("host.moments:12#3"), whole("device.weights:0")
    ('host.moments:12', 'device.weights:0')
    """
    return name.partition("#")[0]


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


def allocated_bytes(name: str, size: int) -> int:
    """Bytes that a buffer of `size` bytes takes in its pool. `name` is the buffer's or the pool's."""
    unit = 4096 if name.startswith("host.") else 256
    return -(-size // unit) * unit


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
        return allocated_bytes(self.id, self.bytes)

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
    """of a copy: first byte; of an op on optimizer state: first parameter"""
    bytes: int = 0
    """of a copy: how many; of a pass: read and written"""
    parameters: int = 0
    """of an op on optimizer state, or elementwise: how many parameters, padding included"""
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
        lines += [
            " ".join(["buffer", buffer.id, str(buffer.bytes), *(flag for flag in ("persistent", "dynamic") if getattr(buffer, flag))])
            for buffer in self.buffers
        ]
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
            earlier = order.touch(op.lane, op.reads, op.writes)
            order.add(op.lane, [place[other] for other in op.after])
            for other in earlier:
                if not order.precedes(other, index):
                    raise ScheduleError(f"race on {_contested(self.ops[other], op)}: nothing orders {self.ops[other].id} before {op.id}")
            self._check_holds(op, held)
        if held:
            raise ScheduleError(f"never released: {', '.join(sorted(held))}")

    def _check_holds(self, op: Op, held: set[str]) -> None:
        """A slot has one user at a time in program order. That those before have ended follows from the next one's first op writing it."""
        for slot in op.acquires:
            if slot in held or slot not in op.writes:
                raise ScheduleError(f"{op.id}: acquires {slot}, which is {'held' if slot in held else 'not written by it'}")
            held.add(slot)
        for name in map(whole, op.buffers):
            if name not in self.buffer:
                raise ScheduleError(f"{op.id}: unknown buffer {name}")
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
