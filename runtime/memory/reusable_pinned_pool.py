"""Host memory that several executors use one after the other.

It is touched and registered once. Calibration runs many plans in one process, and would otherwise
wait longer for memory than for steps: on an H200's host, each time takes 2.5 s or more
(`docs/lab_notes.md`). An executor that closes returns its memory to the pool. `free` returns all
memory to the system.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence

import torch

from megatrain.runtime.memory.host_memory import HostMemory, map_pages

_LEAST_BYTES = 2**28  # of a region, so that small pools share one
_PAGE_BYTES = 4096


class ReusablePinnedPool(HostMemory):
    """Memory in a few regions. Each region is registered in one call, so that a schedule's pool may
    start anywhere in it. Regions are filled from the front, and are empty again after `close`.
    """

    def __init__(self, registered: bool) -> None:
        super().__init__(registered)
        self._regions: list[tuple[mmap.mmap, torch.Tensor]] = []
        self._used: list[int] = []
        """Used bytes of each region."""

    def reserve(self, size: int) -> None:
        """Makes sure that there is a region of at least `size` bytes."""
        if not any(region.nbytes >= size for _, region in self._regions):
            self._grow(size)

    def allocate(
        self, parts: Sequence[int], progress: Callable[[int], None]
    ) -> torch.UntypedStorage:
        """As `HostMemory.allocate`, from a region with enough free memory, or else a new region."""
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
        """Adds a region of `size` bytes and returns its index. All of PyTorch's threads touch its
        pages.
        """
        mapped = map_pages(size)
        region = torch.frombuffer(mapped, dtype=torch.uint8)
        self._prepare(region)
        self._regions.append((mapped, region))
        self._used.append(0)
        return len(self._regions) - 1

    def close(self) -> None:
        """Makes all memory free for the next executor. It stays registered."""
        self._used = [0] * len(self._regions)

    def free(self) -> None:
        """Unregisters and drops all regions."""
        super().close()
        self._regions, self._used = [], []
