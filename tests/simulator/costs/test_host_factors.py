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

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice, assess, step_seconds, with_knobs
from megatrain.simulator.planner.search import candidates
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict.verdict import step_range

STORED = HardwareSpec.load(
    str(Path(__file__).parents[3] / "experiments" / "results" / "h200-heldout" / "hardware.toml")
)
MODEL = ModelSpec.load("qwen2.5-7b").with_layers(10)
WORK = Workload(batch=8, sequence=1024, documents=False)
GIB = 2**30
WIDE = (*[0.8] * 7, *[1.0] * 6, *[3.0] * 7)
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


def test_the_expected_step_is_the_mean_over_the_speeds_of_the_host(on_host: Plan) -> None:
    """The factors are those of two groups of equally many windows."""
    costs = cost_model(varying(WIDE), MODEL, WORK)
    assert costs.host_factors == (0.86, 2.4)
    schedule, steady = lower(on_host), cost_model(STORED, MODEL, WORK)
    each = [
        step_seconds(schedule, ScaledCosts(steady, lambda op: op, {"cpu": factor}))
        for factor in costs.host_factors
    ]
    assert each == sorted(each)
    assert each[-1] > 1.1 * each[0]
    expected = assess(on_host, costs)
    assert expected.step_seconds == pytest.approx(statistics.fmean(each))
    assert expected.plan.prediction is not None
    assert expected.plan.prediction.step_seconds == expected.step_seconds


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
    """With a steady host, the host updates layers. With one that is often three times slower, it
    updates fewer layers or none, and the plan is faster than that of the steady host would be.
    """
    steady, careful = choice(), choice(WIDE)
    assert len(careful.plan.placed("host_updated")) < len(steady.plan.placed("host_updated"))
    anyway = assess(steady.plan, cost_model(varying(WIDE), MODEL, WORK))
    assert steady.step_seconds < careful.step_seconds < anyway.step_seconds


def test_nine_of_ten_steps_lie_in_the_range(on_host: Plan) -> None:
    """Each step is simulated with a factor that is drawn from the distribution."""
    hardware, schedule = varying(EVEN), lower(on_host)
    expected = assess(on_host, cost_model(hardware, MODEL, WORK)).step_seconds
    low, high = step_range(on_host, expected, hardware)
    assert low is not None
    assert high is not None
    assert low < expected < high
    steady, draw = cost_model(STORED, MODEL, WORK), random.Random(1)
    drawn = [draw.choice(EVEN) for _ in range(100)]
    times = {
        factor: step_seconds(schedule, ScaledCosts(steady, lambda op: op, {"cpu": factor}))
        for factor in set(drawn)
    }
    assert sum(low <= times[factor] <= high for factor in drawn) >= 90


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
