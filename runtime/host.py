"""The cores, memory and processor of this machine. This module does not import PyTorch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from megatrain.runtime import control_groups
from megatrain.simulator.base.errors import UserError

_SYSTEM_BYTES = 2**31
RAM_AS_DEVICE = "RAM in place of GPU memory"
"""What is named as the device of a machine that was measured without a GPU."""
WITHOUT_GPU = "without a GPU, a part of the RAM stands in for GPU memory"
"""A sentence for the user on what the device is on a CPU."""


def cores() -> int:
    """Returns the number of CPU cores that this process may use: those that it may run on, or fewer
    if its control group has less processor time.
    """
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    limit = control_groups.processor_limit()
    return count if limit is None else max(min(count, int(limit)), 1)


def host_bytes() -> int:
    """Returns the host memory in bytes that this process may use: the memory of the machine, or the
    limit of the process' control groups if the limit is lower.

    The result is too low on a virtual machine that gets its memory only when it uses it. Pass
    `--host-memory` there.
    """
    import psutil  # takes 20 ms, and commands about other machines do not need it

    total = psutil.virtual_memory().total
    limit = control_groups.memory_limit()
    return total if limit is None else min(total, limit)


def usable_host_bytes() -> int:
    """Returns the host memory in bytes that a plan may use: `host_bytes()` minus a reserve for the
    system and for the process itself.

    The reserve is 2 GiB plus 2 % of the memory, but at most an eighth of the memory. A process with
    PyTorch and CUDA takes 1.5 GiB without a plan (experiments/results/h200-qwen2.5-7b-groups).
    """
    total = host_bytes()
    return total - min(_SYSTEM_BYTES + total // 50, total // 8)


def free_host_bytes() -> int:
    """Returns the host memory in bytes that is free now or that the system can free, at most
    `host_bytes()`.
    """
    import psutil

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


def torchrun_variable(name: str, *, default: int, least: int) -> int:
    """Returns the value of the environment variable `name`, which torchrun sets for each process
    that it starts.

    Args:
        name: The variable, such as `WORLD_SIZE`.
        default: The value if the variable is not set.
        least: The smallest valid value.

    Raises:
        UserError: The variable is not an integer of at least `least`.
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
