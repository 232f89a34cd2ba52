"""Tests of op names in profiles: a profiler that records all threads lists each op under its id.

By default, PyTorch's profiler records only the thread that started it, and no lane.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from megatrain.simulator.schedule.plan import Plan


def test_ops_are_named_where_a_profiler_records_all_threads(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    if "profile_all_threads" not in (inspect.getdoc(_ExperimentalConfig.__init__) or ""):
        pytest.skip("this version of torch cannot profile all threads")
    with session(executable(layers=2)) as running:
        running.step(1)
        with profile(
            activities=[ProfilerActivity.CPU],
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        ) as profiler:
            running.step(2)
        missing = {op.id for op in running.executor.schedule.ops} - {
            event.name for event in profiler.events()
        }
        assert missing == set()
