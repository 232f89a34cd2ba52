"""Tests of how a function is timed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megatrain.runtime.calibration import timing


def test_the_time_of_a_call_is_the_median_after_two_warm_up_calls_with_its_queued_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here a call only enqueues work, and time passes while the device is waited for."""
    clock, queued = [100.0], [0.0]
    durations = iter([90.0, 80.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0])

    def work() -> None:
        queued[0] = next(durations)

    def wait(_: torch.device) -> None:
        clock[0] += queued[0]
        queued[0] = 0.0

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(timing, "synchronize", wait)
    found = timing.time_repeatedly(work, torch.device("cuda"))
    assert found == (4.0, 1.0)
    assert not list(durations), "seven calls are timed"


def test_numbers_have_five_significant_digits() -> None:
    assert [timing.rounded(value) for value in (123456.7, 0.000123456)] == [123460, 0.00012346]
