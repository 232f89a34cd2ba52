"""Host memory of a run: anonymous pages of exactly the size that is needed.

All pages are touched and, for a GPU, registered (pinned with `cudaHostRegister`) before the first
step. PyTorch's caching host allocator is not used, because it rounds each block up to a power of
two, which would double the size of a layer of a 14B model.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from megatrain.runtime.host import cores

PIECE_BYTES = 2**28
"""Minimum number of bytes that are touched and registered in one call. It is small enough for a
progress bar to move, and large enough to make the cost of a call negligible."""
_THREADS = 16


def map_pages(size: int) -> mmap.mmap:
    """Maps `size` bytes of zeros, on huge pages if the system has them.

    The process must not fork while the memory is in use, because a forked process does not have the
    memory but would unmap its addresses. Raises OSError or ValueError if there is no address space.
    """
    # The mapping is private, because shared memory (Python's default) always has pages of 4 KiB.
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Huge pages need fewer TLB entries. The optimizer reads and writes seven arrays at once, which
    # would need many. The memory is left out of forked processes, because a fork would copy
    # registered pages.
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # Not every system and kernel has both kinds of advice.
        with contextlib.suppress(AttributeError, OSError):
            mapped.madvise(getattr(mmap, advice))
    return mapped


class HostMemory:
    """Allocates host memory, registers it, and unregisters it when it is closed."""

    def __init__(self, registered: bool) -> None:
        """With `registered`, memory is registered with CUDA, which asynchronous copies to and from
        a GPU require. The GPU is the current one of the calling thread.
        """
        self._registers = registered
        self._device = torch.cuda.current_device() if registered else None
        self._registered: list[torch.Tensor] = []
        self.registrations = 0
        """Number of registrations so far."""

    def allocate(
        self, parts: Sequence[int], progress: Callable[[int], None]
    ) -> torch.UntypedStorage:
        """Returns zeroed memory for adjacent buffers of `parts` bytes each. Every size must be a
        multiple of the page size. `progress` is called with the bytes of each piece of memory that
        is ready.

        Each registration covers whole buffers, because a copy must not cross the border between two
        registrations.

        Raises OSError or ValueError if there is no address space, and RuntimeError if a
        registration fails. Pieces that were registered before the error stay registered until
        `close`.
        """
        pages = torch.frombuffer(map_pages(max(sum(parts), 1)), dtype=torch.uint8)
        pieces = [pages[start:end] for start, end in _pieces(parts)]
        threads = min(_THREADS, cores(), max(len(pieces), 1))
        pool = ThreadPoolExecutor(
            threads, thread_name_prefix="touch", initializer=_begin_thread, initargs=(self._device,)
        )
        try:
            for piece in pool.map(self._prepare, pieces):
                progress(piece.nbytes)
        finally:
            # waits for running threads, so `close` knows all pieces that they register
            pool.shutdown(cancel_futures=True)
        return pages.untyped_storage()

    def _prepare(self, piece: torch.Tensor) -> torch.Tensor:
        piece.fill_(0)  # the first touch takes time, which must not be in a step
        self.register(piece)
        return piece

    def register(self, piece: torch.Tensor) -> None:
        """Registers `piece` with CUDA if this object was created with `registered`. Raises
        RuntimeError if the registration fails.
        """
        if self._registers:
            self.registrations += 1
            status = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))
            if status:  # CUDA also stores the error for this thread, which ends
                raise RuntimeError(f"cudaHostRegister failed with status {status}")
            self._registered.append(piece)

    def close(self) -> None:
        """Unregisters all memory. The memory itself is freed with the last tensor that uses it."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop().data_ptr())


def _begin_thread(device: int | None) -> None:
    """Prepares a thread that touches and registers memory for the GPU `device`, if it is given. A
    new thread has GPU 0, and a registration would make a CUDA context there, of 0.5 GiB.
    """
    torch.set_num_threads(1)
    if device is not None:
        torch.cuda.set_device(device)


def _pieces(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Groups adjacent parts, and yields the start and end of each group in bytes. Each group except
    the last has at least `PIECE_BYTES`.
    """
    start = end = 0
    for part in parts:
        end += part
        if end - start >= PIECE_BYTES:
            yield start, end
            start = end
    if end > start:
        yield start, end
