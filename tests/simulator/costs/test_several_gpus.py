"""Tests of predictions for several GPUs that were measured together (`HardwareSpec.several`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.experiments.cli.verdict.reasons import rates_source
from megatrain.experiments.files.hardware_file import write_hardware
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.contention import PARTS
from megatrain.simulator.costs.several_gpus import link_share
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.hardware.several_gpus import CollectiveRate, SeveralGpus, nearest
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.operands import exchange_kernels
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan
from megatrain.simulator.verdict.verdict import judge, summarize

H200 = HardwareSpec.load("h200")
CALIBRATED = HardwareSpec.load("experiments/results/h200-heldout/hardware.toml")
WITHOUT_TURNS = HardwareSpec.load("rtx4090")
MODEL = ModelSpec.load("qwen2.5-1.5b").with_layers(8)
MIB = 2**20
FOUR = SeveralGpus(
    gpus=4,
    measured_on="NVIDIA H200",
    date="2026-11-28",
    copy_bytes=128 * MIB,
    h2d_gb_per_s=40.0,
    d2h_gb_per_s=36.0,
    h2d_both_gb_per_s=20.0,
    d2h_both_gb_per_s=24.0,
    gather=CollectiveRate(latency_ns=30_000, gb_per_s=300.0),
    exchange=CollectiveRate(latency_ns=40_000, gb_per_s=250.0),
    sum_gb_per_s=3000.0,
    compute_beside_gather=0.95,
    compute_beside_exchange=0.9,
    gather_wait=0.25,
    exchange_wait=0.5,
    collective_bytes=2000 * MIB,
    spread={"gather": 0.02, "exchange": 0.03, "h2d_gb_per_s": 0.01, "sum_gb_per_s": 0.001},
)


def changed(**fields: Any) -> SeveralGpus:
    return msgspec.structs.replace(FOUR, **fields)


def having(*several: SeveralGpus, machine: HardwareSpec = H200) -> HardwareSpec:
    return msgspec.structs.replace(machine, several=several)


def plan_of(gpus: int = 4, *, streams: bool = True) -> Plan:
    """Returns a plan that copies in both directions, or one that keeps all state on the GPUs."""
    everything = Placement(weights="all", master_low="all", moments="all", gradients="all")
    return Plan(
        policy="overlapped",
        model=MODEL,
        workload=Workload(batch=4, sequence=1024, accumulation=2 * gpus),
        hardware="h200",
        source="",
        gpus=gpus,
        knobs=Knobs(placement=Placement() if streams else everything),
        device_limit_bytes=H200.device_bytes,
        host_limit_bytes=H200.host_bytes,
    )


def seconds(measured: SeveralGpus, *, streams: bool) -> float:
    plan = plan_of(streams=streams)
    return assess(plan, cost_model(having(measured), plan.model, plan.workload, 4)).step_seconds


def copied_in_s(hardware: HardwareSpec, size: int, lane: str, *, both: bool) -> float:
    """Returns the predicted seconds of a copy while all GPUs copy, in one direction or in both."""
    costs = cost_model(hardware, MODEL, Workload(batch=4, sequence=1024), 4)
    ids = {"h2d": "W0f.m0", "d2h": "G0b.m0"}
    ops = {name: Op(id=text, lane=name, bytes=size) for name, text in ids.items()}
    demands = {name: costs.demand(op) for name, op in ops.items()}
    speed = PARTS
    if both:
        own, other = demands[lane], demands["d2h" if lane == "h2d" else "h2d"]
        assert own is not None
        assert other is not None
        speed = costs.rates((own, other))[0]
    return costs.duration_ns(ops[lane]) * PARTS / speed / 1e9


@pytest.mark.parametrize("machine", [H200, CALIBRATED, WITHOUT_TURNS], ids=lambda each: each.name)
@pytest.mark.parametrize("lane", ["h2d", "d2h"])
@pytest.mark.parametrize("both", [False, True])
def test_copies_have_the_measured_rates(machine: HardwareSpec, lane: str, both: bool) -> None:
    """`link_share` guesses nothing for a measured number of GPUs, whatever one GPU's curves are."""
    field = f"{lane}_both_gb_per_s" if both else f"{lane}_gb_per_s"
    found = copied_in_s(having(FOUR, machine=machine), FOUR.copy_bytes, lane, both=both)
    assert FOUR.copy_bytes / found / 1e9 == pytest.approx(getattr(FOUR, field), rel=1e-3)
    share = link_share(having(FOUR), 4)
    assert (share.alone, share.together) == (36.0, 20.0)


