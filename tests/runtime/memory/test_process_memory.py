"""Tests of the temporary memory growth of a process, as counted by the system.

The result is an empty list if the system does not count it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.memory import process_memory
from megatrain.runtime.memory.process_memory import growth, host_peak_bytes

MIB = 2**20


@pytest.fixture
def counted() -> None:
    """Skips a test if the system's count of touched pages cannot be reset."""
    with growth() as grown:
        pass
    if not grown:
        pytest.skip("/proc/self/clear_refs cannot be written here")


def touch(size: int) -> None:
    """Allocates `size` bytes, writes to each, and releases them."""
    taken = b"\1" * size
    del taken


@pytest.mark.usefixtures("counted")
def test_growth_is_the_peak_of_a_block_even_if_its_memory_is_released() -> None:
    """The growth of a block is its peak of memory, even if the memory was released.

    Memory that was taken before the block does not count.
    """
    touch(256 * MIB)
    with growth() as grown:
        touch(64 * MIB)
    (more,) = grown
    assert 60 * MIB <= more <= 96 * MIB
    with growth() as grown:
        pass
    assert grown[0] <= 16 * MIB


def test_an_error_in_the_block_is_passed_on() -> None:
    with pytest.raises(ZeroDivisionError), growth():
        raise ZeroDivisionError


@pytest.mark.parametrize("error", [PermissionError, FileNotFoundError])
def test_nothing_is_reported_if_the_peak_cannot_be_reset(
    monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    def refuse(*_: Any, **__: Any) -> int:
        raise error

    monkeypatch.setattr(Path, "write_text", refuse)
    with growth() as grown:
        touch(MIB)
    assert grown == []


def test_the_system_reports_the_peak_in_units_of_1024_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = "VmPeak:\t  900 kB\nVmHWM:\t  123 kB\nVmRSS:\t  100 kB\n"
    monkeypatch.setattr(Path, "read_text", lambda *_: status)
    assert host_peak_bytes() == 123 * 1024


def test_without_a_peak_no_growth_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (host_peak_bytes() or 0) > MIB
    monkeypatch.setattr(Path, "read_text", lambda *_: "Name:\tpython\n")
    assert process_memory.host_peak_bytes() is None
    with growth() as grown:
        pass
    assert grown == []
