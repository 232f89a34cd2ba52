"""Steadiness: a step like those before it takes no memory anew. No cudaMalloc, no retry after one that failed, no registration of host memory.

A cudaMalloc waits for the whole device, and a registration takes a second for a few GiB: either would stand in a timeline as an op's own time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.warm_up import WARM_UP_STEPS

_SETTLING = 8
"""times that PyTorch's allocator may still take device memory afterwards: which of its free pieces fit may hang on the order in which lanes use them. On an H200
a plan of 133 GiB did in four of its steady steps; what allocates again and again is past this soon
"""


class Taken(NamedTuple):
    """Since the process began."""

    device_allocations: int
    """cudaMalloc"""
    retries: int
    """of those, after freeing what PyTorch kept"""
    registrations: int


class Steadiness:
    """Watches steps, one after the other."""

    def __init__(self, device: torch.device, host_memory: HostMemory) -> None:
        self._device, self._host_memory = device, host_memory
        self._alike = 0
        self._late = 0
        self._freed = 0

    def _counts(self) -> tuple[Taken, int]:
        """And how often PyTorch gave memory back to the device (cudaFree). The whole of `memory_stats` would take ten times as long."""
        stats = torch.cuda.memory_stats_as_nested_dict(self._device) if self._device.type == "cuda" else {}
        taken = Taken(stats.get("num_device_alloc", 0), stats.get("num_alloc_retries", 0), self._host_memory.registrations)
        return taken, stats.get("num_device_free", 0)

    @contextmanager
    def step(self, *, alike: bool) -> Iterator[None]:
        """`alike`: its tensors have the shapes of every other step's. Raises AssertionError where it is a steady one, and took memory; of the
        device beyond what settling takes.

        Where memory was freed since the last step (an evaluation that filled the device, say), the next steps may take it again.
        """
        before, freed = self._counts()
        if freed != self._freed:
            self._alike = self._late = 0
        steady = alike and self._alike >= WARM_UP_STEPS
        self._alike += alike
        try:
            yield
        except BaseException:
            self._alike = self._late = 0
            raise
        after, self._freed = self._counts()
        if steady:
            self._late += after.device_allocations - before.device_allocations
        if steady and (after[1:] != before[1:] or self._late > _SETTLING):
            self._alike = self._late = 0
            raise AssertionError(f"a steady step allocated: {before} before it, {after} after it")
