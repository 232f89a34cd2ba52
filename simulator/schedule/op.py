"""Op: one unit of work on one lane, and the ids that ops have."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

import msgspec

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


def whole(name: str) -> str:
    """The buffer that `name` is, or is a part of.

    >>> whole("host.moments:12#3"), whole("device.weights:0")
    ('host.moments:12', 'device.weights:0')
    """
    return name.partition("#")[0]


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
