"""Measures what several GPUs of one host do to each other. Each rank measures its GPU, and all
ranks measure the same at the same time. The result is a SeveralGpus.

All numbers are those of the runtime's own functions: copies from and to registered host memory, the
collectives of `Ranks`, and `sum_parts`. No data is zero, because products of zeros run faster.
Without a GPU, copies in host memory take the place of copies over a link.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatrain.runtime import machine
from megatrain.runtime.calibration.contention import LaneRates, run_together
from megatrain.runtime.calibration.timing import (
    TimedRate,
    Work,
    rounded,
    spread,
    synchronize,
    time_repeatedly,
)
from megatrain.runtime.execution.executor import lane_threads
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.optimizer.adamw import sum_parts
from megatrain.runtime.ranks import Ranks
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.hardware.several_gpus import CollectiveRate, SeveralGpus
from megatrain.simulator.schedule.arithmetic import NORM_ROW

_WINDOWS = 2
"""Number of windows of half a second for a measurement of copies or compute."""
_BESIDE_SECONDS = 1.0
"""The expected duration of the collectives that run beside compute, in seconds."""
_TRIED, _LEAST, _MOST = 8, 16, 1000
"""Number of collectives from which this duration is estimated, and the least and the largest
number of collectives that then run."""
_ROUNDS = 7
"""Number of rounds of collectives of one size that are timed."""
_DTYPE = torch.bfloat16
"""The dtype of exchanged gradients."""
_KERNELS = {"gather": 1, "exchange": 2}
"""Collective -> the kernels that wait for compute, one after the other (`exchange_kernels`). An
exchange has an all-to-all and a sum."""


class _Sizes(NamedTuple):
    """What is measured on one type of device."""

    copied: int
    """Bytes of a copy. Copies in plans are as large."""
    copies: int
    """Number of such pieces in each host buffer. A GPU should not copy from the host's caches."""
    received: tuple[int, ...]
    """Bytes that a rank receives in a collective, in ascending order."""
    beside: int
    """The same for the collectives beside compute, as of a layer. It is one of `received`."""
    round: int
    """Bytes that are received in a round of collectives."""
    calls: int
    """The maximum number of collectives in a round."""
    tokens: int
    """The maximum number of rows in the matrix products."""
    products: tuple[tuple[int, int], ...]
    """Rows and columns of the weights of a decoder layer, whose products are the compute."""


_SIZES = {
    "cuda": _Sizes(
        copied=2**27,
        copies=4,
        received=(2**20, 2**23, 2**25, 2**27, 2**28, 2**29),
        beside=2**28,
        round=2**28,
        calls=30,
        tokens=2**15,
        # Qwen2.5-7B
        products=((3584, 4608), (3584, 3584), (3584, 18944), (3584, 18944), (18944, 3584)),
    ),
    "cpu": _Sizes(
        copied=2**24,
        copies=4,
        received=(2**16, 2**18, 2**20, 2**22),
        beside=2**20,
        round=2**21,
        calls=10,
        tokens=2**8,
        products=((256, 384), (256, 256), (256, 896), (256, 896), (896, 256)),
    ),
}
"""Type of device -> what is measured."""
_MEMORY_OF_COLLECTIVE = 8
"""More device memory than the buffers of a collective need, divided by the received bytes."""
_MEMORY_OF_PRODUCTS = 4
"""More device memory than the products need, divided by the bytes of the largest result."""


def measure_several(
    ranks: Ranks, device: torch.device, progress: Callable[[str], None]
) -> SeveralGpus:
    """Returns the measurements of the GPUs of all ranks, the same on each rank.

    Args:
        ranks: The ranks, one for each GPU. All must call this.
        device: The device of this rank.
        progress: Is called with the name of the next measurement.

    Raises:
        UserError: There is not enough device memory.
        RankLost: Another rank has ended.
    """
    with ranks.watched(device):
        bench = _OneRank(ranks, device)
        progress("memory of collectives")
        kept = bench.library_bytes()
        found: dict[str, TimedRate] = {}
        progress("copies of all GPUs")
        found |= bench.copies()
        progress("collectives")
        times = bench.collectives()
        found["sum_gb_per_s"] = bench.sums()
        progress("compute beside collectives")
        found |= bench.beside()
        return _of_all(ranks, device, bench.sizes, kept, found, times)


