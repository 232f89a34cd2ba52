"""Tests of the planner: its choice fits and is as good as that of a brute-force search.

If nothing fits, it says why.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from small_model import SMALL

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Estimate, group_sizes, with_knobs
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import Choice, assess, search
from megatrain.simulator.planner.slot_search import intervals

pytestmark = pytest.mark.usefixtures("without_libraries")

GIB = 2**30
H200 = HardwareSpec.load("h200")
WORK = Workload(batch=32, sequence=1024)


def find(model: ModelSpec, workload: Workload = WORK, **limits: int) -> list[Choice]:
    return search(model, H200, workload, source="model", hardware_name="h200", **limits)


def test_resident_wins_where_it_fits() -> None:
    choices = find(SMALL)
    assert choices[0].plan.policy in ("resident", "overlapped")
    assert not any(op.lane in ("h2d", "d2h") for op in policies.lower(choices[0].plan).ops)
    assert all(choice.feasible for choice in choices)
    assert [choice.step_seconds for choice in choices] == sorted(
        choice.step_seconds for choice in choices
    )
    assert {choice.plan.policy for choice in choices} == set(policies.contenders())


def test_streaming_wins_where_resident_does_not_fit() -> None:
    choices = find(SMALL, device_limit=8 * GIB)
    assert choices[0].feasible
    assert choices[0].plan.policy == "overlapped"
    assert choices[-1].plan.policy == "resident"
    assert not choices[-1].feasible
    assert choices[-1].account.binding.startswith("device.")


def test_a_plan_carries_its_digest_and_prediction_and_reads_back(tmp_path: Path) -> None:
    for choice in find(SMALL, device_limit=8 * GIB):
        schedule = policies.lower(choice.plan)
        schedule.check()
        assert choice.plan.digest == schedule.digest
        prediction = choice.plan.prediction
        assert prediction is not None
        assert prediction.step_seconds == choice.step_seconds >= prediction.lower_bound_seconds > 0
        assert (prediction.device_peak_bytes, prediction.host_peak_bytes) == (
            choice.account.device_peak_bytes,
            choice.account.host_peak_bytes,
        )
        choice.plan.save(tmp_path / "plan.toml")
        assert type(choice.plan).load(tmp_path / "plan.toml") == choice.plan


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 6), (1, 12)])
def test_micro_batches_are_grouped_where_copies_are_slow(batch: int, accumulation: int) -> None:
    """The choice is much faster than the same plan with single micro-batches."""
    work = Workload(batch=batch, sequence=1024, accumulation=accumulation)
    limits = {"device_limit": 4 * GIB, "policies": ["overlapped"]}
    choice = find(SMALL, work, **limits)[0]
    assert choice.feasible
    assert choice.plan.knobs.micro_batch_group > 1
    alone = assess(
        with_knobs(choice.plan, micro_batch_group=1), cost_model(H200, SMALL, work)
    ).step_seconds
    assert choice.step_seconds < 0.8 * alone


def test_the_runner_up_may_have_groups_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner-up is the second fastest of the plans found with groups of any size."""
    seconds: set[float] = set()

    def recorded(find: Callable[..., Estimate | None]) -> Callable[..., Estimate | None]:
        def recording(*arguments: Any) -> Estimate | None:
            if choice := find(*arguments):
                seconds.add(choice.step_seconds)
                seconds.update([choice.runner_up.step_seconds] if choice.runner_up else [])
            return choice

        return recording

    for name in ("best", "polished"):
        monkeypatch.setattr(PlacementSearch, name, recorded(getattr(PlacementSearch, name)))
    work = Workload(batch=8, sequence=1024, accumulation=2)
    best = search(SMALL, H200, work, device_limit=4 * GIB, policies=["overlapped"])[0]
    assert best.runner_up is not None
    assert [best.step_seconds, best.runner_up.step_seconds] == sorted(seconds)[:2]


def test_every_size_of_a_group_divides_the_accumulation() -> None:
    choice = find(SMALL, Workload(batch=1, sequence=1024, accumulation=12))[0]
    plan = with_knobs(choice.plan, micro_batch_group=1)
    streaming, resident = (
        msgspec.structs.replace(plan, policy=policy) for policy in ("overlapped", "resident")
    )
    assert group_sizes(streaming) == [1, 2, 3, 4, 6, 12]
    assert group_sizes(resident) == [1]
    tied = msgspec.structs.replace(streaming, model=ModelSpec.load("qwen2.5-0.5b"))
    assert group_sizes(tied) == [1]


