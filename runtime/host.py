"""The host of this machine: its cores, memory and processor. This module loads no PyTorch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from megatrain.simulator.base.errors import UserError

_SYSTEM_BYTES = 2**31


def cores() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def host_bytes() -> int:
    """Returns the host memory in bytes that this process may use: that of the machine, or the limit
    of its control group if that is lower.

    For a virtual machine that gets memory only when it uses it, the result is too low. In that case
    pass the limit to the command.
    """
    total = psutil.virtual_memory().total
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return min(total, int(limit)) if limit.isdigit() else total
    except OSError:
        return total


def usable_host_bytes() -> int:
    """Returns the host memory in bytes that a plan may have: `host_bytes()` without what the system
    and the process itself need.

    That is 2 GiB and 2 % of the memory, but at most an eighth of it. With PyTorch and CUDA, the
    process alone takes 1.5 GiB (experiments/results/h200-qwen2.5-7b-groups).
    """
    total = host_bytes()
    return total - min(_SYSTEM_BYTES + total // 50, total // 8)


def free_host_bytes() -> int:
    """Returns the host memory in bytes that is free now or that the system can free, at most
    `host_bytes()`.
    """
    return min(psutil.virtual_memory().available, host_bytes())


def processor() -> str:
    """Returns the name of the processor, as reported by the system."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def launched(name: str, *, default: int, least: int) -> int:
    """Returns the number in the variable `name`, which torchrun sets for each process it starts.

    Args:
        name: the variable, such as `WORLD_SIZE`.
        default: the number without the variable.
        least: the least number that makes sense.

    Raises UserError if the variable holds anything else than a number of at least `least`.
    """
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise UserError(
            name,
            found=repr(text),
            allowed=f"a number of at least {least}, which torchrun sets, or no such variable",
            fix=f"unset {name}, or start the ranks with torchrun",
        )
    return int(text)
