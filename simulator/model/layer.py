"""TensorSpec and LayerSpec: the parameter tensors of a model, by layer.

The parameters of a layer are stored in one flat buffer, one tensor after the other, each padded to
a multiple of `ALIGNMENT` elements.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Literal, NamedTuple

import msgspec

from megatrain.simulator.model.families.kinds import HYBRID, LINEAR

ALIGNMENT = 64
"""The size of a tensor in a layer's buffer is a multiple of this number of elements: 128 bytes in
bf16, 256 in fp32. This aligns tensors for the widest loads of GPUs and CPUs."""
DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}
EMBEDDING, HEAD = "e", "h"
EAGER_MIXERS = {LINEAR: "linear attention", HYBRID: "a state-space mixer"}
"""Kind of attention of the layers that always run eagerly -> its name in messages."""


class TensorSpec(msgspec.Struct, frozen=True):
    """One parameter tensor of a layer."""

    name: str
    """Its name inside the layer."""
    shape: tuple[int, ...]
    """Its shape."""

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        """The elements that it takes in the layer's flat buffer, padding included."""
        return -(-self.elements // ALIGNMENT) * ALIGNMENT


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One layer: tensors that are loaded, computed with and updated together."""

    name: str
    """`e`, `0`, `1` and so on, or `h`."""
    kind: Literal["embedding", "decoder", "head"]
    """What the layer is."""
    tensors: tuple[TensorSpec, ...]
    """Its parameter tensors, in the order of the flat buffer."""
    signature: str = ""
    """For a decoder layer: everything that the duration of its ops depends on, except the workload,
    such as `qwen2-2048x11008-16:2x128-v151936`. Empty for other layers."""
    attention: str = ""
    """For a decoder layer: its attention, such as `full_attention` (`families/kinds.py`)."""
    inner: int = 0
    """For a decoder layer: the width of its MLP in elements per token, summed over the experts that
    a token uses."""
    experts: bool = False
    """For a decoder layer: whether a router chooses which of its experts compute a token."""

    @property
    def compilable(self) -> bool:
        """Whether a decoder layer runs through torch.compile if the workload is compiled.

        Layers with linear attention or a state-space mixer always run eagerly, because compiled
        layers of Qwen3-Next ran out of memory on an H200, while eager layers take 125.5 GiB
        (experiments/results/h200-families).
        """
        return self.attention not in EAGER_MIXERS

    @functools.cached_property
    def parameters(self) -> int:
        """The number of its parameters."""
        return sum(tensor.elements for tensor in self.tensors)

    @functools.cached_property
    def elements(self) -> int:
        """The elements of the flat buffer, padding included. The padding is zero, and AdamW keeps
        it zero.
        """
        return sum(tensor.padded for tensor in self.tensors)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each tensor in the flat buffer."""
        ends = itertools.accumulate(tensor.padded for tensor in self.tensors)
        return tuple(end - tensor.padded for tensor, end in zip(self.tensors, ends, strict=True))


class Heads(NamedTuple):
    """The heads of an attention layer."""

    queries: int
    """The number of query heads."""
    pairs: int
    """The number of key-value heads."""
    size: int
    """The elements of a head, or the largest number if queries, keys and values differ."""


class KeptAttention(NamedTuple):
    """Bytes of a layer's saved attention. One buffer holds the output and the log-sum-exp."""

    output: int
    """Bytes of the output, [batch, sequence, heads, value size] in the compute dtype."""
    log_sum_exp: int
    """Bytes of the log-sum-exp, [batch, heads, sequence] in fp32."""

    @property
    def offset(self) -> int:
        """The first byte of the log-sum-exp: the output's bytes, rounded up to a multiple of
        256.
        """
        return -(-self.output // 256) * 256

    @property
    def bytes(self) -> int:
        """The bytes of the buffer."""
        return self.offset + self.log_sum_exp
