"""Arenas: every pool of a schedule as one allocation of exactly the size the plan says, made once; buffers are named stretches of it.

Host arenas are page-aligned and, with CUDA, registered (`host_memory.py`). Without CUDA a device arena is ordinary memory: a pool with a cap.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.simulator.errors import UserError
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.units import format_bytes

TORCH_DTYPE = {"bf16": torch.bfloat16, "fp32": torch.float32, "int16": torch.int16, "int64": torch.int64}
OnAllocate = Callable[[int, int], None]
"""hears of bytes ready so far, and of all there will be"""


class Arenas:
    """The memory of one schedule."""

    def __init__(
        self, schedule: Schedule, device: torch.device, *, device_limit_bytes: int, host_limit_bytes: int, on_allocate: OnAllocate = lambda *_: None,
        host_memory: HostMemory | None = None,
    ) -> None:  # fmt: skip
        """Every page is touched, and registered, before it returns: 1 TB takes minutes, of which `on_allocate` tells. `host_memory`: where the host's
        pools come from, instead of memory of their own.

        Raises UserError where the pools exceed a limit, before anything is allocated, or where the machine has not that much.
        """
        self.device = device
        pools: dict[str, list[Buffer]] = {}
        for buffer in schedule.buffers:
            if not buffer.dynamic:
                pools.setdefault(buffer.pool, []).append(buffer)
        self.pool_bytes = {pool: sum(buffer.allocated for buffer in buffers) for pool, buffers in pools.items()}
        for place, limit in (("device", device_limit_bytes), ("host", host_limit_bytes)):
            self._refuse(place, limit)
        self.host_memory = host_memory or HostMemory(registered=device.type == "cuda")
        self._place: dict[str, tuple[torch.UntypedStorage, int, int]] = {}
        self._progress = _Progress(sum(self.pool_bytes.values()), on_allocate)
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
        """Bytes allocated on `device` or `host`."""
        return sum(size for pool, size in self.pool_bytes.items() if pool.startswith(f"{place}."))

    def _refuse(self, place: str, limit: int) -> None:
        needed = self.total(place)
        if needed > limit:
            largest = max((pool for pool in self.pool_bytes if pool.startswith(place)), key=self.pool_bytes.__getitem__)
            raise UserError(
                f"{place} memory", found=f"pools of {format_bytes(needed)}, of which {largest} {format_bytes(self.pool_bytes[largest])}",
                allowed=format_bytes(limit), fix=f"raise the limit by {format_bytes(needed - limit)}, or make a plan for this limit with `megatrain plan`",
            )  # fmt: skip

    def _take(self, pool: str, parts: list[int]) -> torch.UntypedStorage:
        try:
            return self._allocate(pool, parts)
        except (RuntimeError, OSError, ValueError) as error:
            reason = str(error).splitlines()[0]
        fix = "close what else uses the memory, or plan with a lower limit"
        raise UserError(f"pool {pool}", found=f"no room for {format_bytes(self.pool_bytes[pool])} ({reason})", allowed="free memory", fix=fix)

    def _allocate(self, pool: str, parts: list[int]) -> torch.UntypedStorage:
        """Zeros for buffers of `parts` bytes."""
        if pool.startswith("device.") and self.device.type == "cuda":
            storage = torch.zeros(sum(parts), dtype=torch.uint8, device=self.device).untyped_storage()
            self._progress.add(sum(parts))
            return storage
        return self.host_memory.allocate(parts, self._progress.add)

    def tensor(self, buffer: str, dtype: torch.dtype, shape: tuple[int, ...], byte_offset: int = 0) -> torch.Tensor:
        """`shape` elements of `dtype` in `buffer`, from `byte_offset` on.

        Not a view of the arena: a tensor of its own on the same memory, so that autograd does not take a write into one slot for a
        change of a tensor that it saved in another.
        """
        elements = torch.Size(shape).numel()
        size = self._place[buffer][2]
        assert byte_offset + elements * dtype.itemsize <= size, f"{buffer}: {shape} of {dtype} at {byte_offset} exceeds {size} bytes"
        return self.strided(buffer, dtype, shape, torch.empty(shape, device="meta").stride(), byte_offset)

    def strided(self, buffer: str, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], byte_offset: int) -> torch.Tensor:
        """`tensor` with strides, in elements."""
        storage, start, _ = self._place[buffer]
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage, (start + byte_offset) // dtype.itemsize, torch.Size(shape), stride)

    def flat(self, buffer: str, dtype: torch.dtype, elements: int, byte_offset: int = 0) -> torch.Tensor:
        """`elements` of `buffer` as a vector."""
        return self.tensor(buffer, dtype, (elements,), byte_offset)

    def start_of(self, buffer: str) -> tuple[int, int]:
        """(address of the pool's storage, first byte of the buffer in it)."""
        storage, start, _ = self._place[buffer]
        return storage.data_ptr(), start

    def close(self) -> None:
        """Unregisters and frees everything."""
        self.host_memory.close()
        self._place = {}


class _Progress:
    """Adds up what is ready."""

    def __init__(self, total: int, tell: OnAllocate) -> None:
        self._done, self._total, self._tell = 0, total, tell

    def add(self, size: int) -> None:
        self._done += size
        self._tell(self._done, self._total)
