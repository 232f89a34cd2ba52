"""Times a function several times, and computes the spread of the results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

Work = Callable[[], object]


class TimedRate(NamedTuple):
    """A measured number and its spread."""

    value: float
    """The number, in the unit that the function which returns it gives."""
    spread: float
    """Interquartile range of the repeated measurements over their median."""


def spread(repeats: Sequence[float]) -> float:
    """Returns the interquartile range of `repeats` over their median, rounded to four digits. The
    result is 0 if there is only one number, or if the median is 0.
    """
    if len(repeats) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(repeats, n=4)
    return round((high - low) / abs(middle), 4) if middle else 0.0


def time_repeatedly(work: Work, device: torch.device, repeats: int = 7) -> TimedRate:
    """Returns the median time of `work` in seconds over `repeats` calls, after two warm-up calls.
    Work on the device is included.
    """
    times = []
    for turn in range(repeats + 2):
        synchronize(device)
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
    """Returns `value` rounded to five digits. No measurement is repeatable to more."""
    return float(f"{value:.5g}")
