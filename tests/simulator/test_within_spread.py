"""How far a calibrated machine's predictions may be off, by the spreads of what was measured on it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import small_model

from megatrain.simulator.assessment import Choice, assess
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.within_spread import faster, slower
from megatrain.simulator.files import convert, read_json
from megatrain.simulator.hardware import CostTable, HardwareSpec
from megatrain.simulator.plan import Plan
from megatrain.simulator.verdict import brief, judge
from megatrain.simulator.workload import Workload

PROOF = Path(__file__).parents[2] / "experiments" / "results" / "h200-prove"
TABLE = CostTable(
    measured_on="", date="", curves={"norm": ((0, 0), (10, 1), (20, 400))}, compute={"forward": {"a/1x1-bf16": (7, 1000)}},
    spread={"norm 20": 0.25, "norm 10": 0.9, "forward a/1x1-bf16": 1.5, "gone 7": 3.0},
)  # fmt: skip


def test_each_number_by_its_own_spread() -> None:
    assert slower(TABLE).curves == {"norm": ((0, 0), (10, 2), (20, 500))}
    assert faster(TABLE).curves == {"norm": ((0, 0), (10, 1), (20, 320))}, "nothing takes no time that took some"
    assert slower(TABLE).compute == {"forward": {"a/1x1-bf16": (7, 2500)}}
    assert faster(TABLE).compute == {"forward": {"a/1x1-bf16": (7, 400)}}
    assert slower(msgspec.structs.replace(TABLE, spread={})).curves == TABLE.curves


class Stored(msgspec.Struct, frozen=True):
    """Of `plans.json`, what this needs."""

    name: str
    choice: Choice


@pytest.fixture(scope="module")
def machine() -> HardwareSpec:
    return HardwareSpec.load(str(PROOF / "hardware.toml"))


def chosen(plan: Plan, machine: HardwareSpec) -> Choice:
    return assess(plan, cost_model(machine, plan.model, plan.workload))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The planner's, of four micro-batches."""
    entries = convert(read_json(PROOF / "plans.json"), list[Stored], "plans.json")
    return next(entry.choice.plan for entry in entries if entry.name == "llama-3.2-3b-8/4x8x1024/16GiB/best")


def test_a_calibrated_step_has_a_range(plan: Plan, machine: HardwareSpec) -> None:
    told = brief(chosen(plan, machine), machine)
    assert told.step_seconds_low is not None
    assert told.step_seconds_high is not None
    assert 0.9 * told.step_seconds < told.step_seconds_low < told.step_seconds < told.step_seconds_high < 1.1 * told.step_seconds
    assert told.uncertainty is None
    assert machine.costs is not None
    wider = msgspec.structs.replace(machine.costs, spread={name: 2 * spread for name, spread in machine.costs.spread.items()})
    noisy = brief(chosen(plan, machine), msgspec.structs.replace(machine, costs=wider))
    assert noisy.step_seconds_low is not None
    assert noisy.step_seconds_high is not None
    assert noisy.step_seconds_low < told.step_seconds_low
    assert noisy.step_seconds_high > told.step_seconds_high


def test_without_spreads_or_room_there_is_no_range(plan: Plan, machine: HardwareSpec) -> None:
    assert machine.costs is not None
    old = msgspec.structs.replace(machine, costs=msgspec.structs.replace(machine.costs, spread={}))
    small = msgspec.structs.replace(plan, device_limit_bytes=2**30)
    for told in (brief(chosen(plan, machine), old), brief(chosen(small, machine), machine)):
        assert (told.step_seconds_low, told.step_seconds_high) == (None, None)


def test_a_datasheets_range_is_what_it_was() -> None:
    told = judge(small_model.SMALL, HardwareSpec.load("h200"), Workload(batch=1, sequence=128))
    assert told.uncertainty == 0.10
    assert (told.step_seconds_low, told.step_seconds_high) == pytest.approx((0.9 * told.step_seconds, 1.1 * told.step_seconds))
