"""Hooks that make autograd save a layer's weights as offsets in their slot.

The graph then does not refer to the weights that it was made with, and the backward can read them
from another slot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatrain.runtime.memory.arenas import Arenas


@dataclass(frozen=True)
class _InSlot:
    """The place of a saved tensor in a weight slot."""

    byte_offset: int
    """offset from the start of the slot"""
    dtype: torch.dtype
    """dtype of the tensor"""
    size: tuple[int, ...]
    """shape of the tensor"""
    stride: tuple[int, ...]
    """strides of the tensor, in elements"""


def slot_hooks(
    arenas: Arenas, where: list[str]
) -> tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]:
    """Returns the two hooks for `torch.autograd.graph.saved_tensors_hooks`.

    The first hook saves a tensor in the weight slot `where[0]` as its place in the slot. The second
    one returns the tensor at this place in the slot that `where[0]` names at that time. Other
    tensors are saved as they are.
    """
    pool, start = arenas.start_of(where[0])

    def pack(tensor: torch.Tensor) -> object:
        if tensor.untyped_storage().data_ptr() != pool:
            return tensor
        return _InSlot(
            int(tensor.storage_offset()) * tensor.itemsize - start,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
        )

    def unpack(packed: object) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        assert isinstance(packed, _InSlot)
        return arenas.strided(
            where[0], packed.dtype, packed.size, packed.stride, packed.byte_offset
        )

    return pack, unpack
