"""Buffer: a named block of memory, and what it holds."""

from __future__ import annotations

import functools
from typing import Literal

import msgspec

from megatrain.simulator.model.state_format import PLANE_BYTES

DataClass = Literal[
    "weights",
    "master_low",
    "moments",
    "gradients",
    "hidden",
    "activations",
    "saved_activations",
    "attention",
    "tokens",
    "losses",
    "norms",
    "row_sums",
    "moving_norms",
    "clips",
    "ratio_sums",
    "workspace",
]
"""What a buffer holds:

* `weights`: a layer's weights in the compute dtype
* `master_low`: the part of a layer's master weights that its bf16 weights do not have
* `moments`: the optimizer's moments of a layer: two with AdamW, one for the matrices that Muon
  updates
* `gradients`: a layer's gradient
* `hidden`: the input or output of a layer, [batch, sequence, carried], or the gradient of one
* `activations`: what autograd saves in a layer that is recomputed
* `saved_activations`: what autograd saves in a layer that is not recomputed
* `attention`: a layer's attention output and log-sum-exp
* `tokens`: the ids, labels and document indices of a micro-batch
* `losses`: the loss of a micro-batch
* `norms`: the sum of squares of a layer's gradient, or of the gradient of each of its tensors
* `row_sums`: the sum of squares of each `NORM_ROW` elements of a part of a layer's gradient
* `moving_norms`: the moving norm of each tensor of a layer, which clipping by `adagc` keeps
* `clips`: the clip coefficients and learning rate factors that updates read
* `ratio_sums`: sums of g^2 / v of a layer
* `workspace`: temporary values of updates and collectives; in schedules of other systems, any other
  data
"""
BufferDtype = Literal["bf16", "fp32", "int16", "int8", "block8", "int64", "mixed", "home"]
"""The dtype of a buffer's elements (`block8`: `simulator/model/state_format.py`). `mixed` means
several tensors of different dtypes. `home` is for a chunk that layers with different dtypes share:
it then has the dtype of the current layer's persistent buffer of the same class of data."""
DTYPES_OF: dict[str, tuple[BufferDtype, ...]] = {
    "master_low": ("int16", "int8"),
    "moments": ("fp32", "block8"),
    "tokens": ("int64",),
    "losses": ("fp32",),
    "norms": ("fp32",),
    "row_sums": ("fp32",),
    "moving_norms": ("fp32",),
    "clips": ("fp32",),
    "ratio_sums": ("fp32",),
    "activations": ("mixed",),
    "saved_activations": ("mixed",),
    "attention": ("mixed",),
    "workspace": ("mixed",),
}
"""Class of data -> the dtypes that it may have; the first is the default. `weights`, `hidden` and
`gradients` are absent: they have no default, and `operands.check_buffer` checks their dtype."""
WIDTH = dict[str, float](PLANE_BYTES.items()) | {"int64": 8}
"""Bytes of one element, by dtype."""


def allocated_bytes(name: str, size: int) -> int:
    """Returns the bytes that a buffer of `size` bytes takes in its pool.

    On the host the size is rounded up to whole 4096-byte pages, because memory is pinned by page.
    On the device it is rounded up to a multiple of 256 bytes. `name` is the id of the buffer or of
    its pool.
    """
    unit = 4096 if name.startswith("host.") else 256
    return -(-size // unit) * unit


class Buffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A block of memory with a name, `PLACE.POOL:KEY`.

    PLACE is `device` or `host`. POOL is a label: the buffers of a pool are alike and are allocated
    together, and nothing depends on its text. KEY is the layer or the micro-batch of a persistent
    buffer, or the number of a slot. `host.moments:12` holds the moments of layer 12.
    """

    id: str
    """The name, `PLACE.POOL:KEY`."""
    bytes: int
    """Size in bytes, before rounding up (see `allocated`)."""
    data: DataClass
    """The class of data that it holds."""
    dtype: BufferDtype
    """The dtype of its elements."""
    persistent: bool = False
    """True if it holds state from one step to the next; it is never acquired or released. False for
    a slot, which is free at the start and at the end of a step."""
    dynamic: bool = False
    """True if the framework allocates it while a layer runs. Otherwise the plan allocates it."""
    chunk: bool = False
    """True if it holds one chunk of a layer, starting at its first byte. A buffer of a whole layer
    holds the same chunk at the op's `offset`."""
    staging: bool = False
    """True if data only passes through it on the way to another buffer."""
    scales_with_tokens: bool = False
    """True if its size is proportional to the tokens of a micro-batch."""
    per_gpu: bool = False
    """For a buffer in host memory: True if each GPU of the host has its own copy, False if all GPUs
    share one. Device memory always belongs to one GPU."""
    sharded: bool = False
    """With several GPUs: True if it holds the part of a layer that this rank owns, False if it
    holds a whole layer or no layer."""
    matrix_products: bool = False
    """True if updates multiply matrices in it. The matrix library needs memory in addition
    (`muon.LIBRARY_BYTES`)."""
    knob: str = ""
    """The knob that sets how many buffers the pool has, or empty if no knob does."""

    @property
    def place(self) -> str:
        """`device` or `host`."""
        return self.id.partition(".")[0]

    @functools.cached_property
    def allocated(self) -> int:
        """The bytes that it takes in its pool."""
        return allocated_bytes(self.id, self.bytes)

    @functools.cached_property
    def pool(self) -> str:
        """`PLACE.POOL`."""
        return self.id.partition(":")[0]

    @property
    def key(self) -> str:
        """The layer or the micro-batch of a persistent buffer, or the number of a slot."""
        return self.id.partition(":")[2]


FLAGS = (
    "persistent",
    "dynamic",
    "chunk",
    "staging",
    "scales_with_tokens",
    "per_gpu",
    "sharded",
    "matrix_products",
)
"""The boolean fields of a Buffer, in the order of the schedule's text form."""