SLOWER: dict[str, tuple[Any, bool]] = {
    "h2d_gb_per_s": (2.0, True),
    "d2h_gb_per_s": (2.0, True),
    "h2d_both_gb_per_s": (1.0, True),
    "d2h_both_gb_per_s": (1.0, True),
    "gather": (CollectiveRate(latency_ns=30_000, gb_per_s=3.0), False),
    "gather latency": (CollectiveRate(latency_ns=10**7, gb_per_s=300.0), False),
    "exchange": (CollectiveRate(latency_ns=40_000, gb_per_s=2.5), False),
    "exchange latency": (CollectiveRate(latency_ns=10**7, gb_per_s=250.0), False),
    "sum_gb_per_s": (3.0, False),
    "compute_beside_gather": (0.1, False),
    "compute_beside_exchange": (0.1, False),
    "gather_wait": (100.0, False),
    "exchange_wait": (100.0, False),
}
"""Field -> a worse value, and whether the plan copies state."""


@pytest.mark.parametrize("name", SLOWER)
def test_each_number_changes_the_step(name: str) -> None:
    worse, streams = SLOWER[name]
    usual = seconds(FOUR, streams=streams)
    assert seconds(changed(**{name.partition(" ")[0]: worse}), streams=streams) > 1.01 * usual


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", [None, *SLOWER])
def test_no_step_is_faster_than_its_lower_bound(name: str | None, streams: bool) -> None:
    fast = dict.fromkeys(("h2d_both_gb_per_s", "d2h_both_gb_per_s"), 200.0)
    fields = {name.partition(" ")[0]: SLOWER[name][0]} if name else fast
    plan = plan_of(streams=streams)
    costs = cost_model(having(changed(**fields)), plan.model, plan.workload, 4)
    least = LowerBound(plan, costs).step_ns(plan)
    assert 0 < least <= makespan_ns(policies.lower(plan), costs)


def test_the_measured_memory_is_that_of_a_plan() -> None:
    plan = plan_of(streams=False)
    peaks = [
        assess(
            plan, cost_model(having(measured), plan.model, plan.workload, 4)
        ).account.device_peak_bytes
        for measured in (FOUR, changed(collective_bytes=2100 * MIB))
    ]
    assert peaks[1] - peaks[0] == 100 * MIB
    assert having(FOUR).collectives(1) == 0


