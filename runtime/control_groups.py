"""The limits on memory and processor time that Linux control groups set for this process.

Containers, SLURM jobs and systemd units have such limits. The process belongs to one group in each
hierarchy, and the limits of all groups above it hold, too. Version 2 has one hierarchy, and version
1 has one for each controller (`man 7 cgroups`). In a container, the path of the group may be that
of the host, which does not exist here. The root of the hierarchy is then the container's own group.
This module does not import PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_MOUNTED = Path("/sys/fs/cgroup")


def memory_limit() -> int | None:
    """Returns the lowest memory limit of the groups of this process in bytes, or None."""
    texts = [
        text
        for group in _groups("memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read(group / name)).isdigit()
    ]
    return min(map(int, texts), default=None)


def processor_limit() -> float | None:
    """Returns the lowest number of CPU cores whose time the groups of this process may use, or
    None.
    """
    limits: list[float] = []
    for group in _groups("cpu"):
        shares = _read(group / "cpu.max").split()
        shares = shares or [_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if len(shares) == 2 and all(map(str.isdigit, shares)) and int(shares[1]):
            limits.append(int(shares[0]) / int(shares[1]))
    return min(limits, default=None)


def _groups(controller: str) -> Iterator[Path]:
    """Yields the folders of the groups of this process that may limit `controller`: its own group
    and all groups above it, in each hierarchy.
    """
    for line in _read(_MEMBERSHIP).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and controller not in controllers.split(","):
            continue
        # The folder of a hierarchy of version 1 has the names of all its controllers, in any order,
        # and there are links to it with the name of each.
        root = _MOUNTED / controller if controllers else _MOUNTED
        own = root / path.lstrip("/")
        yield from (own, *(above for above in own.parents if above.is_relative_to(root)))


def _read(file: Path) -> str:
    """Returns the text of `file` without white space around it, or an empty text without it."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
