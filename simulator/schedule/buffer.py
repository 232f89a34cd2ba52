"""Buffer: a named stretch of memory, and what it holds."""

from __future__ import annotations

from typing import Literal

import msgspec

DataClass = Literal[
    "weights", "low", "moments", "gradients", "hidden", "activations", "saved_activations", "attention", "tokens", "losses", "norms", "clips", "ratio_sums",
    "workspace",
]  # fmt: skip
"""What a buffer holds:

* `weights`, `low`, `moments`, `gradients`: a layer's weights, the low half of its fp32 master, both AdamW moments, its gradient
* `hidden`: a layer's input or output [batch, sequence, hidden], or the gradient of one
* `activations`, `saved_activations`: what autograd saves of a layer that is recomputed, or of one that is not
* `attention`: a layer's attention output and log-sum-exp
* `tokens`: ids, labels and document indices of a micro-batch
* `losses`, `norms`, `clips`, `ratio_sums`: a micro-batch's loss, a layer's sum of squares, the coefficients that updates read, sums of g^2 / v
* `workspace`: anything else, which no op of this runtime touches
"""
BufferDtype = Literal["bf16", "fp32", "int16", "int64", "mixed", "home"]
"""The dtype of a buffer's elements. `mixed`: several tensors of different dtypes. `home`: a chunk that layers of different dtypes pass through has the
dtype of the layer's own persistent buffer of the same data."""
DTYPE_OF: dict[str, BufferDtype] = {
    "low": "int16", "moments": "fp32", "tokens": "int64", "losses": "fp32", "norms": "fp32", "clips": "fp32", "ratio_sums": "fp32",
    "activations": "mixed", "saved_activations": "mixed", "attention": "mixed", "workspace": "mixed",
}  # fmt: skip
"""The only dtype of a class of data. `weights`, `hidden` and `gradients` have bf16 or fp32."""
WIDTH = {"bf16": 2, "fp32": 4, "int16": 2, "int64": 8}
"""bytes of an element"""


def allocated_bytes(name: str, size: int) -> int:
    """Bytes that a buffer of `size` bytes takes in its pool: whole pages on the host, which registers pages; whole 256-byte lines on the device.

    `name` is the buffer's or the pool's.
    """
    unit = 4096 if name.startswith("host.") else 256
    return -(-size // unit) * unit


class Buffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Memory with a name, `PLACE.POOL:KEY`.

    PLACE is `device` or `host`. POOL is a label: the buffers of a pool are alike and are allocated together, and nothing depends on its text. KEY is the
    layer or the micro-batch of a persistent buffer, and the number of a slot. `host.moments:12` holds the moments of layer 12.
    """

    id: str
    bytes: int
    data: DataClass
    dtype: BufferDtype
    persistent: bool = False
    """holds state from step to step (never acquired or released); otherwise a slot, free at both ends of a step"""
    dynamic: bool = False
    """allocated by the framework while a layer runs, not by the plan"""
    chunk: bool = False
    """holds a chunk of a layer from its first byte on, where a buffer of a whole layer holds it at the op's `offset`"""
    staging: bool = False
    """data only passes through on its way to another buffer"""
    scales_with_tokens: bool = False
    """its bytes are proportional to the tokens of a micro-batch"""
    per_gpu: bool = False
    """in host memory: every GPU of a host has one of its own; otherwise all GPUs share it. Device memory is always a GPU's own."""
    knob: str = ""
    """the knob that sets how many buffers the pool has; empty where none does"""

    @property
    def place(self) -> str:
        """`device` or `host`."""
        return self.id.partition(".")[0]

    @property
    def allocated(self) -> int:
        """Bytes it takes in its pool."""
        return allocated_bytes(self.id, self.bytes)

    @property
    def pool(self) -> str:
        """`PLACE.POOL`."""
        return self.id.partition(":")[0]

    @property
    def key(self) -> str:
        """The layer or the micro-batch of a persistent buffer; the number of a slot."""
        return self.id.partition(":")[2]


FLAGS = ("persistent", "dynamic", "chunk", "staging", "scales_with_tokens", "per_gpu")
