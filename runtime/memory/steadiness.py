"""Steadiness: checks that a steady step takes no new memory: no device memory from the driver, no retry after a failed allocation, no registration of host memory.

Taking device memory waits for the whole device, and registering a few GiB of host memory takes a second. Either would be measured as an op's own time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.warm_up import WARM_UP_STEPS

_log = logging.getLogger(__name__)

_SETTLING_STEPS = 8
"""Steady steps of a run that may take device memory. Which free block PyTorch's allocator picks depends on the order in which lanes allocate, so a plan that
fills the device may need a few more steps until every order fits: on an H200 a plan of 133 GiB took memory in four steady steps. A leak takes memory in every
step and soon exceeds this number.
"""


class Taken(NamedTuple):
    """What this process has taken since it began."""

    device_bytes: int
    """bytes that PyTorch's allocator reserved. Counted in bytes because the number of calls depends on the allocator: to reserve 256 MiB is one cudaMalloc,
    and three or four mappings with expandable segments"""
    retries: int
    """allocations that succeeded only after the allocator freed its cache"""
    registrations: int
    """registrations of host memory"""


class Steadiness:
    """Watches the steps of one executor."""

    def __init__(self, device: torch.device, host_memory: HostMemory) -> None:
        self._device, self._host_memory = device, host_memory
        self._alike = 0
        self._settling = 0
        self._freed = 0

    def _counts(self) -> tuple[Taken, int]:
        """What was taken so far, and the bytes that PyTorch's allocator has given back to the device. Reads the nested statistics because the flat
        `memory_stats` takes ten times as long.
        """
        stats = torch.cuda.memory_stats_as_nested_dict(self._device) if self._device.type == "cuda" else {}
        reserved = stats["reserved_bytes"]["all"] if stats else {"allocated": 0, "freed": 0}
        return Taken(reserved["allocated"], stats.get("num_alloc_retries", 0), self._host_memory.registrations), reserved["freed"]

    @contextmanager
    def step(self, *, alike: bool) -> Iterator[None]:
        """Surrounds one step. `alike`: its tensors have the shapes of every other step's.

        A steady step that takes device memory is logged. Raises AssertionError where more than `_SETTLING_STEPS` of them do, and where a steady step
        retries an allocation or registers host memory. If memory was freed since the last step, for example by an evaluation that filled the device,
        the next steps count as warm-up.
        """
        before, freed = self._counts()
        if freed != self._freed:
            self._alike = self._settling = 0
        steady = alike and self._alike >= WARM_UP_STEPS
        self._alike += alike
        try:
            yield
        except BaseException:
            self._alike = self._settling = 0
            raise
        after, self._freed = self._counts()
        if not steady or after == before:
            return
        grown = after.device_bytes - before.device_bytes
        if grown:
            self._settling += 1
            _log.warning("a steady step took %s bytes of device memory; so far %s of this run's steps did", f"{grown:,}", self._settling)
        if after[1:] != before[1:] or self._settling > _SETTLING_STEPS:
            self._alike = self._settling = 0
            raise AssertionError(f"a steady step allocated: {before} before it, {after} after it")
