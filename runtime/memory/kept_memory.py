"""Host memory that outlives an executor: touched and registered once, handed to one executor after the other.

Touching and registering what a calibration needs takes 2.5 s on an H200's host, and 2.8 to 8.2 s with small pages (experiments/results/h200-prove: prove.log and
all logs): who runs many plans in one process, as calibration does, would wait longer for memory than for steps. An executor that closes gives its share back;
`free` gives back everything.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from megatrain.runtime.memory.host_memory import HostMemory, map_pages

_LEAST_BYTES = 2**28  # of a slab: small pools share one
_PAGE_BYTES = 4096


class KeptMemory(HostMemory):
    """Slabs, each registered in one call, so that a pool may lie anywhere in one; used from the front, all anew after `close`."""

    def __init__(self, registered: bool) -> None:
        super().__init__(registered)
        self._slabs: list[tuple[mmap.mmap, torch.Tensor]] = []
        self._used: list[int] = []

    @property
    def kept_bytes(self) -> int:
        """In all slabs."""
        return sum(slab.nbytes for _, slab in self._slabs)

    def reserve(self, size: int) -> None:
        """One slab for pools of `size` bytes in all, if there is none."""
        if not any(slab.nbytes >= size for _, slab in self._slabs):
            self._grow(size)

    def allocate(self, parts: Sequence[int], progress: Callable[[int], None]) -> torch.UntypedStorage:
        """As HostMemory's, from a slab that has room, or else a new one."""
        size = -(-max(sum(parts), 1) // _PAGE_BYTES) * _PAGE_BYTES
        place = next((index for index, (_, slab) in enumerate(self._slabs) if slab.nbytes - self._used[index] >= size), None)
        if place is None:
            place = self._grow(max(size, _LEAST_BYTES))
        mapped, _ = self._slabs[place]
        pool = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=self._used[place])
        self._used[place] += size
        pool.fill_(0)
        progress(sum(parts))
        return pool.untyped_storage()

    def _grow(self, size: int) -> int:
        """A new slab; its pages are touched by all threads that PyTorch has."""
        mapped = map_pages(size)
        slab = torch.frombuffer(mapped, dtype=torch.uint8)
        self._prepare(slab)
        self._slabs.append((mapped, slab))
        self._used.append(0)
        return len(self._slabs) - 1

    def close(self) -> None:
        """The executor's share is free for the next one; registered it stays."""
        self._used = [0] * len(self._slabs)

    def free(self) -> None:
        """Unregisters everything."""
        super().close()
        self._slabs, self._used = [], []
