"""Host memory of a run: anonymous, exactly sized, its pages touched and, for a GPU, registered (`cudaHostRegister`) before the first step.

PyTorch's caching host allocator rounds each block up to a power of two, which would double a 14B layer; so it is not used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

PIECE_BYTES = 2**28
"""touched and registered at once, at least: small enough for a bar to move, large enough that the calls cost nothing"""
_THREADS = 16


def map_pages(size: int) -> mmap.mmap:
    """`size` bytes of zeros, on huge pages where the system has them. Not for a process that forks meanwhile: the other one has no part in it, and would
    unmap the addresses. Raises OSError or ValueError.
    """
    mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # what is shared, Python's default, gets 4 KiB pages only, whatever is advised
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # the optimizer walks seven streams at once; and a fork would copy what is registered
        with contextlib.suppress(AttributeError, OSError):  # not on every system, nor in every kernel
            mapped.madvise(getattr(mmap, advice))
    return mapped


class HostMemory:
    """Allocates; knows what is registered, and unregisters it."""

    def __init__(self, registered: bool) -> None:
        """`registered`: for asynchronous copies to and from a GPU."""
        self._registers = registered
        self._registered: list[torch.Tensor] = []
        self.registrations = 0
        """calls so far"""

    @property
    def registered_bytes(self) -> int:
        """Registered now."""
        return sum(piece.nbytes for piece in self._registered)

    def allocate(self, parts: Sequence[int], progress: Callable[[int], None]) -> torch.UntypedStorage:
        """Zeros for buffers of `parts` bytes, whole pages each, one after the other; `progress` hears of the bytes of each piece as it is ready.

        A copy may not cross the seam between two registrations, so seams lie between buffers. Raises OSError or ValueError where there is no such
        address space, RuntimeError where registering fails; what had been registered until then is for `close`.
        """
        pages = torch.frombuffer(map_pages(max(sum(parts), 1)), dtype=torch.uint8)
        pieces = [pages[start:end] for start, end in _pieces(parts)]
        threads = min(_THREADS, len(os.sched_getaffinity(0)), max(len(pieces), 1))
        pool = ThreadPoolExecutor(threads, thread_name_prefix="touch", initializer=torch.set_num_threads, initargs=(1,))
        try:
            for piece in pool.map(self._prepare, pieces):
                progress(piece.nbytes)
        finally:
            pool.shutdown(cancel_futures=True)  # and wait: what a thread still registers must be known to `close`
        return pages.untyped_storage()

    def _prepare(self, piece: torch.Tensor) -> torch.Tensor:
        piece.fill_(0)  # first touch: outside any timed step
        self.register(piece)
        return piece

    def register(self, piece: torch.Tensor) -> None:
        """For a GPU; without one nothing. Raises RuntimeError where that fails."""
        if self._registers:
            self.registrations += 1
            status = int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.nbytes, 0))
            if status:  # CUDA also keeps it for this thread, which ends
                raise RuntimeError(f"cudaHostRegister failed with status {status}")
            self._registered.append(piece)

    def close(self) -> None:
        """Unregisters everything; the memory goes with its last tensor."""
        while self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered.pop().data_ptr())


def _pieces(parts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(first byte, one past the last) of runs of whole parts, each but the last of at least `PIECE_BYTES`."""
    start = end = 0
    for part in parts:
        end += part
        if end - start >= PIECE_BYTES:
            yield start, end
            start = end
    if end > start:
        yield start, end
