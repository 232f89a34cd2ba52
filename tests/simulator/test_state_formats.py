"""Tests of state formats in plans: the file, what is refused, bytes in memory and in copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import Calibrated
from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.hardware.cost_table import CostTable, Workspace
from megatrain.simulator.memory.account import peak_workspace_bytes
from megatrain.simulator.model.state_format import EXACT, FORMATS, UPDATE_COSTS
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.plan import Plan

BYTES = {"exact": 12, "master24": 5.125, "bf16-sr": 4.125}
"""Weights, low halves and moments of a parameter."""


def in_format(plan: Plan, state: str) -> Plan:
    return msgspec.structs.replace(
        plan, workload=msgspec.structs.replace(plan.workload, state=state)
    )


def test_a_plan_file_names_any_format_but_exact(
    make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = make_plan("overlapped")
    for state in FORMATS:
        in_format(plan, state).save(tmp_path / "plan.toml")
        assert ("state = " in (tmp_path / "plan.toml").read_text()) == (state != EXACT)
        assert Plan.load(tmp_path / "plan.toml").workload.state == state


@pytest.mark.parametrize("policy", ["sequential", "double_buffer", "resident", "overlapped"])
def test_a_format_decides_the_bytes_of_state(make_plan: Callable[..., Plan], policy: str) -> None:
    """The bytes of persistent state and of its copies are those of the format.

    Formats have different digests, and every schedule is valid.
    """
    digests = set()
    for state, width in BYTES.items():
        plan = in_format(make_plan(policy), state)
        schedule = policies.lower(plan)
        schedule.check()
        digests.add(schedule.digest)
        elements = sum(layer.elements for layer in plan.model.stack.values())
        kinds = ("weights", "master_low", "moments")
        held = sum(b.bytes for b in schedule.buffers if b.persistent and b.data in kinds)
        assert held == width * elements
        outlined = policies.outline(plan)
        assert sum(b.bytes for b in outlined.buffers) == sum(b.bytes for b in schedule.buffers)
        saved = [op for op in schedule.ops if op.kind == "save_state"]
        assert sum(op.bytes for op in saved) == sum(op.parameters * width for op in saved)
    assert len(digests) == len(FORMATS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": "int4"}, "workload: state: found int4; allowed: exact, master24, bf16-sr"),
        ({"state": "master24", "dtype": "fp32"}, "found master24 with dtype fp32"),
        ({"state": "bf16-sr", "optimizer": "lion.py"}, "found bf16-sr with optimizer lion.py"),
    ],
)
def test_a_workload_that_a_format_cannot_have_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        Workload(batch=1, sequence=8, **changes)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_systems_have_no_format(make_plan: Callable[..., Plan]) -> None:
    with pytest.raises(UserError, match=r"zero_offload: state: found master24; allowed: exact"):
        policies.lower(in_format(make_plan("zero_offload"), "master24"))


def test_an_update_takes_its_share_of_memory_s_time_or_of_the_cores(
    make_plan: Callable[..., Plan],
) -> None:
    """Machines are measured in `exact`. On a GPU, an update in 8 bits is taken to be no faster.
    On a host with few cores, they limit it.
    """
    exact = make_plan("overlapped")
    ops = {op.kind: op for op in policies.lower(exact).ops}
    usual = Elementwise(exact.model, exact.workload, 16)
    coded = Elementwise(exact.model, in_format(exact, "master24").workload, 16)
    parameters = ops["update"].parameters
    host = msgspec.structs.replace(ops["update"], id="UC0", lane="cpu")
    for op in (ops["update"], host):
        assert usual.touched_bytes(op) == 26 * parameters
        assert usual.update_ns(op, 1234.0) == 1234
    assert coded.touched_bytes(ops["update"]) == 23 * parameters
    assert coded.update_ns(ops["update"], 1234.0) == pytest.approx(1234 * 23 / 26)
    assert coded.touched_bytes(host) == 12.25 * parameters
    each = UPDATE_COSTS["block8"].core_per_s
    slow, fast = parameters / 1e8 * 1e9, parameters / 1e12 * 1e9
    assert coded.update_ns(host, slow) == pytest.approx(slow * 12.25 / 26)
    assert coded.update_ns(host, fast) == parameters / (14 * each) * 1e9
    alone = Elementwise(exact.model, in_format(exact, "master24").workload)
    assert alone.update_ns(host, fast) == pytest.approx(fast * 12.25 / 26)
    workspace = Workspace(layer=1, head=2, update=3)
    for state, more in (("exact", 0), ("bf16-sr", 2**28)):
        schedule = policies.lower(in_format(make_plan("resident"), state))
        assert peak_workspace_bytes(workspace, schedule, {"activations": 1}) == max(2, more + 2)


def test_an_update_that_was_measured_in_its_format_is_not_derived(
    make_plan: Callable[..., Plan],
) -> None:
    plan = make_plan("overlapped")
    work = in_format(plan, "master24").workload
    curves = {
        "cpu_update": ((0, 0), (10**6, 10**6)),
        "cpu_update:wide": ((0, 0), (10**6, 2 * 10**6)),
        "cpu_update:master24": ((0, 0), (10**6, 7 * 10**6)),
    }
    table = CostTable(measured_on="x", date="2026-11-23", curves=curves, compute={})
    op = Op(id="UC0.c0", lane="cpu", parameters=10**6)
    for workload, duration in ((plan.workload, 10**6), (work, 7 * 10**6)):
        costs = Calibrated(table, elementwise=Elementwise(plan.model, workload))
        assert (costs.duration_ns(op), costs.extrapolated(op)) == (duration, False)
    other = Calibrated(
        table, elementwise=Elementwise(plan.model, in_format(plan, "bf16-sr").workload)
    )
    assert other.extrapolated(op)
    with pytest.raises(UserError, match=r"cpu_update:int4"):
        msgspec.structs.replace(table, curves={"cpu_update:int4": ((0, 0),)})