class _OneRank:
    """The buffers of one rank, and what it measures. All ranks call the same methods in the same
    order.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.ranks, self.device = ranks, device
        self._cuda = device.type == "cuda"
        self._threads = lane_threads(device, ranks.count)
        usual = _SIZES[device.type]
        free = min(ranks.values(machine.usable_device_bytes(device)))
        room = free // _MEMORY_OF_COLLECTIVE
        received = tuple(size for size in usual.received if size <= room)
        if len(received) < 3:
            raise UserError(
                "device memory",
                found=f"{format_bytes(free)} are free",
                allowed=f"{format_bytes(_MEMORY_OF_COLLECTIVE * usual.received[2])} or more",
                fix="end other programs on the GPUs",
            )
        tokens = usual.tokens
        widest = max(columns for _, columns in usual.products)
        while tokens > 1 and _MEMORY_OF_PRODUCTS * tokens * widest * _DTYPE.itemsize > free // 4:
            tokens //= 2
        self.sizes = usual._replace(
            received=received, beside=min(usual.beside, received[-1]), tokens=tokens
        )
        part = self._part(received[-1])
        self._received, self._sent = (
            self._random(ranks.count * part * _DTYPE.itemsize).view(_DTYPE) for _ in range(2)
        )
        self._total = torch.zeros(part, device=device)

    def _random(self, size: int) -> torch.Tensor:
        """Returns `size` random bytes on the device, which are finite and positive floats."""
        return torch.empty(size, dtype=torch.uint8, device=self.device).random_(1, 60)

    def _part(self, received: int) -> int:
        """Returns the elements that each rank owns if a rank receives about `received` bytes."""
        elements = received // ((self.ranks.count - 1) * _DTYPE.itemsize)
        return max(elements // NORM_ROW, 1) * NORM_ROW

    def _bytes(self, received: int) -> int:
        """Returns the bytes that a rank receives from the others, close to `received`."""
        return (self.ranks.count - 1) * self._part(received) * _DTYPE.itemsize

    def _rows(self, buffer: torch.Tensor, received: int) -> torch.Tensor:
        """Returns the first elements of `buffer` as the parts of all ranks, [ranks, part]."""
        count, part = self.ranks.count, self._part(received)
        return buffer[: count * part].view(count, part)

    def _gather(self, received: int) -> Work:
        """Returns an all-gather in place, as of weights that stay on the GPUs."""
        whole = self._rows(self._received, received)
        return lambda: self.ranks.gather(whole, whole[self.ranks.rank])

    def _exchange(self, received: int) -> Work:
        """Returns an all-to-all, as of the gradient of a layer."""
        rows, sent = (self._rows(each, received) for each in (self._received, self._sent))
        return lambda: self.ranks.exchange(rows, sent)

    def _sum(self, received: int) -> Work:
        """Returns the sum of the received parts."""
        rows = self._rows(self._received, received)
        total = self._total[: rows.shape[1]]
        return lambda: sum_parts(total, rows.unsqueeze(1), first=True)

    def library_bytes(self) -> int:
        """Returns the device memory in bytes that the first collectives of this process take, or 0
        without a GPU.
        """
        synchronize(self.device)
        self.ranks.meet()
        before = self._taken()
        for size in self.sizes.received:
            self._gather(size)()
            self._exchange(size)()
        synchronize(self.device)
        self.ranks.meet()
        return max(self._taken() - before, 0)

    def _taken(self) -> int:
        """Returns the bytes in use on the GPU, without those of PyTorch's allocator."""
        if not self._cuda:
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free - torch.cuda.memory_reserved(self.device))

    def copies(self) -> dict[str, TimedRate]:
        """Returns the GB/s of this GPU's link while all GPUs copy."""
        size = self.sizes.copied
        with self._host_buffers() as (reading, writing):
            device = [self._random(size) for _ in range(2)]
            both = {
                "h2d": _copying([(device[0], piece) for piece in reading.split(size)]),
                "d2h": _copying([(piece, device[1]) for piece in writing.split(size)]),
            }
            found = {}
            for lanes, name in ((("h2d",), ""), (("d2h",), ""), (("h2d", "d2h"), "_both")):
                rates = self._run({lane: both[lane] for lane in lanes})
                for lane in lanes:
                    whole, *parts = rates[lane]
                    found[f"{lane}{name}_gb_per_s"] = TimedRate(whole * size / 1e9, spread(parts))
            return found

    @contextlib.contextmanager
    def _host_buffers(self) -> Iterator[Sequence[torch.Tensor]]:
        """Yields two buffers of random bytes in host memory that is registered for the GPU."""
        size = self.sizes.copies * self.sizes.copied
        memory = HostMemory(registered=self._cuda)
        try:
            pages = torch.empty(0, dtype=torch.uint8).set_(
                memory.allocate([size, size], lambda _: None)
            )
            buffers = pages[: 2 * size].split(size)
            for piece in pages[: 2 * size].split(self.sizes.copied):
                piece.copy_(self._random(piece.numel()))
            yield buffers
        finally:
            synchronize(self.device)
            memory.close()

    def _run(
        self, work: dict[str, Work], counts: dict[str, int] | None = None
    ) -> dict[str, LaneRates]:
        """Returns what `run_together` returns. All ranks begin at the same time."""
        synchronize(self.device)
        self.ranks.meet()
        rates = run_together(work, self._threads, self.device, _WINDOWS, counts)
        synchronize(self.device)
        return rates

    def collectives(self) -> dict[str, list[tuple[int, TimedRate]]]:
        """Returns, for `gather` and `exchange`, the received bytes and the seconds of a collective
        of each size.
        """
        return {
            name: [
                (self._bytes(size), self._time(make(size), size)) for size in self.sizes.received
            ]
            for name, make in (("gather", self._gather), ("exchange", self._exchange))
        }

    def _time(self, work: Work, size: int) -> TimedRate:
        """Returns the seconds of a collective, the median over rounds without the first.

        The ranks enter a round at different times. A collective that is not timed begins the round,
        and ends on all ranks at the same time.
        """
        calls = min(max(self.sizes.round // size, 2), self.sizes.calls)
        times = []
        for _ in range(1 + _ROUNDS):
            work()
            if self._cuda:
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                for _ in range(calls):
                    work()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) / 1e3 / calls)
            else:
                began = time.perf_counter()
                for _ in range(calls):
                    work()
                times.append((time.perf_counter() - began) / calls)
        return TimedRate(statistics.median(times[1:]), spread(times[1:]))

    def sums(self) -> TimedRate:
        """Returns the GB/s of the sum of received parts, read and written."""
        size, calls = self.sizes.received[-1], 5
        work, part = self._sum(size), self._part(size)

        def repeated() -> None:
            for _ in range(calls):
                work()

        seconds, varies = time_repeatedly(repeated, self.device)
        moved = part * (self.ranks.count * _DTYPE.itemsize + self._total.element_size())
        return TimedRate(calls * moved / seconds / 1e9, varies)

    def beside(self) -> dict[str, TimedRate]:
        """Returns what compute keeps beside collectives, and how long these wait for it."""
        size = self.sizes.beside
        exchange, add = self._exchange(size), self._sum(size)

        def exchange_and_add() -> None:
            exchange()
            add()

        products, longest = self._products()
        self._run({"compute": products})  # a GPU is faster after a pause
        alone = self._run({"compute": products})["compute"]
        product_s = longest / alone[0]
        found = {}
        for name, work in (("gather", self._gather(size)), ("exchange", exchange_and_add)):
            lanes = {"compute": products, "exchange": work}
            per_s = self._run(lanes, {"exchange": _TRIED})["exchange"][0]
            count = min(max(round(_BESIDE_SECONDS * per_s), _LEAST), _MOST)
            counts = {"exchange": min(self.ranks.values(count))}
            by_itself = self._run({"exchange": work}, counts)["exchange"]
            together = self._run(lanes, counts)
            kept = [rate / alone[0] for rate in together["compute"]]
            waits = [
                (1 / rate - 1 / by_itself[0]) / (_KERNELS[name] * product_s)
                for rate in together["exchange"]
            ]
            found[f"compute_beside_{name}"] = TimedRate(kept[0], spread(kept[1:]))
            found[f"{name}_wait"] = TimedRate(waits[0], spread(waits[1:]))
        return found

    def _products(self) -> tuple[Work, float]:
        """Returns a function that computes the matrix products of a layer, and the share of its
        time that the longest one takes.
        """
        dtype = _DTYPE if self._cuda else torch.float32
        tokens, shapes = self.sizes.tokens, self.sizes.products
        inputs = {
            rows: torch.randn(tokens, rows, device=self.device, dtype=dtype)
            for rows in {rows for rows, _ in shapes}
        }
        results = {
            columns: torch.empty(tokens, columns, device=self.device, dtype=dtype)
            for columns in {columns for _, columns in shapes}
        }
        weights = [torch.randn(shape, device=self.device, dtype=dtype) for shape in shapes]

        def multiply() -> None:
            for weight in weights:
                rows, columns = weight.shape
                torch.mm(inputs[rows], weight, out=results[columns])

        sizes = [rows * columns for rows, columns in shapes]
        return multiply, max(sizes) / sum(sizes)


