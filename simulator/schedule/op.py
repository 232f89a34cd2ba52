"""Op: one unit of work on one lane. This module also has the format of op ids."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

import msgspec

from megatrain.simulator.model.workload import has_pieces, is_short

LANES = ("compute", "update", "h2d", "d2h", "cpu", "exchange")
"""The lanes: FIFO queues of ops. `cpu` is a host thread and the others are CUDA streams. Only plans
for several GPUs use `exchange`, which runs collectives."""

CODES = {
    "W": "load_weights",
    "E": "embed",
    "F": "forward",
    "H": "head",
    "HL": "loss",
    "R": "recompute",
    "B": "backward",
    "EB": "embed_backward",
    "G": "save_gradients",
    "GL": "load_gradients",
    "L": "load_state",
    "S": "save_state",
    "P": "save_activations",
    "PL": "load_activations",
    "T": "save_attention",
    "TL": "load_attention",
    "A": "accumulate_gradients",
    "N": "norm",
    "K": "encode_gradients",
    "Q": "update_ratios",
    "LV": "load_second_moment",
    "C": "clip",
    "U": "update",
    "UC": "cpu_update",
    "UA": "cpu_adam",
    "HP": "host_pass",
    "TP": "thread_pass",
    "DP": "device_pass",
    "GW": "gather_weights",
    "GX": "exchange_gradients",
    "NR": "sum_rows",
    "NX": "exchange_sums",
}
"""Code -> kind of op. The id of an op starts with its code."""
OFFLOADING = ("save_activations", "load_activations", "save_attention", "load_attention")
"""The kinds of copies that offload activations to the host and load them again for the backward
pass of a micro-batch."""
_CODE_OF = {kind: code for code, kind in CODES.items()}
SAVED_ATTENTION_SUFFIX = "-kept"
"""The suffix of the layer's part of `Op.shape` for a recompute that skips attention."""
SAVED_ACTIVATIONS = "device.saved_activations"
"""The pool of slots in which forward passes save the activations of their layers."""
WHOLE_SUFFIX = "-whole"
"""The suffix of the layer's part of `Op.shape` for a recompute in pieces of tokens that computes
the MLP, because the next layer reads its output. It comes before `SAVED_ATTENTION_SUFFIX`."""
_ID = re.compile(
    r"(?P<code>[A-Z]+)(?P<layer>\d+|e|h)?(?P<phase>[frbh])?(?:\.m(?P<micro>\d+))?"
    r"(?:\.c(?P<chunk>\d+))?"
)


def has_saved_attention(shape: str) -> bool:
    """Returns whether `shape`, an `Op.shape`, belongs to a recompute that skips attention.

    >>> has_saved_attention("qwen2-8x8-1:1x8-v9-kept/1x8-bf16")
    True
    """
    return shape.partition("/")[0].endswith(SAVED_ATTENTION_SUFFIX)


def computes_output(shape: str) -> bool:
    """Returns whether `shape`, an `Op.shape`, belongs to a recompute that computes the output of
    the layer. Recomputes that leave out last products do not, and in pieces of tokens only those of
    `is_whole` do.

    >>> computes_output("qwen2-8x8-1:1x8-v9/1x8-bf16-short")
    False
    """
    return is_whole(shape) if has_pieces(shape) else not is_short(shape)


def is_whole(shape: str) -> bool:
    """Returns whether `shape` belongs to a recompute in pieces of tokens that computes the MLP.

    >>> is_whole("qwen2-8x8-1:1x8-v9-whole-kept/1x8-bf16")
    True
    """
    layer = shape.partition("/")[0]
    return layer.removesuffix(SAVED_ATTENTION_SUFFIX).endswith(WHOLE_SUFFIX)


def saves_activations(writes: Iterable[str]) -> bool:
    """Returns whether an op that writes the buffers `writes` is a forward pass that saves the
    activations of its layer.

    >>> saves_activations(["device.hidden:0", "device.saved_activations:3"])
    True
    """
    return any(name.startswith(SAVED_ACTIVATIONS) for name in writes)


class ScheduleError(ValueError):
    """Raised if a schedule breaks a rule. The text names the ops and the buffer."""

    def __init__(self, text: str, allowed: str, fix: str) -> None:
        """`allowed` and `fix` are for the author of the policy, as in `UserError`."""
        super().__init__(text)
        self.allowed, self.fix = allowed, fix


