"""Tests of the host memory that the process itself takes, outside its pools.

It counts once if a plan has state on the host. The hardware file has the number of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from small_model import SMALL

from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import Account
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import plan_account
from megatrain.simulator.policies import lower, names, peers
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict.verdict import judge

STORED = HardwareSpec.load(
    str(Path(__file__).parents[3] / "experiments" / "results" / "h200-qwen2.5-3b" / "hardware.toml")
)
MORE = 3 * 2**30 + 1


def with_process(size: int) -> HardwareSpec:
    assert STORED.costs is not None
    return msgspec.structs.replace(
        STORED, costs=msgspec.structs.replace(STORED.costs, process_bytes=size)
    )


def accounts(plan: Plan) -> tuple[Account, Account]:
    """Returns the accounts of a plan with a process that takes 0 and `MORE` bytes."""
    none, some = (
        plan_account(plan, lower(plan), cost_model(with_process(size), plan.model, plan.workload))
        for size in (0, MORE)
    )
    return none, some


def test_files_from_before_the_process_was_measured_have_no_bytes_for_it() -> None:
    """A calibration from before the process was measured has 0 bytes for it."""
    assert STORED.costs is not None
    assert STORED.costs.process_bytes == 0


@pytest.mark.parametrize("policy", [name for name in names() if name != "resident"])
def test_a_plan_with_state_on_the_host_counts_the_process(
    make_plan: Callable[..., Plan], policy: str
) -> None:
    """An account with state on the host includes the process."""
    none, some = accounts(make_plan(policy))
    assert none.pools.keys() == some.pools.keys() - {"host.process"}
    assert some.pools == {"host.process": MORE, **none.pools}
    assert next(iter(some.pools)) == "host.process", "pools are listed by size, the largest first"
    assert (some.host_peak_bytes, some.device_peak_bytes) == (
        none.host_peak_bytes + MORE,
        none.device_peak_bytes,
    )


@pytest.mark.parametrize("policy", ["resident", *peers()])
def test_the_process_does_not_count_without_state_on_the_host_or_for_other_systems(
    make_plan: Callable[..., Plan], policy: str
) -> None:
    """The process does not count without state on the host or for another system."""
    none, some = accounts(make_plan(policy))
    assert some == none
    assert "host.process" not in some.pools


def test_a_limit_counts_the_process_to_the_byte(make_plan: Callable[..., Plan]) -> None:
    needed = accounts(make_plan("double_buffer"))[1].host_peak_bytes
    assert [
        accounts(make_plan("double_buffer", host_limit_bytes=needed - less))[1].excess_bytes
        for less in (0, 1)
    ] == [0, 1]


def test_every_cost_model_has_a_number_for_the_process() -> None:
    workload = Workload(batch=8, sequence=1024)
    costs: CostModel = cost_model(with_process(MORE), SMALL, workload)
    assert costs.process_bytes == MORE
    assert (
        cost_model(msgspec.structs.replace(STORED, costs=None), SMALL, workload).process_bytes == 0
    )


def test_a_verdict_lists_the_process() -> None:
    for policy, expected in (("double_buffer", MORE), ("resident", 0)):
        verdict = judge(
            SMALL,
            with_process(MORE),
            Workload(batch=8, sequence=1024),
            policies=[policy],
            advise=False,
        )
        assert verdict.pools.get("host.process", 0) == expected
        assert (
            sum(size for pool, size in verdict.pools.items() if pool.startswith("host."))
            == verdict.host_peak_bytes
            == sum(verdict.classes["host"].values())
        )


def test_every_gpu_has_a_process() -> None:
    one, none = (
        judge(
            SMALL,
            with_process(size),
            Workload(batch=8, sequence=1024),
            policies=["double_buffer"],
            device_limit=2 * 2**30,
            gpus=8,
            advise=False,
        ).multi_gpu
        for size in (MORE, 0)
    )
    assert one is not None
    assert none is not None
    assert one.host_peak_bytes - none.host_peak_bytes == 8 * MORE
