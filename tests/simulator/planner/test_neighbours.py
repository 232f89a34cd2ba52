"""Tests of the result of a search.

No other plan that the search names is faster, and no plan that differs a little from its choice.
"""

from __future__ import annotations

import msgspec
import pytest

from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.planner.filling import GIB, Filling
from megatrain.simulator.planner.search import best_estimate, candidates
from megatrain.simulator.verdict.marginal_memory import one_more_gib

CASES = (
    (
        "qwen2.5-7b",
        "a100-80-sxm",
        Workload(batch=1, sequence=512, accumulation=2),
        {"host_limit": 512 * GIB},
    ),  # layers that the host updates need no slots
    ("gpt-oss-20b", "rtx4090", Workload(batch=8, sequence=1024), {"host_limit": 512 * GIB}),
    (
        "qwen3-4b",
        "rtx-pro-6000",
        Workload(batch=1, sequence=8192),
        {"device_limit": 42 * GIB, "host_limit": 512 * GIB},
    ),
)


@pytest.mark.parametrize(
    ("name", "machine", "work", "limits"),
    [
        pytest.param(*case, id=case[0], marks=[pytest.mark.nightly] * (case[0] == "gpt-oss-20b"))
        for case in CASES
    ],
)
def test_no_neighbour_that_fits_is_faster_than_the_choice(
    name: str, machine: str, work: Workload, limits: dict[str, int]
) -> None:
    model, hardware = ModelSpec.load(name), HardwareSpec.load(machine)
    choice = candidates(model, hardware, work, **limits)[0]  # type: ignore[arg-type]
    costs = cost_model(hardware, model, work)
    assert choice.runner_up is not None
    others = [
        choice.runner_up.knobs,
        *(margin.knobs for margin in one_more_gib(choice, hardware, costs)),
    ]
    others += [plan.knobs for plan in Filling(choice.plan, costs).neighbours(choice.plan)]
    tried = [
        assess(msgspec.structs.replace(choice.plan, knobs=knobs), costs)
        for knobs in dict.fromkeys(others)
        if knobs
    ]
    assert len([other for other in tried if other.feasible]) > 2
    assert (
        min(other.step_seconds for other in tried if other.feasible) >= 0.999 * choice.step_seconds
    )


def test_a_change_that_one_more_gib_would_suggest_is_made_if_it_fits_already() -> None:
    """A change that one more GiB would allow is already made if it fits now.

    Here the gradients of one more layer replace the slots through which gradients stream.
    """
    model, hardware, work = (
        ModelSpec.load("qwen2.5-7b"),
        HardwareSpec.load("a100-80-sxm"),
        Workload(batch=1, sequence=512, accumulation=2),
    )
    choice = candidates(model, hardware, work, host_limit=512 * GIB, policies=["overlapped"])[0]
    assert choice.step_seconds < 1.94  # 2.007 s without


SLOTS = (
    (
        "gpt-oss-20b",
        "l40s",
        Workload(batch=1, sequence=4096, accumulation=2, clipping="update"),
        512 * GIB,
        22.15,
    ),  # 14.45 s with two slots
    (
        "qwen2.5-7b",
        "a6000",
        Workload(batch=4, sequence=512, accumulation=4, clipping="update"),
        None,
        9.2,
    ),  # 9.95 s with three slots by the extended times of two micro-batches
)


@pytest.mark.parametrize(
    ("name", "machine", "work", "host", "seconds"),
    [
        pytest.param(*case, id=case[0], marks=[pytest.mark.nightly] * (case[0] == "gpt-oss-20b"))
        for case in SLOTS
    ],
)
def test_state_gives_way_to_a_third_weight_slot(
    name: str, machine: str, work: Workload, host: int | None, seconds: float
) -> None:
    """A third weight slot is chosen although some resident state must be moved for it.

    With more than two micro-batches, the times of the engine decide, and another plan with two
    slots may be faster.
    """
    choice = candidates(
        ModelSpec.load(name),
        HardwareSpec.load(machine),
        work,
        host_limit=host,
        policies=["overlapped"],
    )[0]
    assert choice.feasible
    assert choice.step_seconds < seconds
    knobs = choice.plan.knobs
    assert knobs.weight_slots > 2 or work.accumulation > 2 or knobs.micro_batch_group > 1


def test_one_more_gib_is_no_slower_where_it_would_hold_all_weights() -> None:
    """One more GiB of device memory does not make a step slower if it can hold all weights.

    With all weights on the device and the moments on the host, it is faster if the host updates
    most layers.
    """
    model, hardware, work = (
        ModelSpec.load("qwen2.5-0.5b"),
        HardwareSpec.load("a6000"),
        Workload(batch=4, sequence=8192),
    )
    steps = [
        candidates(
            model,
            hardware,
            work,
            device_limit=int(size * GIB),
            host_limit=int(125.5 * GIB),
            policies=["overlapped"],
        )[0].step_seconds
        for size in (47.4, 48.4)
    ]
    assert steps[1] <= steps[0] < 2.65


def test_the_memory_of_slots_holds_layers_where_that_is_faster() -> None:
    """With 5.1 GiB of device memory, one more layer there is faster than a second gradient slot.

    Regression test: the search tried other numbers of slots only if nothing fitted.
    """
    model, work = (
        ModelSpec.load("phi-2").with_layers(4),
        Workload(batch=1, sequence=512, accumulation=2, clipping="layer"),
    )
    found = best_estimate(
        model,
        HardwareSpec.load("a100-40"),
        work,
        device_limit=51 * GIB // 10,
        host_limit=8 * GIB,
        policies=["overlapped"],
    )
    assert found
    assert found.step_seconds < 0.1


def test_more_memory_is_no_slower_where_state_slots_can_hold_a_layer() -> None:
    """With clipping by update, state slots that hold a whole layer are not always the best.

    Regression test: such slots fit from 7.5 GiB of device memory on, and the search tried no
    fewer.
    """
    model, work = (
        ModelSpec.load("qwen3-4b").with_layers(4),
        Workload(batch=1, sequence=2048, clipping="update", loss_chunk=256),
    )
    less, more = (
        best_estimate(
            model,
            HardwareSpec.load("rtx4090"),
            work,
            device_limit=int(size * GIB),
            host_limit=16 * GIB,
            policies=["overlapped"],
        )
        for size in (7, 7.5)
    )
    assert less
    assert more
    assert more.step_seconds <= less.step_seconds
