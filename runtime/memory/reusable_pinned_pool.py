"""Host memory that several executors use one after the other.

The memory is touched and registered once. Calibration runs many plans in one process. Without this
pool it would wait longer for memory than for steps, because touching and registering takes 2.5 s or
more on the host of an H200 (`docs/lab_notes.md`). An executor that closes returns its memory to the
pool. `free` returns all memory to the system.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from megatrain.runtime.memory.host_memory import HostMemory, map_pages

_LEAST_BYTES = 2**28
"""Minimum size of a region, so small pools share a region."""
_PAGE_BYTES = 4096


class ReusablePinnedPool(HostMemory):
    """Allocates host memory from a few regions. Each region is registered in one call, so a pool of
    a schedule may start anywhere in a region. Regions are filled from the front, and are empty
    again after `close`.
    """

    def __init__(self, registered: bool) -> None:
        super().__init__(registered)
        self._regions: list[tuple[mmap.mmap, torch.Tensor]] = []
        self._used: list[int] = []
        """Number of used bytes in each region."""

    def reserve(self, size: int) -> None:
        """Makes sure that there is a region of at least `size` bytes."""
        if not any(region.nbytes >= size for _, region in self._regions):
            self._grow(size)

    def allocate(
        self, parts: Sequence[int], progress: Callable[[int], None]
    ) -> torch.UntypedStorage:
        """Allocates as in `HostMemory`, from a region with enough free memory or a new region."""
        size = -(-max(sum(parts), 1) // _PAGE_BYTES) * _PAGE_BYTES
        place = next(
            (
                index
                for index, (_, region) in enumerate(self._regions)
                if region.nbytes - self._used[index] >= size
            ),
            None,
        )
        if place is None:
            place = self._grow(max(size, _LEAST_BYTES))
        mapped, _ = self._regions[place]
        pool = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=self._used[place])
        self._used[place] += size
        pool.fill_(0)
        progress(sum(parts))
        return pool.untyped_storage()

    def _grow(self, size: int) -> int:
        """Adds a region of `size` bytes, which PyTorch's threads touch, and returns its index."""
        mapped = map_pages(size)
        region = torch.frombuffer(mapped, dtype=torch.uint8)
        self._prepare(region)
        self._regions.append((mapped, region))
        self._used.append(0)
        return len(self._regions) - 1

    def close(self) -> None:
        """Makes all memory free for the next executor. The memory stays registered."""
        self._used = [0] * len(self._regions)

    def free(self) -> None:
        """Unregisters and drops all regions."""
        super().close()
        self._regions, self._used = [], []
