"""Tests of optimizers from files and entry points.

They are found or refused by name, and change bytes, schedules and costs.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from forget import forget
from outside_optimizers import HEADER, TEXTS
from small_table import table

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import Calibrated, cost_model
from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.engine.evaluator import uncontended_makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.optimizer import OPTIMIZERS, find, registered
from megatrain.simulator.model.workload import Clipping, Dtype, Workload
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.planner.search import search
from megatrain.simulator.schedule import Op, ScheduleError
from megatrain.simulator.schedule.arithmetic import layer_state
from megatrain.simulator.schedule.plan import Placement, Plan

H200 = HardwareSpec.load("h200")


@pytest.fixture
def files(tmp_path: Path) -> dict[int, str]:
    """Number of moments -> path of an optimizer file."""
    for moments, text in TEXTS.items():
        (tmp_path / f"optimizer_{moments}.py").write_text(text, encoding="utf-8")
    return {moments: str(tmp_path / f"optimizer_{moments}.py") for moments in TEXTS}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, files: dict[int, str]) -> Iterator[None]:
    """Installs two optimizers by entry points, one with the name of the built-in optimizer."""
    lion = type(find(files[1]))
    points = [
        importlib.metadata.EntryPoint(name, "somewhere:Lion", OPTIMIZERS.group)
        for name in ("lion", "adamw")
    ]
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda _: lion)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)
    forget(OPTIMIZERS)
    yield
    forget(OPTIMIZERS)


@pytest.mark.usefixtures("installed")
def test_an_installed_optimizer_is_found_by_name() -> None:
    assert registered() == ["adamw", "lion", "muon"]
    assert (find("lion").name, find("lion").moments) == ("lion", 1)
    assert find("adamw").moments == 2, "a plugin replaced a built-in optimizer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("raise RuntimeError('at import')", "RuntimeError while it was loaded: at import"),
        ("nothing = 1", "found 0 subclasses of Optimizer; allowed: one"),
        (
            "class A(Optimizer):\n    name = 'a'",
            "moments: found None; allowed: 0 to 8; fix: set `moments`",
        ),
        ("class A(Optimizer):\n    moments = -1", "moments: found -1; allowed: 0 to 8"),
        (
            "class A(Optimizer):\n    moments = 1\n    settings = ('lr',)",
            "settings: found lr; allowed: weight_decay, betas, epsilon",
        ),
        ("class A(Optimizer):\n    moments = 1", "found no `update`; allowed: one"),
    ],
)
def test_a_file_that_defines_no_optimizer_gives_a_one_line_error(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(HEADER + text)
    forget(OPTIMIZERS)
    with pytest.raises(UserError) as caught:
        find(str(path))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"optimizer {path}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_gives_a_one_line_error() -> None:
    with pytest.raises(UserError, match=r"allowed: the path of a \.py file that defines an optimi"):
        find("missing.py")


def test_a_plan_with_adamw_does_not_name_its_optimizer(
    make_plan: Callable[..., Plan], files: dict[int, str], tmp_path: Path
) -> None:
    """A plan names its optimizer only if it is not AdamW."""
    make_plan().save(tmp_path / "plan.toml")
    assert "optimizer" not in (tmp_path / "plan.toml").read_text()
    make_plan(optimizer=files[1]).save(tmp_path / "lion.toml")
    assert Plan.load(tmp_path / "lion.toml") == make_plan(optimizer=files[1])


@pytest.mark.parametrize("moments", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("policy", policies.names())
def test_every_policy_has_a_valid_schedule_for_an_outside_optimizer(
    make_plan: Callable[..., Plan], files: dict[int, str], policy: str, dtype: Dtype, moments: int
) -> None:
    """Every policy has a valid schedule for an optimizer with any number of moments."""
    for clipping in ("global", "layer"):
        placed = [Placement()]
        if policies.find(policy).places_state:
            placed.append(Placement(weights="0", moments="1,e", host_updated="2,h"))
        for placement in placed:
            plan = make_plan(
                policy,
                dtype=dtype,
                optimizer=files[moments],
                clipping=clipping,
                placement=placement,
            )
            schedule = policies.lower(plan)
            schedule.check(moments)
            usual = policies.lower(
                msgspec.structs.replace(
                    plan, workload=msgspec.structs.replace(plan.workload, optimizer="adamw")
                )
            )
            assert (schedule.digest == usual.digest) == (moments == 2)
            held = sum(b.bytes for b in schedule.buffers if b.data == "moments" and b.persistent)
            elements = sum(layer.elements for layer in plan.model.stack.values())
            assert held == 4 * moments * elements
            outlined = policies.outline(plan)
            assert sum(b.bytes for b in outlined.buffers) == sum(b.bytes for b in schedule.buffers)
            if moments < 2:
                with pytest.raises(ScheduleError, match=r"has .* bytes|writes no moments"):
                    schedule.check(2)
    assert layer_state(plan, "0")["moments"].bytes == 4 * moments


def test_clipping_by_update_is_adamw_s(files: dict[int, str]) -> None:
    clipping: Clipping = "update"
    Workload(batch=1, sequence=8, clipping=clipping)
    with pytest.raises(
        UserError, match=r"found update with optimizer .*; allowed: update with ada"
    ):
        Workload(batch=1, sequence=8, clipping=clipping, optimizer=files[1])


@pytest.mark.parametrize("policy", policies.peers())
def test_another_system_has_its_own_optimizer(
    make_plan: Callable[..., Plan], files: dict[int, str], policy: str
) -> None:
    plan = make_plan(policy, optimizer=files[0])
    for ask in (policies.lower, policies.outline):
        with pytest.raises(UserError, match=f"policy {policy}: optimizer: found .*; allowed: ada"):
            ask(plan)


@pytest.mark.parametrize(("moments", "share"), [(0, 10 / 26), (1, 18 / 26), (2, 1.0)])
def test_an_update_costs_its_share_of_adamw_s_bytes(
    make_plan: Callable[..., Plan], files: dict[int, str], moments: int, share: float
) -> None:
    """An update's duration is AdamW's times the share of bytes that it moves.

    In bf16 it moves 4 + 4 bytes of the master, 4 + 4 of each moment, and 2 of the gradient.
    """
    model = make_plan().model
    work = Workload(batch=2, sequence=16)
    outside = msgspec.structs.replace(work, optimizer=files[moments])
    on_host = Op(id="UC0.c0", lane="cpu", parameters=10**6)
    on_device = Op(id="U0.c0", lane="update", parameters=10**6)
    sheet, usual = (cost_model(H200, model, each) for each in (outside, work))
    for op in (on_host, on_device):
        assert sheet.duration_ns(op) == pytest.approx(share * usual.duration_ns(op), abs=1)
    curves = dict.fromkeys(("update", "cpu_update"), ((0, 0), (2 * 10**6, 2 * 10**6)))
    measured = Calibrated(table(curves=curves), elementwise=Elementwise(model, outside))
    for op in (on_host, on_device):
        assert measured.duration_ns(op) == pytest.approx(share * 10**6, abs=1)
        assert measured.extrapolated(op) == (moments != 2)


@pytest.mark.parametrize("moments", [0, 1])
@pytest.mark.parametrize(
    "placement", [Placement(), Placement(weights="0-1", moments="0-1"), Placement(host_updated="e")]
)
def test_a_bound_counts_the_bytes_that_there_are(
    make_plan: Callable[..., Plan], files: dict[int, str], placement: Placement, moments: int
) -> None:
    """The lower bound counts the optimizer's own bytes.

    Copies limit this model, so the bytes of AdamW would give a bound above the time.
    """
    plan = make_plan(
        "overlapped",
        hidden=512,
        intermediate=2048,
        head_dim=64,
        vocabulary=1024,
        layers=6,
        state_slots=8,
        chunk_bytes=2**20,
        placement=placement,
        optimizer=files[moments],
    )
    costs = cost_model(HardwareSpec.load("a6000"), plan.model, plan.workload)
    time = uncontended_makespan_ns(policies.lower(plan), costs)
    assert 0.75 * time <= LowerBound(plan, costs).step_ns(plan) <= time


@pytest.mark.parametrize("moments", [0, 1])
def test_a_search_finds_a_plan_that_is_no_slower_and_needs_less(
    make_plan: Callable[..., Plan], files: dict[int, str], moments: int
) -> None:
    model, work = make_plan(layers=6).model, Workload(batch=2, sequence=16)
    outside = msgspec.structs.replace(work, optimizer=files[moments])
    ours, usual = (
        search(model, H200, each, policies=["overlapped"])[0] for each in (outside, work)
    )
    assert ours.plan.workload.optimizer == files[moments]
    assert ours.step_seconds <= usual.step_seconds
    small, large = (
        policies.lower(msgspec.structs.replace(usual.plan, workload=each))
        for each in (outside, work)
    )
    assert sum(b.bytes for b in small.buffers) < sum(b.bytes for b in large.buffers)
    costs = [cost_model(H200, model, each) for each in (outside, work)]
    assert makespan_ns(small, costs[0]) <= makespan_ns(large, costs[1])
