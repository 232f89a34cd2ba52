"""Tests of a host whose speed varies: the expected step time, the choice of a plan, and the range
of the step time.

The machine is a calibrated H200 with made-up factors on the time of the CPU's ops.
"""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import msgspec
import pytest

from megatrain.experiments.sweep.simulated import Simulator
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.costs.adjusted import WithinSpread
from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.engine.evaluator import uncontended_makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import (
    Choice,
    assess,
    expected_ns,
    step_seconds,
    with_knobs,
)
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.planner.search import candidates
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.verdict.multi_gpu import estimate
from megatrain.simulator.verdict.step_range import step_range
from megatrain.simulator.verdict.verdict import described

RESULTS = Path(__file__).parents[3] / "experiments" / "results"
STORED = HardwareSpec.load(str(RESULTS / "h200-heldout" / "hardware.toml"))
MODEL = ModelSpec.load("qwen2.5-7b").with_layers(10)
WORK = Workload(batch=8, sequence=1024, documents=False)
GIB = 2**30
WIDE = (*[0.8] * 7, *[1.0] * 6, *[3.0] * 7)
SKEWED = (*[0.6] * 4, *[1.0] * 16)
"""The host is sometimes faster, so the mean is below the median."""
EXTREME = (*[0.01] * 10, *[1.99] * 10)
EVEN = tuple(round(0.9 + 0.01 * step, 2) for step in range(21))
"""Times from 0.9 to 1.1 of the median."""


def varying(factors: tuple[float, ...]) -> HardwareSpec:
    """Returns the machine with these factors."""
    assert STORED.costs is not None
    return msgspec.structs.replace(
        STORED, costs=msgspec.structs.replace(STORED.costs, host_factors=factors)
    )


def choice(factors: tuple[float, ...] = (), device: float = 30) -> Choice:
    """Returns the best plan of `overlapped` with `device` GiB of device memory."""
    return candidates(
        MODEL,
        varying(factors),
        WORK,
        device_limit=int(device * GIB),
        host_limit=110 * GIB,
        policies=["overlapped"],
    )[0]


@pytest.fixture(scope="module")
def on_host() -> Plan:
    """Returns a plan that updates layers on the host."""
    plan = choice().plan
    assert plan.knobs.placement.host_updated
    return plan


def steps(plan: Plan, factors: tuple[float, ...]) -> list[float]:
    """Returns the step time of `plan` on the steady machine, with the time of the CPU's ops
    multiplied by each of `factors`.
    """
    schedule, steady = lower(plan), cost_model(STORED, MODEL, WORK)
    return [
        step_seconds(schedule, ScaledCosts(steady, lambda op: op, {"cpu": factor}))
        for factor in factors
    ]


@pytest.mark.parametrize("factors", [WIDE, EVEN, SKEWED])
def test_the_expected_step_is_the_mean_over_the_speeds_of_the_host(
    on_host: Plan, factors: tuple[float, ...]
) -> None:
    """Two groups of equally many windows are simulated. Their mean is almost that over all."""
    costs, half = cost_model(varying(factors), MODEL, WORK), len(factors) // 2
    groups = tuple(map(statistics.fmean, (factors[:half], factors[-half:])))
    assert costs.host_factors == pytest.approx(
        [group / statistics.fmean(groups) for group in groups], abs=1e-4
    )
    expected = assess(on_host, costs)
    assert expected.step_seconds == pytest.approx(
        statistics.fmean(steps(on_host, groups)), rel=1e-4
    )
    assert expected.step_seconds == pytest.approx(
        statistics.fmean(steps(on_host, factors)), rel=1e-3
    )
    assert expected.plan.prediction is not None
    assert expected.plan.prediction.step_seconds == expected.step_seconds


