"""Repeats: how long a piece of work takes, and how far its repeats lie apart."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Work = Callable[[], object]


class Measured(NamedTuple):
    """A number, and how sure it is."""

    value: float
    spread: float
    """interquartile range of its repeats over their median"""


def spread(repeats: Sequence[float]) -> float:
    """Interquartile range of `repeats` over their median, to four digits; 0 of one alone, and where the median is 0."""
    if len(repeats) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(repeats, n=4)
    return round((high - low) / abs(middle), 4) if middle else 0.0


def timed(work: Work, device: torch.device, repeats: int = 7) -> Measured:
    """Seconds of `work`, finished, the median after two warm-up calls."""
    times = []
    for turn in range(repeats + 2):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        if turn >= 2:
            times.append(time.perf_counter() - start)
    return Measured(statistics.median(times), spread(times))


def synchronize(device: torch.device) -> None:
    """Waits for what is enqueued, where the device has a queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rounded(value: float) -> float:
    """To five digits: no number here repeats itself to more."""
    return float(f"{value:.5g}")