def _copying(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Work:
    """Returns a function that copies the second tensor of the next of `pairs` to the first."""
    places = itertools.cycle(pairs)

    def copy() -> None:
        write, read = next(places)
        write.copy_(read, non_blocking=True)

    return copy


def _of_all(
    ranks: Ranks,
    device: torch.device,
    sizes: _Sizes,
    kept: int,
    found: dict[str, TimedRate],
    times: dict[str, list[tuple[int, TimedRate]]],
) -> SeveralGpus:
    """Returns the record of all ranks: of the slowest GPU for each number, with the largest spread.

    Args:
        ranks: The ranks.
        device: The device of this rank.
        sizes: What was measured.
        kept: `collective_bytes` of this rank.
        found: Field -> its value and spread on this rank.
        times: Collective -> (bytes, seconds) on this rank.
    """
    everyone = ranks.values([kept, found, times])
    numbers, spreads = dict[str, float](), dict[str, float]()
    for name in found:
        values, variations = zip(*(each[1][name] for each in everyone), strict=True)
        slowest = max(values) if name.endswith("_wait") else min(values)
        numbers[name] = rounded(max(slowest, 0.0))
        spreads[name] = max(variations)
    for name in ("compute_beside_gather", "compute_beside_exchange"):
        numbers[name] = min(max(numbers[name], 0.01), 1.0)
    rates = {}
    for name in times:
        curves = [each[2][name] for each in everyone]
        points = [
            (each[0][0], max(seconds for _, (seconds, _) in each))
            for each in zip(*curves, strict=True)
        ]
        rates[name] = fitted(points)
        spreads[name] = round(max(_spread_of(curve, rates[name]) for curve in curves), 4)
    return SeveralGpus(
        gpus=ranks.count,
        measured_on=str(machine.describe(device)["device"]),
        date=time.strftime("%Y-%m-%d"),
        copy_bytes=sizes.copied,
        collective_bytes=max(each[0] for each in everyone),
        gather=rates["gather"],
        exchange=rates["exchange"],
        spread=spreads,
        **numbers,
    )


def _spread_of(curve: Sequence[tuple[int, TimedRate]], rate: CollectiveRate) -> float:
    """Returns the spread of the collectives of one rank, relative to their time.

    It is the mean spread or the mean difference from `rate`, whichever is larger. Sizes count in
    proportion to their times: a pause of the system can take many times as long as a small
    collective, and steps have few of these.
    """
    whole = sum(seconds for _, (seconds, _) in curve)
    varies = sum(seconds * variation for _, (seconds, variation) in curve)
    differs = sum(
        abs((rate.latency_ns + size / rate.gb_per_s) / 1e9 - seconds)
        for size, (seconds, _) in curve
    )
    return max(varies, differs) / whole


def fitted(points: Sequence[tuple[int, float]]) -> CollectiveRate:
    """Returns the latency and the rate that fit the times of collectives best, by least squares of
    the relative differences.

    `points` are at least two pairs (received bytes, seconds) in ascending order of bytes.
    """
    size, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    ones = np.ones_like(seconds)
    latency, per_byte = np.linalg.lstsq(
        np.stack([ones / seconds, size / seconds], axis=1), ones, rcond=None
    )[0]
    if per_byte <= 0:  # the times do not grow with the size
        latency, per_byte = 0.0, seconds[-1] / size[-1]
    elif latency < 0:
        shares = size / seconds
        latency, per_byte = 0.0, shares.sum() / (shares @ shares)
    return CollectiveRate(latency_ns=round(latency * 1e9), gb_per_s=rounded(1 / (per_byte * 1e9)))