@pytest.mark.parametrize("factors", [WIDE, EVEN, SKEWED])
def test_one_simulation_has_the_mean_speed_and_bounds_hold_for_the_expected_step(
    on_host: Plan, factors: tuple[float, ...]
) -> None:
    """The search leaves out plans by bounds that are computed with the mean speed."""
    costs, schedule = cost_model(varying(factors), MODEL, WORK), lower(on_host)
    (at_mean,) = steps(on_host, (statistics.fmean(factors),))
    assert makespan_ns(schedule, costs) + costs.step_overhead_ns == pytest.approx(1e9 * at_mean)
    expected = 1e9 * assess(on_host, costs).step_seconds
    assert LowerBound(on_host, costs).step_ns(on_host) <= expected
    assert expected_ns(schedule, costs, uncontended_makespan_ns) >= 0.9999 * (
        uncontended_makespan_ns(schedule, costs)
    )


def hiding(plan: Plan, batch: int) -> Plan:
    """Returns a plan that updates all layers on the host, beside the compute of `batch` rows."""
    work = msgspec.structs.replace(WORK, batch=batch)
    placement = Placement(host_updated=f"0-{MODEL.layers - 1}")
    return with_knobs(msgspec.structs.replace(plan, workload=work), placement=placement)


@pytest.mark.parametrize(("batch", "longer"), [(16, True), (64, False)])
def test_waiting_for_a_slow_host_counts_as_waiting_for_the_optimizer_on_the_cpu(
    on_host: Plan, batch: int, longer: bool
) -> None:
    """With the first batch, updates are hidden at the mean speed but not at the lowest. So the
    expected step is longer than the simulated one. With the other, it is shorter.
    """
    plan = hiding(on_host, batch)
    choices = [
        (assess(plan, cost_model(hardware, MODEL, plan.workload)), hardware)
        for hardware in (STORED, varying(EXTREME))
    ]
    (steady, _), (uneven, _) = choices
    assert (uneven.step_seconds > 1.01 * steady.step_seconds) == longer
    shares = [described(*each, kernel_chosen=False).step_shares for each in choices]
    assert [sum(share.values()) for share in shares] == pytest.approx([1.0, 1.0])
    more = shares[1]["host_optimizer"] - shares[0]["host_optimizer"]
    assert more > 0.01 if longer else more == pytest.approx(0, abs=1e-4)
    assert shares[1]["nothing_else"] == pytest.approx(shares[0]["nothing_else"], abs=0.003)


def test_several_gpus_and_sweeps_are_predicted_with_the_expected_step(on_host: Plan) -> None:
    plan = hiding(on_host, 16)
    schedule = lower(plan)
    choices, shared, swept = [], list[float](), list[float]()
    for hardware in (STORED, varying(EXTREME)):
        costs = cost_model(hardware, MODEL, plan.workload)
        choices.append(assess(plan, costs))
        one = estimate(
            plan, schedule, choices[-1].account, hardware, costs, choices[-1].step_seconds, 1
        )
        shared.append(one.step_seconds)
        row = Simulator(hardware).row(plan, "key")
        assert row.step_seconds is not None
        swept.append(row.step_seconds)
    expected = [choice.step_seconds for choice in choices]
    assert expected[1] > 1.01 * expected[0]
    assert shared == pytest.approx(expected)
    assert swept == pytest.approx(expected)


@pytest.mark.parametrize(
    "stored",
    [
        path
        for path in sorted(RESULTS.glob("h200-*/hardware*.toml"))
        if "host_factors = [" not in path.read_text()
    ],
    ids=lambda path: path.parent.name,
)
def test_machines_that_were_measured_before_are_predicted_as_before(
    stored: Path, on_host: Plan
) -> None:
    """They have no factors. A step is then simulated once, with the durations of the table."""
    hardware = HardwareSpec.load(str(stored))
    assert hardware.costs is not None
    assert hardware.costs.host_factors == ()
    costs, played = cost_model(hardware, MODEL, WORK), list[CostModel]()
    size, duration = hardware.costs.curves["cpu_update"][-1]
    assert costs.duration_ns(Op(id="UC0", lane="cpu", parameters=size)) == duration
    expected_ns(lower(on_host), costs, lambda _, model: played.append(model) or 1.0)
    assert played == [costs]


def test_the_speed_of_the_host_does_not_matter_to_a_plan_that_updates_on_the_device(
    on_host: Plan,
) -> None:
    placement = msgspec.structs.replace(on_host.knobs.placement, host_updated="")
    on_device = with_knobs(on_host, placement=placement)
    wide, steady = (cost_model(varying(factors), MODEL, WORK) for factors in (WIDE, ()))
    assert assess(on_device, wide).step_seconds == assess(on_device, steady).step_seconds