@pytest.mark.parametrize("clipping", ["layer", "update"])
def test_with_clipping_by_layer_updates_run_during_backward(clipping: Any) -> None:
    """With clipping by layer or by update, updates run during backward, and the step is faster.

    With the global norm, an update can only overlap with the next forward pass. The next layer's
    weights are loaded ahead.
    """
    work = msgspec.structs.replace(WORK, batch=16, clipping=clipping)
    by_layer, by_norm = (
        find(SMALL, found, device_limit=6 * GIB)[0]
        for found in (work, msgspec.structs.replace(work, clipping="global"))
    )
    assert by_layer.feasible
    assert (
        by_layer.plan.policy,
        by_layer.plan.knobs.weights_ahead,
        by_norm.plan.knobs.weights_ahead,
    ) == ("overlapped", 1, 0)
    assert by_layer.step_seconds < 0.97 * by_norm.step_seconds


@pytest.mark.parametrize(("updates_per_s", "some"), [(20e9, True), (0.5e9, False)])
def test_the_host_updates_layers_if_its_cores_are_fast_compared_with_the_link(
    updates_per_s: float, some: bool
) -> None:
    """The host updates some layers if its cores are fast compared with the link."""
    memory = msgspec.structs.replace(H200.host_memory, gb_per_s=500.0)
    machine = msgspec.structs.replace(H200, cpu_update_per_s=updates_per_s, host_memory=memory)
    choice = search(SMALL, machine, WORK, device_limit=8 * GIB, policies=["overlapped"])[0]
    assert choice.feasible
    assert bool(choice.plan.knobs.placement.host_updated) is some


@pytest.mark.parametrize(
    "work",
    [
        Workload(batch=4, sequence=512),
        Workload(batch=2, sequence=256, accumulation=3, clipping="none"),
    ],
)
def test_the_choice_is_within_two_per_cent_of_every_other(work: Workload) -> None:
    """The choice is within 2 % of the best of all combinations of knobs.

    The simulator plays each of them, on a machine where copies and the CPU limit the step.
    """
    limit = 4 * GIB
    chosen = find(SMALL, work, device_limit=limit, policies=["k_buffer"])[0]
    costs, best = cost_model(H200, SMALL, work), float("inf")
    for slots, gradients, staging, interval in itertools.product(
        (1, 2, 4), (1, 2), (0, 2), (1, 2, 4)
    ):
        if staging == 0 and work.accumulation > 1:
            continue
        knobs = msgspec.structs.replace(
            chosen.plan.knobs,
            weight_slots=slots,
            gradient_slots=gradients,
            gradient_staging=staging,
            checkpoint_interval=interval,
        )
        other = assess(msgspec.structs.replace(chosen.plan, knobs=knobs), costs)
        best = min(best, other.step_seconds if other.feasible else best)
    assert chosen.feasible
    assert chosen.step_seconds <= 1.02 * best


def test_with_less_memory_a_plan_has_fewer_slots_and_takes_longer() -> None:
    roomy, tight = (
        find(SMALL, device_limit=limit, policies=["k_buffer"])[0]
        for limit in (16 * GIB, 630 * GIB // 100)
    )
    assert roomy.feasible
    assert tight.feasible
    assert tight.account.device_peak_bytes <= 630 * GIB // 100 < roomy.account.device_peak_bytes
    assert tight.plan.knobs.weight_slots < roomy.plan.knobs.weight_slots
    assert tight.step_seconds > roomy.step_seconds


def test_the_error_if_nothing_fits_names_the_pool_and_a_batch_that_fits() -> None:
    choice = find(SMALL, device_limit=3 * GIB, policies=["double_buffer"])[0]
    assert not choice.feasible
    assert choice.account.binding.startswith("device.")
    assert choice.plan.prediction is not None
    assert choice.plan.prediction.binding == choice.account.binding
    assert choice.account.advice.startswith("batch = ")
    batch = int(choice.account.advice.split()[2])
    assert 0 < batch < WORK.batch
    assert find(
        SMALL,
        msgspec.structs.replace(WORK, batch=batch),
        device_limit=3 * GIB,
        policies=["double_buffer"],
    )[0].feasible


def test_the_error_gives_the_missing_host_memory_in_bytes() -> None:
    choice = find(SMALL, host_limit=GIB, policies=["double_buffer"])[0]
    assert not choice.feasible
    assert choice.account.binding.startswith("host.")
    assert "more of host memory" in choice.account.advice


def test_the_search_is_deterministic() -> None:
    assert find(SMALL, device_limit=8 * GIB) == find(SMALL, device_limit=8 * GIB)


@pytest.mark.parametrize("known", [[], ["double_buffer"]])
def test_an_unknown_policy_is_refused(known: list[str]) -> None:
    with pytest.raises(UserError, match=r"allowed: .*double_buffer"):
        find(SMALL, policies=[*known, "triple_buffer"])


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(1, (1,)), (2, (1,)), (4, (1, 2)), (28, (1, 2, 4, 6, 8)), (48, (1, 2, 4, 7, 8, 16))],
)
def test_checkpoint_intervals(layers: int, expected: tuple[int, ...]) -> None:
    assert intervals(layers) == expected


def test_a_model_of_forty_eight_layers_is_planned() -> None:
    choices = find(ModelSpec.load("qwen2.5-14b"), host_limit=256 * GIB)
    assert choices[0].feasible
