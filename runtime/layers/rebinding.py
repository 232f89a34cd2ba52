"""Rebinding: a graph that does not hold the weights it was made with, but where they lay in their slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatrain.runtime.memory.arenas import Arenas


@dataclass(frozen=True)
class _InSlot:
    """A saved tensor that lies in a weight slot: where, from the slot's start."""

    byte_offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


def rebind(arenas: Arenas, where: list[str]) -> tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]:
    """Hooks that save a tensor of the weight slot as its place in the slot, and find it again in the slot that `where` then names."""
    pool, start = arenas.start_of(where[0])

    def pack(tensor: torch.Tensor) -> object:
        if tensor.untyped_storage().data_ptr() != pool:
            return tensor
        return _InSlot(int(tensor.storage_offset()) * tensor.itemsize - start, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def unpack(packed: object) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        assert isinstance(packed, _InSlot)
        return arenas.strided(where[0], packed.dtype, packed.size, packed.stride, packed.byte_offset)

    return pack, unpack