def test_a_host_that_hardly_varies_changes_nothing(on_host: Plan) -> None:
    costs = cost_model(varying((0.999, 1.0, 1.001)), MODEL, WORK)
    assert costs.host_factors == ()
    assert assess(on_host, costs) == assess(on_host, cost_model(STORED, MODEL, WORK))


def test_a_plan_is_chosen_by_its_expected_time() -> None:
    """With a steady host, the host updates layers. With one that is often three times slower, the
    device updates all, and the step is shorter than with the steady host's plan.
    """
    steady, narrow, careful = choice(), choice((0.98, 0.99, 1.0, 1.01, 1.02)), choice(WIDE)
    assert len(steady.plan.placed("host_updated")) == len(narrow.plan.placed("host_updated")) > 3
    assert not careful.plan.placed("host_updated")
    anyway = assess(steady.plan, cost_model(varying(WIDE), MODEL, WORK))
    assert steady.step_seconds < careful.step_seconds < anyway.step_seconds


def test_nine_of_ten_steps_lie_in_the_range(on_host: Plan) -> None:
    """Each step is simulated with a factor that is drawn from the distribution."""
    hardware, draw = varying(EVEN), random.Random(1)
    expected = assess(on_host, cost_model(hardware, MODEL, WORK)).step_seconds
    low, high = step_range(on_host, expected, hardware)
    assert low is not None
    assert high is not None
    assert low < expected < high
    drawn = [draw.choice(EVEN) for _ in range(100)]
    times = dict(zip(EVEN, steps(on_host, EVEN), strict=True))
    assert sum(low <= times[factor] <= high for factor in drawn) >= 90


@pytest.mark.parametrize("count", [19, 24, 40, 100])
def test_nine_of_ten_later_updates_lie_in_the_range_of_a_calibration(count: int) -> None:
    """A calibration has only `count` windows, so the range must be wider than the quantiles of
    these.
    """
    draw, update, within, later = random.Random(2), Op(id="UC0", lane="cpu", parameters=2**24), 0, 0
    assert STORED.costs is not None
    usual = Calibrated(STORED.costs).duration_ns(update)
    for _ in range(300):
        factors = sorted(draw.lognormvariate(0, 0.15) for _ in range(count))
        costs = Calibrated(msgspec.structs.replace(STORED.costs, host_factors=tuple(factors)))
        short, long = (
            WithinSpread(costs, 0.1, longer=longer).duration_ns(update) for longer in (False, True)
        )
        for _ in range(30):
            later += 1
            within += short <= usual * draw.lognormvariate(0, 0.15) <= long
    assert 0.89 <= within / later <= 0.97


def test_an_extrapolated_update_is_as_uncertain_as_its_factor_and_its_rate_together() -> None:
    assert STORED.costs is not None
    table = msgspec.structs.replace(STORED.costs, host_factors=EVEN)
    costs = Calibrated(table)
    largest = max(size for size, _ in table.curves["cpu_update"])
    for size, times in ((largest, 1.1), (8 * largest, 1.1 * 1.2)):
        update = Op(id="UC0", lane="cpu", parameters=size)
        assert costs.extrapolated(update) == (size > largest)
        longer = WithinSpread(costs, 0.2, longer=True).duration_ns(update)
        assert longer == pytest.approx(times * costs.duration_ns(update), rel=1e-3)


def test_the_range_of_a_host_that_varies_more_is_wider(on_host: Plan) -> None:
    ranges = []
    for factors in ((0.99, 1.0, 1.01), WIDE):
        low, high = step_range(on_host, 1.0, varying(factors))
        assert low is not None
        assert high is not None
        ranges.append(high - low)
    assert ranges[1] > 2 * ranges[0]


@pytest.mark.parametrize("factors", [(1.0, 0.9), (-1.0, 1.0), (0.0,)])
def test_factors_that_are_not_positive_and_ascending_are_refused(
    factors: tuple[float, ...],
) -> None:
    with pytest.raises(UserError, match=r"costs\.host_factors: found .*positive numbers"):
        varying(factors)
