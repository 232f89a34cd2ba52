"""Measures the host memory of this process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil


def host_peak_bytes() -> int | None:
    """Returns the peak resident set size of this process in bytes, or None if the system does not
    report it.
    """
    # `getrusage` is not used: its peak in a new process starts at the peak of the parent.
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


@contextlib.contextmanager
def growth() -> Iterator[list[int]]:
    """Measures the peak growth of the resident set size during the block. Yields a list, to which
    the growth in bytes is appended at the end. The list stays empty if the system does not report
    it.
    """
    result: list[int] = []
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, see proc(5)
        before = psutil.Process(os.getpid()).memory_info().rss
    except OSError:
        before = 0
    yield result
    if before and (peak := host_peak_bytes()):
        result.append(max(peak - before, 0))
