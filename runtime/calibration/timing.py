"""Times a function several times, and computes the spread of the results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Work = Callable[[], object]
"""A unit of work to time."""


class TimedRate(NamedTuple):
    """A measured number and its spread."""

    value: float
    """The number. The function that returns it documents the unit."""
    spread: float
    """Interquartile range of the repeated measurements, divided by their median."""


def spread(repeats: Sequence[float]) -> float:
    """Returns the interquartile range of `repeats` divided by their median, with four decimals.

    The result is 0 if there are fewer than two numbers, or if the median is 0.
    """
    if len(repeats) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(repeats, n=4)
    return round((high - low) / abs(middle), 4) if middle else 0.0


def time_repeatedly(work: Work, device: torch.device, repeats: int = 7) -> TimedRate:
    """Returns the median time of `work` in seconds over `repeats` calls, after two warm-up calls.

    The time includes work that is enqueued on the device.
    """
    times = []
    for turn in range(repeats + 2):
        start = time.perf_counter()
        work()
        synchronize(device)
        if turn >= 2:
            times.append(time.perf_counter() - start)
    return TimedRate(statistics.median(times), spread(times))


def synchronize(device: torch.device) -> None:
    """Waits until all work that is enqueued on a CUDA device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def rounded(value: float) -> float:
    """Returns `value` rounded to five significant digits, because no measurement repeats more."""
    return float(f"{value:.5g}")
