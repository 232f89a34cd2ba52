"""Counts the bytes that PyTorch operations move and allocate, for tests of predicted bytes."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Counted(TorchDispatchMode):
    """Counts the bytes that operations read and write, and the bytes of their new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.held = self.peak = 0

    def __torch_dispatch__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        read, written = (
            [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            for value in ((args, kwargs), made)
        )
        known = {tensor.untyped_storage().data_ptr() for tensor in read}
        new = [each for each in written if each.untyped_storage().data_ptr() not in known]
        if new or function._schema.is_mutable:  # otherwise it is a view
            self.moved += sum(tensor.nbytes for tensor in (*read, *written))
        for tensor in new:
            storage = tensor.untyped_storage()
            self._hold(storage.nbytes())
            weakref.finalize(storage, self._hold, -storage.nbytes())
        return made

    def _hold(self, size: int) -> None:
        self.held += size
        self.peak = max(self.peak, self.held)