def test_collectives_take_the_measured_times() -> None:
    plan = plan_of()
    schedule = policies.lower(plan)
    costs = cost_model(having(FOUR), plan.model, plan.workload, 4)
    gather, exchange = schedule.by_id["GW1f.m0"], schedule.by_id["GX1b.m0"]
    pieces = -(-exchange.parameters // exchange.elements)
    assert costs.duration_ns(gather) == pytest.approx(30_000 + gather.bytes / 300, abs=2)
    sums = (4 * 2 + 4) * exchange.parameters / 3000
    copies = 2 * 4 * 2 * exchange.parameters / H200.device_gb_per_s if pieces > 1 else 0.0
    expected = 40_000 * pieces + exchange.bytes / 250 + sums + copies
    assert costs.duration_ns(exchange) == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("machine", [H200, WITHOUT_TURNS], ids=lambda each: each.name)
@pytest.mark.parametrize("kind", ["gather_weights", "exchange_gradients"])
def test_compute_and_collectives_share_a_gpu_as_measured(machine: HardwareSpec, kind: str) -> None:
    """A machine that does not say how updates and compute share the GPU uses the numbers, too."""
    plan = plan_of()
    schedule = policies.lower(plan)
    costs = cost_model(having(FOUR, machine=machine), plan.model, plan.workload, 4)
    op = next(op for op in schedule.ops if op.kind == kind)
    layer = next(op for op in schedule.ops if op.kind == "forward")
    computing, collective = costs.demand(layer), costs.demand(op)
    assert computing is not None
    assert collective is not None
    rates = costs.rates((computing, collective))
    exchanges = kind == "exchange_gradients"
    assert rates[0] == (900_000 if exchanges else 950_000)
    product = costs.costs.product_ns  # type: ignore[attr-defined]
    alone, wait = costs.duration_ns(op), (0.5 if exchanges else 0.25) * product
    late = alone * PARTS / rates[1] - alone
    assert late == pytest.approx(exchange_kernels(op) * wait, rel=1e-2)
    assert costs.rates((collective,)) == (PARTS,)


def test_one_gpu_is_predicted_as_before() -> None:
    work = Workload(batch=4, sequence=1024)
    one, other = (judge(MODEL, machine, work) for machine in (H200, having(FOUR)))
    assert one.step_seconds == other.step_seconds
    assert rates_source(other) == "from datasheets, not measured"


def test_the_nearest_number_of_gpus_is_used() -> None:
    two = changed(gpus=2, collective_bytes=1000 * MIB)
    assert [nearest((two, FOUR), gpus) for gpus in (1, 2, 3, 8)] == [None, two, FOUR, FOUR]
    assert nearest((), 2) is None
    machine = having(FOUR)
    each = H200.collective_peer_bytes
    assert machine.collectives(2) == 2000 * MIB - 2 * each
    assert machine.collectives(8) == 2000 * MIB + 4 * each
    plan = plan_of(2)
    schedule = policies.lower(plan)
    gather = schedule.by_id["GW1f.m0"]
    costs = cost_model(machine, plan.model, plan.workload, 2)
    assert costs.duration_ns(gather) == pytest.approx(30_000 + gather.bytes / 300, abs=2)


def test_links_of_another_number_of_gpus_have_the_same_rate_together() -> None:
    """All links reached 4 x 44 GB/s, and less than one GPU alone, so this is what the host can."""
    eight, two = (link_share(having(FOUR), gpus) for gpus in (8, 2))
    assert (eight.alone, eight.together) == (176 / 8, 176 / 16)
    assert two.alone == pytest.approx(min(H200.h2d_gb_per_s, H200.d2h_gb_per_s))
    assert two.together == pytest.approx(176 / 4)
    faster = dict.fromkeys(("h2d_gb_per_s", "d2h_gb_per_s"), 55.3)
    faster |= dict.fromkeys(("h2d_both_gb_per_s", "d2h_both_gb_per_s"), 50.2)
    free = changed(gpus=2, **faster)
    assert link_share(having(free), 8).alone == pytest.approx(4 * 50.2 / 8)
    assert link_share(having(changed(gpus=2, **dict.fromkeys(faster, 10.0))), 4).alone == 10.0
    own_memory = msgspec.structs.replace(having(FOUR), link="NVLink-C2C")
    assert link_share(own_memory, 8).alone == pytest.approx(H200.d2h_gb_per_s)


# ---- ranges and words


def test_a_measured_number_of_gpus_of_a_calibrated_machine_has_a_range() -> None:
    def ends(measured: tuple[SeveralGpus, ...], gpus: int = 4) -> tuple[Any, Any, str]:
        machine = having(*measured, machine=CALIBRATED)
        plan = plan_of(gpus)
        choice = assess(plan, cost_model(machine, plan.model, plan.workload, gpus))
        verdict = summarize(choice, machine)
        if verdict.step_seconds_low is None or verdict.step_seconds_high is None:
            return None, None, rates_source(verdict)
        assert verdict.step_seconds_low < verdict.step_seconds < verdict.step_seconds_high
        low, high = verdict.step_seconds_low, verdict.step_seconds_high
        return low / verdict.step_seconds, high / verdict.step_seconds, rates_source(verdict)

    date = CALIBRATED.costs.date if CALIBRATED.costs else ""
    low, high, text = ends((FOUR,))
    assert text == f"measured {date}, and 4 GPUs together 2026-11-28"
    for name in ("gather", "exchange", "sum_gb_per_s", "h2d_gb_per_s", "d2h_gb_per_s"):
        wide = changed(spread=FOUR.spread | {name: 2.0})
        lower, higher, _ = ends((wide,))
        assert lower < low
        assert higher > high
    assert ends((changed(spread={}),))[0] is None
    low, _, text = ends((FOUR,), gpus=2)
    assert low is None
    assert text == (
        f"measured {date}, and 4 GPUs together 2026-11-28, so the range for 2 is not known"
    )
    assert ends(())[2] == f"measured {date} on one GPU, so the range for 4 is not known"


def test_measured_collectives_are_not_extrapolated() -> None:
    plan = plan_of()
    gather = policies.lower(plan).by_id["GW1f.m0"]
    for measured, flagged in (((FOUR,), False), ((), True), ((changed(gpus=2),), True)):
        machine = having(*measured, machine=CALIBRATED)
        costs = cost_model(machine, plan.model, plan.workload, 4)
        assert costs.extrapolated(gather) == flagged


def test_check_says_that_several_gpus_were_measured() -> None:
    work = Workload(batch=4, sequence=1024)
    for machine, words in (
        (having(FOUR), "4 GPUs were measured together on 2026-11-28"),
        (H200, "links share the host's memory bandwidth"),
    ):
        several = judge(MODEL, machine, work, gpus=4).multi_gpu
        assert several is not None
        assert words in several.note
    plan = plan_of()
    machine = having(FOUR)
    choice = assess(plan, cost_model(machine, plan.model, plan.workload, 4))
    verdict = summarize(choice, machine)
    assert rates_source(verdict) == "from datasheets; 4 GPUs measured together 2026-11-28"
    assert (verdict.gpus_measured, verdict.gpus_measured_date) == (4, "2026-11-28")
    other = msgspec.structs.replace(verdict, measured_by_others="2026-11-23")
    assert rates_source(other).endswith("by a file of others; 4 GPUs measured together 2026-11-28")


# ---- the file


@pytest.mark.parametrize("machine", [H200, CALIBRATED], ids=["library", "calibrated"])
def test_a_file_keeps_the_measurements(machine: HardwareSpec, tmp_path: Path) -> None:
    machine = having(changed(gpus=2), FOUR, machine=machine)
    path = tmp_path / "machine.toml"
    write_hardware(path, machine, "megatrain calibrate --several")
    assert HardwareSpec.load(str(path)) == machine
    text = path.read_text()
    assert text.count("[[several]]") == 2
    assert "# What several GPUs do to each other" in text


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"gpus": 1}, "gpus: found 1;"),
        ({"gpus": 17}, "gpus: found 17;"),
        ({"copy_bytes": 0}, "copy_bytes: found 0;"),
        ({"d2h_both_gb_per_s": 0.0}, "d2h_both_gb_per_s: found 0"),
        ({"sum_gb_per_s": float("nan")}, "sum_gb_per_s: found nan;"),
        ({"gather": CollectiveRate(latency_ns=-1, gb_per_s=1.0)}, "gather.latency_ns: found -1;"),
        ({"exchange": CollectiveRate(latency_ns=1, gb_per_s=0.0)}, "exchange.gb_per_s: found 0"),
        ({"compute_beside_gather": 1.1}, "compute_beside_gather: found 1.1;"),
        ({"exchange_wait": -0.1}, "exchange_wait: found -0.1;"),
        ({"collective_bytes": -1}, "collective_bytes: found -1;"),
        ({"spread": {"gathers": 0.1}}, "spread: found 'gathers';"),
        ({"spread": {"gather": -0.1}}, "spread.gather: found -0.1;"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else None,
)
def test_numbers_out_of_range_are_refused(fields: dict[str, Any], found: str) -> None:
    known = {name: getattr(FOUR, name) for name in FOUR.__struct_fields__}
    with pytest.raises(UserError, match=r"several \(\d+ GPUs\): ") as error:
        SeveralGpus(**(known | fields))
    assert found in str(error.value)


def test_each_number_of_gpus_has_one_measurement_in_ascending_order() -> None:
    fields = {name: getattr(H200, name) for name in H200.__struct_fields__}
    for several in ((FOUR, FOUR), (FOUR, changed(gpus=2))):
        with pytest.raises(UserError, match="hardware h200: several: found measurements of 4"):
            HardwareSpec(**(fields | {"several": several}))
