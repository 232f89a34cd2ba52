"""Tests of plans that do not fit: they are refused before any weight is read."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec
import pytest

from megatrain.runtime.memory.fitting import (
    LOADING_BYTES,
    little_memory_note,
    refuse_what_does_not_fit,
)
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan, Prediction


def pools(plan: Plan, place: str) -> int:
    return sum(
        buffer.allocated
        for buffer in lower(plan).buffers
        if buffer.place == place and not buffer.dynamic
    )


@pytest.mark.parametrize(("place", "loading"), [("host", LOADING_BYTES), ("device", 0)])
def test_the_machine_s_memory_is_compared_to_the_byte(
    make_plan: Callable[..., Plan], place: str, loading: int
) -> None:
    plan = make_plan("overlapped")
    there = pools(plan, place) + loading
    refuse_what_does_not_fit(plan, lower(plan), **{f"{place}_bytes": there})
    with pytest.raises(
        UserError,
        match=(
            rf"^{place} memory: found a plan that needs .*, the largest pool being {place}\.\w+ .*;"
            r" allowed: .*, what this machine has; fix: make a plan for this machine with"
        ),
    ):
        refuse_what_does_not_fit(plan, lower(plan), **{f"{place}_bytes": there - 1})


def test_on_a_cpu_both_memories_are_those_of_the_host(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan("overlapped")
    there = pools(plan, "host") + pools(plan, "device") + LOADING_BYTES
    refuse_what_does_not_fit(plan, lower(plan), host_bytes=there, on_cpu=True)
    refuse_what_does_not_fit(plan, lower(plan), host_bytes=there - 1)
    with pytest.raises(
        UserError,
        match=(
            r"^device and host memory: found a plan that needs .*, the largest pool being"
            r" host\.\w+ .*; allowed: .*, what this machine has; fix: make a plan for this machine"
        ),
    ):
        refuse_what_does_not_fit(plan, lower(plan), host_bytes=there - 1, on_cpu=True)


@pytest.mark.parametrize("place", ["host", "device"])
def test_the_plan_s_limit_is_compared_to_the_byte(
    make_plan: Callable[..., Plan], place: str
) -> None:
    plan = make_plan("overlapped")
    for limit in (pools(plan, place), pools(plan, place) - 1):
        limited = msgspec.structs.replace(plan, **{f"{place}_limit_bytes": limit})
        if limit == pools(plan, place):
            refuse_what_does_not_fit(limited, lower(limited))
        else:
            with pytest.raises(
                UserError, match=rf"^{place} memory: .*; fix: raise the limit by 1 B"
            ):
                refuse_what_does_not_fit(limited, lower(limited))


def test_the_predicted_peak_is_compared_too(make_plan: Callable[..., Plan]) -> None:
    """The predicted peak also has activations and workspace, which are not in the pools."""
    plan = make_plan("overlapped")
    prediction = Prediction(
        step_seconds=1,
        lower_bound_seconds=1,
        device_peak_bytes=plan.device_limit_bytes + 1,
        host_peak_bytes=0,
        binding="compute",
    )
    with pytest.raises(
        UserError,
        match=(
            r"^device memory: found a plan that needs 16.00 MiB.*; allowed: 16.00 MiB; fix:"
            r" raise the limit by 1 B"
        ),
    ):
        refuse_what_does_not_fit(msgspec.structs.replace(plan, prediction=prediction), lower(plan))


def test_a_note_says_that_less_memory_is_free_than_the_pools_need(
    make_plan: Callable[..., Plan],
) -> None:
    plan = make_plan("overlapped")
    needed = pools(plan, "host") + LOADING_BYTES
    assert little_memory_note(lower(plan), needed) == ""
    assert re.fullmatch(
        r"warning: the plan needs .* of host memory, and .* are free now: close other programs, or"
        r" plan with --host-memory \d+GiB, or the system may end this run",
        little_memory_note(lower(plan), needed - 1),
    )
    everything = pools(plan, "device") + needed
    assert little_memory_note(lower(plan), everything, on_cpu=True) == ""
    assert little_memory_note(lower(plan), everything - 1, on_cpu=True)
