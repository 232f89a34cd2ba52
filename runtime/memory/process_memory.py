"""Process memory: what this process takes of the host's memory beside the pools that a plan accounts for."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil


def host_peak_bytes() -> int | None:
    """The most of this process that was in memory at one time. Not `getrusage`, whose figure of a new process begins with that of its parent."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


@contextlib.contextmanager
def growth() -> Iterator[list[int]]:
    """Gets the bytes by which this process was larger, at most, than at the start; nothing where the system does not tell."""
    found: list[int] = []
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark begins anew: proc(5)
        before = psutil.Process(os.getpid()).memory_info().rss
    except OSError:
        before = 0
    yield found
    if before and (peak := host_peak_bytes()):
        found.append(max(peak - before, 0))
