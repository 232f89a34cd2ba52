"""Tests of the time of forward passes that save the activations of their layer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from small_table import table

from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import schedule_to_time
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op, saves_activations
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

H200 = HardwareSpec.load("h200")
MIXTURE = ModelSpec.load("olmoe-1b-7b").with_layers(4)
DENSE = ModelSpec.load("qwen2.5-7b").with_layers(4)
WORK = Workload(batch=8, sequence=1024, compiled=True)
FORWARD, RECOMPUTE = 6_000_000, 6_600_000
SAVED = frozenset({"2", "3"})


def planned(work: Workload = WORK, model: ModelSpec = MIXTURE) -> Plan:
    return Plan(
        policy="overlapped",
        hardware="h200",
        source="",
        model=model,
        workload=work,
        knobs=Knobs(placement=Placement(saved_activations="2-3")),
        device_limit_bytes=2**40,
        host_limit_bytes=2**42,
    )


def measured(
    recompute: int | None = RECOMPUTE,
    work: Workload = WORK,
    suffix: str = "",
    model: ModelSpec = MIXTURE,
    known: Workload | None = None,
) -> CostModel:
    """Returns the costs of `work` on a machine on which the layers of `model` were measured: in
    rows of one document, compiled or not as in `work`, or with the workload `known`.
    """
    known = known or msgspec.structs.replace(WORK, compiled=work.compiled)
    times = {"forward": FORWARD, "recompute": recompute, "backward": 13_000_000}
    compute: dict[str, dict[str, tuple[int, int]]] = {
        kind: {
            f"{model.shape}/{known.shape}{suffix if kind == 'recompute' else ''}": (10**12, time)
        }
        for kind, time in times.items()
        if time is not None
    }
    kinds = ("load_weights", "save_gradients", "norm", "clip", "update", "cpu_update")
    curves = dict.fromkeys(kinds, ((2**20, 100), (2**30, 1000)))
    hardware = msgspec.structs.replace(H200, costs=table(compute=compute, curves=curves))
    return cost_model(hardware, model, work)


def forwards(plan: Plan) -> dict[str, Op]:
    return {op.layer: op for op in lower(plan).ops if op.kind == "forward"}


def durations(costs: CostModel, plan: Plan) -> dict[str, int]:
    return {layer: costs.duration_ns(op) for layer, op in forwards(plan).items()}


def test_layers_with_experts_that_save_activations_take_the_time_of_their_recompute() -> None:
    found = forwards(planned())
    assert {layer for layer, op in found.items() if saves_activations(op.writes)} == SAVED
    assert durations(measured(), planned()) == {
        "0": FORWARD, "1": FORWARD, "2": RECOMPUTE, "3": RECOMPUTE
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recompute", "suffix"),
    [(FORWARD - 1, ""), (None, ""), (RECOMPUTE, "-short")],
    ids=["faster", "not measured", "only without its last products"],
)
def test_otherwise_they_take_the_time_of_other_forward_passes(
    recompute: int | None, suffix: str
) -> None:
    assert set(durations(measured(recompute, suffix=suffix), planned()).values()) == {FORWARD}


def test_the_recompute_may_have_been_measured_in_rows_of_one_document() -> None:
    work = msgspec.structs.replace(WORK, documents=not WORK.documents)
    found = durations(measured(work=work), planned(work))
    assert found["3"] > 1.05 * found["0"]


def test_layers_without_experts_take_the_time_of_other_forward_passes() -> None:
    found = durations(measured(model=DENSE), planned(model=DENSE))
    assert set(found.values()) == {FORWARD}


def test_eager_layers_take_the_time_of_other_forward_passes() -> None:
    work = msgspec.structs.replace(WORK, compiled=False)
    assert set(durations(measured(work=work), planned(work)).values()) == {FORWARD}


def test_a_forward_pass_in_fp8_that_saves_is_longer_too() -> None:
    """Regression test: its recompute is derived from one without fp8, as the forward pass is."""
    work = msgspec.structs.replace(WORK, fp8="rowwise")
    found = durations(measured(work=work, known=WORK), planned(work))
    assert found["3"] > 1.05 * found["0"]


def test_a_machine_that_was_not_calibrated_makes_no_difference() -> None:
    assert len(set(durations(cost_model(H200, MIXTURE, WORK), planned()).values())) == 1


@pytest.mark.parametrize("changes", [{}, {"accumulation": 3}])
def test_searches_count_the_time(changes: dict[str, Any]) -> None:
    work = msgspec.structs.replace(WORK, **changes)
    plan = planned(work)
    slower, usual = (
        measured(time, msgspec.structs.replace(WORK, **changes)) for time in (RECOMPUTE, FORWARD)
    )
    # The recomputes of layers 0 and 1 take longer, too.
    more = 4 * work.accumulation * (RECOMPUTE - FORWARD)
    bounds = [LowerBound(plan, costs) for costs in (slower, usual)]
    assert bounds[0].compute_ns(plan) - bounds[1].compute_ns(plan) == more
    assert bounds[0].step_ns(plan) - bounds[1].step_ns(plan) == more
    times = []
    for costs, bound in zip((slower, usual), bounds, strict=True):
        times.append(makespan_ns(schedule_to_time(plan, costs), costs))
        assert times[-1] == makespan_ns(lower(plan), costs)
        assert bound.compute_ns(plan) <= bound.step_ns(plan) <= times[-1]
    # With one micro-batch, copies and updates take nearly no time. The host sums several gradients.
    assert times[0] - times[1] == pytest.approx(more, rel=0.01 if not changes else 0.3)


def test_the_compute_time_of_a_placement_is_not_that_of_another() -> None:
    """The compute time of a micro-batch is stored by the placement."""
    plan, costs = planned(model=DENSE), measured(model=DENSE)
    placements = [
        Placement(),
        Placement(saved_activations="3"),
        Placement(saved_activations="2-3"),
        Placement(saved_attention="1"),
        Placement(saved_activations="3", saved_attention="1"),
    ]
    plans = [
        msgspec.structs.replace(plan, knobs=Knobs(placement=placement)) for placement in placements
    ]
    together = LowerBound(plan, costs)
    found = [together.compute_ns(each) for each in plans]
    assert found == [LowerBound(plan, costs).compute_ns(each) for each in plans]
    assert len(set(found)) == len(plans)
