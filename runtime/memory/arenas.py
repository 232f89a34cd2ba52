"""Arenas: the memory of a schedule's buffers.

Each pool of the schedule is allocated once, with exactly the planned size. A buffer is a named
range of its pool. Host pools are page-aligned and, with CUDA, pinned (`host_memory.py`). Without
CUDA, device pools are in ordinary host memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.simulator.base.errors import DoesNotFit, RunError
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.schedule.buffer import WIDTH

TORCH_DTYPE = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "int16": torch.int16,
    "int8": torch.int8,
    "block8": torch.uint8,
    "int64": torch.int64,
}
"""PyTorch's dtype for each dtype of a schedule. Records of `block8` are tensors of bytes."""
OnAllocate = Callable[[int, int], None]
"""Called with the bytes allocated so far and the bytes of all pools."""


def length_of(dtype: str, elements: int) -> int:
    """Returns the length of a `TORCH_DTYPE[dtype]` tensor that stores `elements` in `dtype`."""
    return int(elements * WIDTH[dtype]) // TORCH_DTYPE[dtype].itemsize


class Arenas:
    """The memory of one schedule."""

    def __init__(
        self,
        schedule: Schedule,
        device: torch.device,
        *,
        device_limit_bytes: int,
        host_limit_bytes: int,
        on_allocate: OnAllocate = lambda *_: None,
        host_memory: HostMemory | None = None,
    ) -> None:
        """Allocates all pools. Every page is touched and registered, which takes minutes for 1 TB.

        Args:
            schedule: The schedule whose buffers are allocated, except dynamic buffers.
            device: The device of the device pools.
            device_limit_bytes: Maximum size of all device pools together.
            host_limit_bytes: Maximum size of all host pools together.
            on_allocate: Called after each allocation, to report progress.
            host_memory: The allocator of the host pools. By default they have an allocator of their
                own.

        Raises:
            DoesNotFit: The pools exceed a limit, in which case nothing is allocated, or the machine
                has too little free memory.
        """
        self.device = device
        pools: dict[str, list[Buffer]] = {}
        for buffer in schedule.buffers:
            if not buffer.dynamic:
                pools.setdefault(buffer.pool, []).append(buffer)
        self.pool_bytes = {
            pool: sum(buffer.allocated for buffer in buffers) for pool, buffers in pools.items()
        }
        """Allocated bytes of each pool."""
        for place, limit in (("device", device_limit_bytes), ("host", host_limit_bytes)):
            self._refuse(place, limit)
        self.host_memory = host_memory or HostMemory(registered=device.type == "cuda")
        self._place: dict[str, tuple[torch.UntypedStorage, int, int]] = {}
        self._allocated, self._on_allocate = 0, on_allocate
        try:
            for pool, buffers in pools.items():
                storage = self._take(pool, [buffer.allocated for buffer in buffers])
                offset = 0
                for buffer in buffers:
                    self._place[buffer.id] = (storage, offset, buffer.bytes)
                    offset += buffer.allocated
        except BaseException:
            self.close()
            raise

    def total(self, place: str) -> int:
        """Returns the bytes allocated in `place`, which is `device` or `host`."""
        return sum(size for pool, size in self.pool_bytes.items() if pool.startswith(f"{place}."))

    def _refuse(self, place: str, limit: int) -> None:
        """Raises DoesNotFit if the pools in `place` are larger than `limit` bytes together."""
        needed = self.total(place)
        if needed > limit:
            largest = max(
                (pool for pool in self.pool_bytes if pool.startswith(place)),
                key=self.pool_bytes.__getitem__,
            )
            raise DoesNotFit(
                f"{place} memory",
                found=(
                    f"pools of {format_bytes(needed)}, the largest {largest}"
                    f" {format_bytes(self.pool_bytes[largest])}"
                ),
                allowed=format_bytes(limit),
                fix=(
                    f"raise the limit by {format_bytes(needed - limit)}, or make a plan for this"
                    " limit with `megatrain plan`"
                ),
            )

    def _take(self, pool: str, parts: list[int]) -> torch.UntypedStorage:
        """Calls `_allocate`. Raises DoesNotFit if there is too little memory."""
        try:
            return self._allocate(pool, parts)
        except RunError:  # of `on_allocate`
            raise
        except (RuntimeError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
        raise DoesNotFit(
            f"pool {pool}",
            found=f"no room for {format_bytes(self.pool_bytes[pool])} ({reason})",
            allowed="free memory",
            fix="close other programs, or plan with a lower limit",
        )

    def _allocate(self, pool: str, parts: list[int]) -> torch.UntypedStorage:
        """Returns zeroed memory for adjacent buffers of `parts` bytes each."""
        if pool.startswith("device.") and self.device.type == "cuda":
            zeros = torch.zeros(sum(parts), dtype=torch.uint8, device=self.device)
            self._report(sum(parts))
            return zeros.untyped_storage()
        return self.host_memory.allocate(parts, self._report)

    def _report(self, size: int) -> None:
        """Reports that `size` more bytes are allocated."""
        self._allocated += size
        self._on_allocate(self._allocated, sum(self.pool_bytes.values()))

    def tensor(
        self, buffer: str, dtype: torch.dtype, shape: tuple[int, ...], byte_offset: int = 0
    ) -> torch.Tensor:
        """Returns a contiguous tensor of `shape` and `dtype` in `buffer`, which begins at
        `byte_offset`.

        The tensor shares the memory of the pool, but it is not a view of a tensor on the pool. With
        views, autograd would treat a write to one buffer as a change of all tensors that it has
        saved in other buffers.
        """
        elements = torch.Size(shape).numel()
        size = self._place[buffer][2]
        assert byte_offset + elements * dtype.itemsize <= size, (
            f"{buffer}: {shape} of {dtype} at {byte_offset} exceeds {size} bytes"
        )
        return self.strided(
            buffer, dtype, shape, torch.empty(shape, device="meta").stride(), byte_offset
        )

    def strided(
        self,
        buffer: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        byte_offset: int,
    ) -> torch.Tensor:
        """Returns a tensor as `tensor` does, with the given strides in elements."""
        storage, start, _ = self._place[buffer]
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(
            storage, (start + byte_offset) // dtype.itemsize, torch.Size(shape), stride
        )

    def flat(
        self, buffer: str, dtype: torch.dtype, elements: int, byte_offset: int = 0
    ) -> torch.Tensor:
        """Returns the `elements` of `buffer` from `byte_offset` on, as a vector of `dtype`."""
        return self.tensor(buffer, dtype, (elements,), byte_offset)

    def start_of(self, buffer: str) -> tuple[int, int]:
        """Returns the address of the buffer's pool and the buffer's byte offset in the pool."""
        storage, start, _ = self._place[buffer]
        return storage.data_ptr(), start

    def close(self) -> None:
        """Unregisters and frees all pools."""
        self.host_memory.close()
        self._place = {}
