"""Tests of the limits that control groups set, on copies of the files that Linux shows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatrain.runtime import control_groups, host

Linux = Callable[..., None]


@pytest.fixture
def linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Linux:
    """Returns a function that writes the groups of this process, and files in the folder where
    groups are mounted.
    """
    monkeypatch.setattr(control_groups, "_MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(control_groups, "_MOUNTED", tmp_path / "mounted")

    def write(membership: str, files: dict[str, str]) -> None:
        (tmp_path / "cgroup").write_text(membership)
        for name, text in files.items():
            file = tmp_path / "mounted" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")

    return write


@pytest.mark.parametrize(
    ("membership", "files", "memory", "processors"),
    [
        ("", {}, None, None),
        ("a line\n0::/\n", {"memory.max": "1000"}, 1000, None),
        (
            "4:cpuset:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "1", "cpu/job/cpu.cfs_period_us": "1"},
            None,
            None,
        ),
        ("0::/", {"cpu.max": "100 0"}, None, None),
        ("0::/\n", {"memory.max": "1000", "cpu.max": "250000 100000"}, 1000, 2.5),
        ("0::/job/step\n", {"job/step/memory.max": "max", "job/memory.max": "900"}, 900, None),
        ("0::/job/step\n", {"job/step/memory.max": "800", "job/memory.max": "900"}, 800, None),
        ("0::/job\n", {"other/memory.max": "1", "job/cpu.max": "max 100000"}, None, None),
        # in a container, with the path on the host
        ("0::/docker/17\n", {"memory.max": "700"}, 700, None),
        (
            "3:cpuacct,cpu:/job\n2:memory:/job\n1:name=systemd:/\n",
            {
                "memory/job/memory.limit_in_bytes": "600",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "cpu/job/cpu.cfs_quota_us": "50000",
                "cpu/job/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            600,
            0.5,
        ),
    ],
)
def test_the_lowest_limit_of_a_group_and_those_above_it_holds(
    linux: Linux,
    membership: str,
    files: dict[str, str],
    memory: int | None,
    processors: float | None,
) -> None:
    linux(membership, files)
    assert control_groups.memory_limit() == memory
    assert control_groups.processor_limit() == processors


def test_cores_and_memory_are_those_of_the_group(linux: Linux) -> None:
    linux("", {})
    cores, memory = host.cores(), host.host_bytes()
    linux("0::/job\n", {"job/memory.max": str(2**30), "job/cpu.max": "150000 100000"})
    assert host.host_bytes() == 2**30
    assert host.cores() == 1, "one and a half are one"
    linux("0::/job\n", {"job/cpu.max": "1000 100000"})
    assert host.cores() == 1
    linux("0::/job\n", {"job/memory.max": str(2**60), "job/cpu.max": "100000000 100000"})
    assert (host.cores(), host.host_bytes()) == (cores, memory)