class OpId(msgspec.Struct, frozen=True):
    """The parts of an op id: `W12b.m0.c3` is chunk 3 of loading layer 12's weights for the backward
    pass of micro-batch 0.
    """

    kind: str
    """The kind of op, a value of `CODES`."""
    layer: str = ""
    """The layer, such as `12`, `e` or `h`; empty if the op belongs to none."""
    phase: str = ""
    """The pass that the op serves: `f` forward, `r` recompute, `b` backward, or `h` for a head that
    uses the layer of a tied embedding. Empty if the kind needs none."""
    micro: int | None = None
    """The micro-batch, if the op belongs to one."""
    chunk: int | None = None
    """The chunk, if the op works on one of several."""

    def __str__(self) -> str:
        """Returns the id as text. Raises ScheduleError if the kind is unknown."""
        if self.kind not in _CODE_OF:
            raise ScheduleError(
                f"op of layer {self.layer!r}: unknown kind {self.kind!r}",
                allowed=", ".join(_CODE_OF),
                fix="name one of these kinds in its OpId",
            )
        text = f"{_CODE_OF[self.kind]}{self.layer}{self.phase}"
        if self.micro is not None:
            text += f".m{self.micro}"
        return text if self.chunk is None else f"{text}.c{self.chunk}"


@functools.lru_cache(maxsize=1 << 16)
def parse_id(text: str) -> OpId:
    """Returns the parts of an op id. Raises ScheduleError if `text` is not an op id.

    >>> parse_id("W12b.m0.c3")
    OpId(kind='load_weights', layer='12', phase='b', micro=0, chunk=3)
    >>> str(parse_id("Geh.m1.c0"))
    'Geh.m1.c0'
    """
    match = _ID.fullmatch(text)
    if match is None or match["code"] not in CODES:
        raise ScheduleError(
            f"op id {text!r}",
            allowed="CODE[LAYER][PHASE][.mMICRO][.cCHUNK], where PHASE is f, r, b or h, and CODE is"
            f" one of {', '.join(CODES)}",
            fix="make the id with OpId",
        )
    number = {key: None if match[key] is None else int(match[key]) for key in ("micro", "chunk")}
    return OpId(
        CODES[match["code"]],
        match["layer"] or "",
        match["phase"] or "",
        number["micro"],
        number["chunk"],
    )


def base_buffer(name: str) -> str:
    """Returns the id of the whole buffer. `name` is the id of a buffer or of a part of one.

    >>> base_buffer("host.moments:12#3"), base_buffer("device.weights:0")
    ('host.moments:12', 'device.weights:0')
    """
    return name.partition("#")[0]


class Op(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One unit of work on one lane."""

    id: str
    """The id, in the format of `OpId`."""
    lane: str
    """The lane that runs it."""
    after: tuple[str, ...] = ()
    """Ids of the ops on other lanes that must end first. Earlier ops of the same lane need not be
    named."""
    reads: tuple[str, ...] = ()
    """Ids of the buffers, or parts of buffers, that the op reads."""
    writes: tuple[str, ...] = ()
    """Ids of the buffers, or parts of buffers, that the op writes."""
    acquires: tuple[str, ...] = ()
    """Ids of the slots that are in use from the start of the op."""
    releases: tuple[str, ...] = ()
    """Ids of the slots that are free after the end of the op."""
    offset: int = 0
    """The first byte that a copy moves, or the first parameter of an op on optimizer state."""
    bytes: int = 0
    """The bytes that a copy moves, or the bytes that a pass reads and writes."""
    parameters: int = 0
    """The parameters that an elementwise op or an op on optimizer state works on, padding
    included."""
    flops: int = 0
    """The FLOPs of a compute op, or of the matrix products of an update."""
    elements: int = 0
    """The elements that a compute op without FLOPs moves: only the embedding's ops use it. For
    `exchange_gradients`, the elements of a part that are exchanged at a time."""
    shape: str = ""
    """The key of a compute op in a calibrated cost table: `LAYER/WORKLOAD`, from
    `ModelSpec.shape` or `LayerSpec.signature`, and `Workload.shape`. Empty for other ops."""
    high_priority: bool = False
    """Whether ops of `compute` wait while this op runs, because its CUDA stream has a higher
    priority. Only ops on the lane `update` can have it."""

    @property
    def kind(self) -> str:
        """The kind of op, a value of `CODES`."""
        return parse_id(self.id).kind

    @property
    def layer(self) -> str:
        """The layer, or empty if the op belongs to none."""
        return parse_id(self.id).layer

    @property
    def buffers(self) -> tuple[str, ...]:
        """The buffers that the op reads, followed by the buffers that it writes."""
        return self.reads + self.writes

    @property
    def amount(self) -> int:
        """The size by which a compute op's duration is scaled: its FLOPs, or if it has no FLOPs,
        the elements that it moves.
        """
        return self.flops or self.elements

    @property
    def size(self) -> tuple[object, ...]:
        """What the cost of the op depends on: its kind, lane, bytes, parameters, FLOPs, elements,
        shape and priority, whether it adds to its target, and whether it saves activations. For ops
        of the embedding and the head it includes the layer.
        """
        id = parse_id(self.id)
        return (
            id.kind,
            "" if id.layer.isdigit() else id.layer,
            self.lane,
            self.adds,
            saves_activations(self.writes),
            self.bytes,
            self.parameters,
            self.flops,
            self.elements,
            self.shape,
            self.high_priority,
        )

    @property
    def adds(self) -> bool:
        """Whether the op adds to a buffer: whether it reads a buffer that it also writes."""
        return any(buffer in self.reads for buffer in self.writes)
