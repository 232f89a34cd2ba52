"""Tests of the range of a prediction, which follows from the spreads of measurements."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import small_model

from megatrain.experiments.cli.verdict.reasons import rates_source
from megatrain.simulator import policies
from megatrain.simulator.base.files import convert, read_json
from megatrain.simulator.costs import Calibrated, cost_model
from megatrain.simulator.costs.adjusted import WithinSpread
from megatrain.simulator.engine.evaluator import uncontended_makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.metrics import mfu
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice, assess
from megatrain.simulator.planner.shared_step import shared_step
from megatrain.simulator.schedule.plan import Knobs, Plan
from megatrain.simulator.verdict.verdict import described, judge, summarize

PROOF = Path(__file__).parents[3] / "experiments" / "results" / "h200-heldout"
CALIBRATIONS = Path(__file__).parents[2] / "shared" / "calibrations"
MACHINES = [
    PROOF / "hardware.toml",
    *(CALIBRATIONS / f"{name}.toml" for name in ("other-host", "noisy-host", "default-set")),
]


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_op_is_shorter_on_the_slower_machine(path: Path) -> None:
    """No op takes less time at the slow end of the range, and no op more at the fast end.

    Sizes are between, below and above the measured ones. One policy is that of another system,
    whose ops were not measured.
    """
    hardware, model = HardwareSpec.load(str(path)), ModelSpec.load("qwen2.5-0.5b").with_layers(2)
    for policy in (*policies.names(), "zero3_offload"):
        for batch in (1, 48):
            work = Workload(batch=batch, sequence=512)
            plan = Plan(
                policy=policy,
                hardware="",
                source="",
                device_limit_bytes=2**40,
                host_limit_bytes=2**40,
                model=model,
                workload=work,
                knobs=Knobs(weight_slots=1 if policy == "sequential" else 2),
            )
            costs = cost_model(hardware, model, work)
            assert isinstance(costs, Calibrated)
            short, long = (WithinSpread(costs, 0.1, longer=longer) for longer in (False, True))
            for op in policies.lower(plan).ops:
                usual = costs.duration_ns(op)
                assert short.duration_ns(op) <= usual <= long.duration_ns(op)
                if costs.extrapolated(op):
                    assert long.duration_ns(op) == round(usual * 1.1)


def test_the_spread_of_the_nearest_number(machine: HardwareSpec, plan: Plan) -> None:
    assert machine.costs is not None
    costs = cost_model(machine, plan.model, plan.workload)
    assert isinstance(costs, Calibrated)
    spreads = machine.costs.spread
    update = next(op for op in policies.lower(plan).ops if op.kind == "cpu_update")
    curve = costs._curve(update)
    for parameters, nearest in ((9 * 10**6, 2**22), (12 * 10**6, 2**24), (10, 2**14)):
        assert (
            costs.spread(msgspec.structs.replace(update, parameters=parameters))
            == spreads[f"{curve} {nearest}"]
        )
    (forward,) = {costs.spread(op) for op in policies.lower(plan).ops if op.kind == "forward"}
    near = [
        spread
        for name, spread in spreads.items()
        if name.startswith("forward llama") and "/3x2048-" in name
    ]
    assert [forward] == near, "the spread of the nearest number of tokens"


class Stored(msgspec.Struct, frozen=True):
    """The fields of an entry of `plans.json` that these tests need."""

    name: str
    choice: Choice


@pytest.fixture(scope="module")
def machine() -> HardwareSpec:
    return HardwareSpec.load(str(PROOF / "hardware.toml"))


def chosen(plan: Plan, machine: HardwareSpec) -> Choice:
    return assess(plan, cost_model(machine, plan.model, plan.workload))


@pytest.fixture(scope="module")
def plan() -> Plan:
    """The planner's choice for four micro-batches."""
    entries = convert(read_json(PROOF / "plans.json"), list[Stored], "plans.json")
    return next(
        entry.choice.plan for entry in entries if entry.name == "llama-3.2-3b-8/4x8x1024/16GiB/best"
    )


def test_a_calibrated_step_has_a_range(plan: Plan, machine: HardwareSpec) -> None:
    verdict = summarize(chosen(plan, machine), machine)
    assert verdict.step_seconds_low is not None
    assert verdict.step_seconds_high is not None
    assert (
        0.9 * verdict.step_seconds
        < verdict.step_seconds_low
        < verdict.step_seconds
        < verdict.step_seconds_high
        < 1.1 * verdict.step_seconds
    )
    assert verdict.uncertainty is None
    assert machine.costs is not None
    wider = msgspec.structs.replace(
        machine.costs, spread={name: 2 * spread for name, spread in machine.costs.spread.items()}
    )
    noisy = summarize(chosen(plan, machine), msgspec.structs.replace(machine, costs=wider))
    assert noisy.step_seconds_low is not None
    assert noisy.step_seconds_high is not None
    assert noisy.step_seconds_low < verdict.step_seconds_low
    assert noisy.step_seconds_high > verdict.step_seconds_high


