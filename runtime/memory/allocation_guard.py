"""Checks that steps after the warm-up allocate no memory.

Such a step must not take device memory from the driver, retry a failed allocation, or register
(pin) host memory. Taking device memory synchronizes the whole device, and registering a few GiB of
host memory takes a second. Both would be measured as time of an op.
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
"""Number of steps after the warm-up that may take device memory. PyTorch's allocator picks a free
block depending on the order in which lanes allocate, so a plan that fills the device may need a few
more steps until every order fits. On an H200, a plan of 133 GiB needed four. A leak takes memory in
every step and soon exceeds this number.
"""


class Taken(NamedTuple):
    """The memory that this process has taken since it started."""

    device_bytes: int
    """Bytes that PyTorch's allocator has reserved. The number of calls is not used, because it
    depends on the allocator: 256 MiB take one cudaMalloc, but three or four mappings with
    expandable segments."""
    retries: int
    """Number of allocations that succeeded only after the allocator freed its cache."""
    registrations: int
    """Number of registrations of host memory."""


class AllocationGuard:
    """Watches the steps of one executor."""

    def __init__(
        self, device: torch.device, host_memory: HostMemory, *, raises: bool = True
    ) -> None:
        """`raises` says whether a finding is an error, as in tests and calibrations. Otherwise it
        is only reported in `finding`, because it makes steps slower and not wrong.
        """
        self._device, self._host_memory, self._raises = device, host_memory, raises
        self.finding = ""
        """What the last step did wrong, in words for the user, or empty. There is at most one
        finding. Later steps are not checked."""
        self._found = False
        self._usual_steps = 0
        """Number of steps with the usual shapes since a step failed or memory was freed."""
        self._settling = 0
        """Number of steps after the warm-up that took device memory."""
        self._freed = 0

    def _counts(self) -> tuple[Taken, int]:
        """Returns the memory taken so far, and the bytes that PyTorch's allocator has given back to
        the device.
        """
        # `memory_stats`, which flattens the statistics, takes ten times as long
        stats = (
            torch.cuda.memory_stats_as_nested_dict(self._device)
            if self._device.type == "cuda"
            else {}
        )
        reserved = stats["reserved_bytes"]["all"] if stats else {"allocated": 0, "freed": 0}
        return (
            Taken(
                reserved["allocated"],
                stats.get("num_alloc_retries", 0),
                self._host_memory.registrations,
            ),
            reserved["freed"],
        )

    @contextmanager
    def step(self, *, same_shapes: bool) -> Iterator[None]:
        """Watches one step, which runs in the block. It is checked only with `same_shapes`: its
        tensors have the same shapes as in other steps. Rows of several documents have shapes that
        differ between steps.

        A step after the warm-up that takes device memory is logged. If memory was freed since the
        last step, for example by an evaluation that filled the device, the next steps count as
        warm-up.

        It is a finding if more than `_SETTLING_STEPS` steps after the warm-up take device memory,
        or if one of them retries an allocation or registers host memory. Raises AssertionError for
        a finding if the guard `raises`, and otherwise sets `finding`.
        """
        self.finding = ""
        if self._found:
            yield
            return
        before, freed = self._counts()
        if freed != self._freed:
            self._usual_steps = self._settling = 0
        steady = same_shapes and self._usual_steps >= WARM_UP_STEPS
        self._usual_steps += same_shapes
        try:
            yield
        except BaseException:
            self._usual_steps = self._settling = 0
            raise
        after, self._freed = self._counts()
        if not steady or after == before:
            return
        grown = after.device_bytes - before.device_bytes
        if grown:
            self._settling += 1
            _log.warning(
                "a step after the warm-up took %s bytes of device memory; %s of this run's steps"
                " have done so",
                f"{grown:,}",
                self._settling,
            )
        if after[1:] != before[1:] or self._settling > _SETTLING_STEPS:
            self._usual_steps = self._settling = 0
            if self._raises:
                raise AssertionError(
                    f"a step after the warm-up allocated memory: {before} before it, {after} after"
                    " it"
                )
            self._found = True
            self.finding = (
                f"a step after the warm-up took memory: {grown:,} bytes of the device,"
                f" {after.retries - before.retries} retries of allocations and"
                f" {after.registrations - before.registrations} registrations of host memory;"
                " such steps are slower than predicted, and their results are the same; close"
                " other programs that use the device, or plan again with a lower --device-memory"
            )
