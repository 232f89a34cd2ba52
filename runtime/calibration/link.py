"""Measures copies between host and device, and how much these copies and the CPU slow each other,
at several moments of a calibration.

On a shared host, the link and the host's DRAM are slower for some time, and then fast again
(`docs/lab_notes.md`). A measurement at one moment may therefore be wrong for most steps. The result
is the median of all moments.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from typing import NamedTuple

import torch

from megatrain.runtime.calibration.contention import (
    COPIES,
    Shares,
    copy_buffers,
    copy_work,
    measure_shares,
    run_together,
)
from megatrain.runtime.calibration.timing import Work, spread
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.memory.host_memory import HostMemory

COPY_SIZES = tuple(2**power for power in range(16, 29, 2))
"""The sizes of copies in bytes: 64 KiB to 256 MiB."""
_LEAST_DUPLEX = 2**20
"""The least bytes of a copy in both directions. Enqueueing a smaller copy takes as long as the
copy."""
_DUPLEX_UNIT = 2**26
"""Bytes of the copies that are enqueued at once."""
_UNLIMITED = 2**62
"""A memory limit in bytes that has no effect."""


class LinkRates(NamedTuple):
    """What was measured at all moments."""

    copies: dict[str, list[tuple[int, int]]]
    """Points (bytes, ns) of copies, for `load_weights` and `save_gradients`."""
    duplex: list[tuple[int, int]]
    """Points (bytes, ns) of copies while equal copies run in the other direction. Empty without a
    GPU."""
    shares: list[Shares]
    """For each moment, the shares of their speed that lanes which use the host's DRAM keep while
    others of them are busy."""
    spread: dict[str, float]
    """Interquartile range divided by the median. Keys are `KIND BYTES` for a copy alone and
    `duplex_curve BYTES` for one in both directions."""


class LinkBench:
    """Measures the link at each call of `measure`."""

    def __init__(
        self, device: torch.device, threads: dict[str, int], host_update: Work, memory: HostMemory
    ) -> None:
        """Creates a bench without measurements.

        Args:
            device: The device to copy from and to.
            threads: Lane -> the number of threads that its ops may use.
            host_update: The work of the cpu lane while other lanes are busy.
            memory: Provides the host memory. Nothing else may use it during a measurement.
        """
        self._device, self._threads = device, threads
        self._host_update, self._memory = host_update, memory
        self._copies: dict[tuple[str, int], list[int]] = defaultdict(list)
        self._duplex: dict[int, list[tuple[float, ...]]] = defaultdict(list)
        self._shares: list[Shares] = []

    def measure(self) -> None:
        """Measures everything once, which takes about 7 s on a GPU. All memory is freed at the
        end.
        """
        cuda, largest = self._device.type == "cuda", largest_copy(self._device)
        arenas = Arenas(
            copy_buffers(largest),
            self._device,
            device_limit_bytes=_UNLIMITED,
            host_limit_bytes=_UNLIMITED,
            host_memory=self._memory,
        )
        own_threads = torch.get_num_threads()
        try:
            for name in itertools.chain(*COPIES.values()):
                arenas.flat(name, torch.uint8, largest).fill_(7)
            torch.set_num_threads(1)
            sizes = [size for size in COPY_SIZES if size <= largest]
            for kind, size in itertools.product(COPIES, sizes):
                self._copies[kind, size] += _time_copies(
                    arenas, *COPIES[kind], size, largest, self._device
                )
            for size in sizes:
                if cuda and size >= _LEAST_DUPLEX:
                    self._duplex[size].append(
                        _time_duplex(arenas, size, largest, self._threads, self._device)
                    )
            work = copy_work(arenas, largest) | {"cpu": self._host_update}
            combinations = [*itertools.combinations(work, 2), *([tuple(work)] if cuda else [])]
            self._shares.append(measure_shares(work, combinations, self._threads, self._device))
        finally:
            torch.set_num_threads(own_threads)
            arenas.close()

    def rates(self) -> LinkRates:
        """Returns the medians of all measurements, of which there must be at least one."""
        copies: dict[str, list[tuple[int, int]]] = {}
        for (kind, size), durations in self._copies.items():
            copies.setdefault(kind, []).append((size, round(statistics.median(durations))))
        moments = {
            size: [duration for duration, *_ in measured] for size, measured in self._duplex.items()
        }
        spreads = {f"{kind} {size}": spread(found) for (kind, size), found in self._copies.items()}
        spreads |= {
            f"duplex_curve {size}": spread([part for _, *parts in measured for part in parts])
            for size, measured in self._duplex.items()
        }
        return LinkRates(
            copies,
            [(size, round(statistics.median(found))) for size, found in moments.items()],
            self._shares,
            spreads,
        )


def largest_copy(device: torch.device) -> int:
    """Returns the bytes of the largest copy that is measured."""
    return COPY_SIZES[-1] if device.type == "cuda" else COPY_SIZES[-2]


def _time_copies(
    arenas: Arenas, source: str, target: str, size: int, largest: int, device: torch.device
) -> list[int]:
    """Returns the times in ns of ten copies of `size` bytes, after two others.

    As in a step, each copy is at another place in both buffers, so small copies do not come from a
    cache.
    """
    pairs = _pairs(arenas, source, target, size, largest)
    times = []
    for turn in range(12):
        read, write = pairs[(turn * 7) % len(pairs)]
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            write.copy_(read, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(round(start.elapsed_time(end) * 1e6))
        else:
            begin = time.perf_counter_ns()
            write.copy_(read)
            times.append(time.perf_counter_ns() - begin)
    return times[2:]


def _pairs(
    arenas: Arenas, source: str, target: str, size: int, largest: int
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns pairs of tensors of `size` bytes to copy from and to, at all places in the
    buffers.
    """
    places = range(0, largest - size + 1, size)
    return [
        (
            arenas.flat(source, torch.uint8, size, place),
            arenas.flat(target, torch.uint8, size, place),
        )
        for place in places
    ]


def _time_duplex(
    arenas: Arenas, size: int, largest: int, threads: dict[str, int], device: torch.device
) -> tuple[float, ...]:
    """Returns the time in ns of a copy of `size` bytes in the slower direction, while equal copies
    run in the other direction without a pause. The times of each part of the window follow.
    """
    count = max(_DUPLEX_UNIT // size, 1)

    def work(source: str, target: str) -> Work:
        places = itertools.cycle(_pairs(arenas, source, target, size, largest))

        def copies() -> None:
            for read, write in itertools.islice(places, count):
                write.copy_(read, non_blocking=True)

        return copies

    both = {"h2d": work(*COPIES["load_weights"]), "d2h": work(*COPIES["save_gradients"])}
    rates = run_together(both, threads, device).values()
    return tuple(1e9 / (count * min(pair)) for pair in zip(*rates, strict=True))