def test_the_relative_range_of_any_number_of_micro_batches_is_that_of_two(
    plan: Plan, machine: HardwareSpec
) -> None:
    ranges = []
    for accumulation in (2, 4):
        work = msgspec.structs.replace(plan.workload, accumulation=accumulation)
        found = summarize(chosen(msgspec.structs.replace(plan, workload=work), machine), machine)
        assert found.step_seconds_low is not None
        assert found.step_seconds_high is not None
        ranges.append(
            (
                found.step_seconds_low / found.step_seconds,
                found.step_seconds_high / found.step_seconds,
            )
        )
    assert ranges[0] == pytest.approx(ranges[1], rel=1e-12)


def test_the_range_of_large_groups_is_that_of_the_whole_step(
    plan: Plan, machine: HardwareSpec
) -> None:
    """Two groups of 16 micro-batches are shortened with the same shares of copies and compute."""
    config = {**plan.model.config, "tie_word_embeddings": False}
    grouped = msgspec.structs.replace(
        plan,
        model=ModelSpec(name=plan.model.name, config=config),
        workload=msgspec.structs.replace(plan.workload, batch=1, accumulation=32),
        knobs=Knobs(micro_batch_group=16),
        device_limit_bytes=2**40,
        host_limit_bytes=2**40,
    )
    choice = chosen(grouped, machine)
    costs, schedule = (
        cost_model(machine, grouped.model, grouped.workload),
        policies.lower(grouped),
    )
    assert isinstance(costs, Calibrated)
    slow = WithinSpread(costs, machine.uncertainty, longer=True)
    share = uncontended_makespan_ns(schedule, slow) / uncontended_makespan_ns(schedule, costs)
    verdict = summarize(choice, machine)
    assert verdict.step_seconds_high is not None
    assert verdict.step_seconds_high / verdict.step_seconds - 1 == pytest.approx(share - 1, rel=0.1)


def test_mfu_is_of_the_datasheet_s_peak_and_not_of_the_measured_product(
    plan: Plan, machine: HardwareSpec
) -> None:
    verdict, sheet = summarize(chosen(plan, machine), machine), HardwareSpec.load("h200")
    peaks = [each.peak_tflops["bf16"] for each in (sheet, machine)]
    assert peaks[1] < 0.9 * peaks[0]
    expected = [mfu(plan.model, plan.workload, verdict.step_seconds, peak) for peak in peaks]
    assert [verdict.mfu, verdict.matmul_rate_share] == expected
    assert verdict.machine == "H200"
    assert not verdict.host_memory_assumed
    assert machine.costs is not None
    elsewhere = msgspec.structs.replace(
        machine, costs=msgspec.structs.replace(machine.costs, measured_on="NVIDIA TITAN X")
    )
    unknown = summarize(chosen(plan, elsewhere), elsewhere)
    assert (unknown.mfu, unknown.matmul_rate_share) == (None, expected[1])
    assert unknown.machine == f"machine {machine.name}"
    unmeasured = summarize(chosen(plan, sheet), sheet)
    assert unmeasured.matmul_rate_share is None
    assert unmeasured.mfu is not None


def test_without_spreads_or_room_there_is_no_range(plan: Plan, machine: HardwareSpec) -> None:
    assert machine.costs is not None
    old = msgspec.structs.replace(machine, costs=msgspec.structs.replace(machine.costs, spread={}))
    small = msgspec.structs.replace(plan, device_limit_bytes=2**30)
    for verdict in (
        summarize(chosen(plan, machine), old),
        summarize(chosen(small, machine), machine),
    ):
        assert (verdict.step_seconds_low, verdict.step_seconds_high) == (None, None)


def test_several_gpus_have_no_range_if_one_was_calibrated(
    plan: Plan, machine: HardwareSpec
) -> None:
    """The spreads are those of one GPU. They do not contain collectives."""
    for hardware, known in ((machine, False), (HardwareSpec.load("h200"), True)):
        one = assess(plan, cost_model(hardware, plan.model, plan.workload))
        shared = summarize(shared_step(plan, hardware, 2), hardware)
        assert shared.feasible
        assert (shared.step_seconds_low is not None) == known
        assert ("so the range for 2 is not known" in rates_source(shared)) != known
        verdict = described(one, hardware, gpus=2, tokens=10**9, kernel_chosen=False)
        assert verdict.step_seconds_low is not None
        assert "is not known" not in rates_source(verdict)
        assert verdict.training is not None
        assert (verdict.training.hours_low is not None) == known
        assert (verdict.training.hours_high is not None) == known


def test_the_range_of_a_datasheet_has_not_changed() -> None:
    work = Workload(batch=1, sequence=128)
    verdict = judge(small_model.SMALL, HardwareSpec.load("h200"), work, advise=False)
    assert verdict.uncertainty == 0.10
    assert (verdict.step_seconds_low, verdict.step_seconds_high) == pytest.approx(
        (0.9 * verdict.step_seconds, 1.1 * verdict.step_seconds)
    )
