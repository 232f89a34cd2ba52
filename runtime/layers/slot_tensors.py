"""Hooks that make autograd save a layer's weights as offsets in their slot.

With these hooks, the graph does not refer to the memory of the weights, so the backward pass can
read the weights from another slot.
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
    """Offset from the start of the slot, in bytes."""
    dtype: torch.dtype
    """Dtype of the tensor."""
    size: tuple[int, ...]
    """Shape of the tensor."""
    stride: tuple[int, ...]
    """Strides of the tensor, in elements."""


def slot_hooks(
    arenas: Arenas, where: list[str]
) -> tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]:
    """Returns the two hooks for `torch.autograd.graph.saved_tensors_hooks`.

    The first hook saves a tensor in the weight slot `where[0]` as its place in the slot. The second
    hook returns the tensor at this place in the slot that `where[0]` names when the hook is called.
    Tensors outside the slot's pool are saved unchanged.
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
