"""Tests of plans whose compiled layers rebuild outputs (`Knobs.rebuild_outputs`).

They are about the costs of their ops, and about when the planner chooses such plans.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from small_table import table

from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.formulas import rebuilt_estimate
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import (
    Workload,
    is_rebuilding,
    is_short,
    rebuilding,
    shortened,
    without_rebuilding,
    without_short,
)
from megatrain.simulator.planner import batch_splits
from megatrain.simulator.planner.assessment import assess, with_knobs
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.planner.outlook import outlook
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import candidates, plans_of
from megatrain.simulator.planner.shared_step import alone, shared_step
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan
from megatrain.simulator.verdict.advice import Adviser
from megatrain.simulator.verdict.marginal_memory import one_more_gib

H200 = HardwareSpec.load("h200")
SEVEN = ModelSpec.load("qwen2.5-7b")
WORK = Workload(batch=32, sequence=1024, compiled=True, short_recompute=True)
WIDTH = 2 * WORK.tokens
PRODUCT, NORMS = 18944 * WIDTH, 2 * 3584 * WIDTH
"""Bytes of the product of gate and up, and of the outputs of both norms."""


def planned(work: Workload = WORK, **knobs: Any) -> Plan:
    return Plan(
        policy="overlapped",
        hardware="h200",
        source="",
        model=SEVEN.with_layers(4),
        workload=work,
        knobs=Knobs(**knobs),
        device_limit_bytes=2**40,
        host_limit_bytes=2**42,
    )


def ops(work: Workload = WORK, **knobs: Any) -> dict[str, Op]:
    return {op.id: op for op in lower(planned(work, **knobs)).ops}


@pytest.mark.parametrize("documents", [False, True])
def test_the_suffix_of_a_shape(documents: bool) -> None:
    shape = f"qwen2-1x2-v9/{msgspec.structs.replace(WORK, documents=documents).shape}"
    assert is_rebuilding(rebuilding(shape))
    assert not is_rebuilding(shape)
    assert without_rebuilding(rebuilding(shape)) == shape
    both = shortened(rebuilding(shape))
    assert is_rebuilding(both)
    assert is_short(both)
    assert without_rebuilding(both) == shortened(shape)
    assert without_short(both) == rebuilding(shape)


def test_the_ops_that_differ() -> None:
    """A recompute that is not short computes the product of gate and up in any case."""
    saving, rebuilt = ops(), ops(rebuild_outputs=1)
    differ = {name for name, op in rebuilt.items() if op.shape != saving[name].shape}
    assert differ == {f"{code}{layer}.m0" for code in "RB" for layer in range(4)}
    assert all(rebuilt[name].shape == in_a_rebuilding_layer(saving[name]) for name in differ)
    assert all(rebuilt[name].flops == op.flops for name, op in saving.items())
    full = msgspec.structs.replace(WORK, short_recompute=False)
    differ = {name for name, op in ops(full, rebuild_outputs=1).items() if is_rebuilding(op.shape)}
    assert differ == {f"B{layer}.m0" for layer in range(4)}


def in_a_rebuilding_layer(op: Op) -> str:
    """Returns the shape of `op` in a layer that rebuilds outputs."""
    plain = rebuilding(without_short(op.shape))
    return shortened(plain) if is_short(op.shape) else plain


@pytest.mark.parametrize(
    "changes", [{"compiled": False}, {"fp8": "rowwise"}, {"token_piece": 4096}]
)
def test_layers_that_have_nothing_to_rebuild_have_the_same_ops(changes: dict[str, Any]) -> None:
    work = msgspec.structs.replace(WORK, **changes)
    saving, rebuilt = (lower(planned(work, rebuild_outputs=value)) for value in (0, 1))
    assert saving.digest == rebuilt.digest


def test_the_traffic_of_each_op() -> None:
    """`backward` reads two tensors for each output that it writes. `recompute` leaves the product
    out.
    """
    more = {
        kind: op_work(SEVEN, kind, "0", WORK, rebuilt=True).moved_bytes
        - op_work(SEVEN, kind, "0", WORK).moved_bytes
        for kind in ("forward", "recompute", "backward")
    }
    assert more == {"forward": 0, "recompute": -3 * PRODUCT, "backward": 3 * (PRODUCT + NORMS)}
    full = msgspec.structs.replace(WORK, short_recompute=False)
    assert op_work(SEVEN, "recompute", "0", full, rebuilt=True) == op_work(
        SEVEN, "recompute", "0", full
    )


def test_measured_times() -> None:
    """On an H200, the backward pass of a layer took 51.73 ms instead of 50.76 ms, and its recompute
    17.51 ms instead of 18.48 ms.
    """
    costs, found = cost_model(H200, SEVEN, WORK), (ops(), ops(rebuild_outputs=1))
    for name, least, most in (("B0.m0", 1.01, 1.03), ("R0.m0", 0.93, 0.97)):
        saving, rebuilt = (costs.duration_ns(each[name]) for each in found)
        assert least < rebuilt / saving < most


@pytest.mark.parametrize("calibrated_for", ["same", "documents", "tokens"])
def test_times_are_derived_from_measured_layers(calibrated_for: str) -> None:
    """All ops were measured without rebuilt outputs, and took three times the datasheet's time."""
    measured = {
        "same": WORK,
        "documents": msgspec.structs.replace(WORK, documents=True),
        "tokens": msgspec.structs.replace(WORK, batch=16),
    }[calibrated_for]
    sheet, compute = Datasheet(H200, SEVEN, measured), dict[str, dict[str, tuple[int, int]]]()
    for op in ops(measured).values():
        if op.lane == "compute" and op.shape:
            compute.setdefault(op.kind, {})[op.shape] = (op.amount, 3 * sheet.duration_ns(op))
    sheet = Datasheet(H200, SEVEN, WORK)
    costs = Calibrated(
        table(compute=compute, spread={f"backward {shape}": 0.25 for shape in compute["backward"]}),
        sheet,
    )
    saving, rebuilt = ops(), ops(rebuild_outputs=1)
    for name in ("F0.m0", "R0.m0", "B0.m0"):
        op = rebuilt[name]
        assert costs.duration_ns(op) / sheet.duration_ns(op) == pytest.approx(
            costs.duration_ns(saving[name]) / sheet.duration_ns(saving[name]), rel=1e-6
        )
        assert costs.extrapolated(op) == costs.extrapolated(saving[name])
        assert costs.spread(op) == costs.spread(saving[name])
    assert costs.duration_ns(rebuilt["B0.m0"]) > costs.duration_ns(saving["B0.m0"])
    assert costs.spread(rebuilt["B0.m0"]) == (0 if calibrated_for == "documents" else 0.25)


def test_times_without_a_datasheet() -> None:
    op, other = ops()["B0.m0"], ops(rebuild_outputs=1)["B0.m0"]
    costs = Calibrated(table(compute={"backward": {op.shape: (op.amount, 1000)}}), None)
    assert costs.duration_ns(other) == costs.duration_ns(op) == 1000


def best(model: ModelSpec, work: Workload, policy: str = "overlapped", **limits: int) -> Any:
    return candidates(model, H200, work, policies=[policy], **limits)[0]


def test_the_planner_rebuilds_outputs_where_this_is_faster() -> None:
    """The memory of the outputs holds the activations of further layers."""
    chosen = best(SEVEN, WORK)
    assert chosen.plan.knobs.rebuild_outputs == 1
    assert 0 < len(chosen.plan.placed("saved_activations")) < SEVEN.layers
    costs = cost_model(H200, SEVEN, WORK)
    saving = PlacementSearch(with_knobs(chosen.plan, rebuild_outputs=0), costs).best()
    assert saving is not None
    assert chosen.step_seconds < 0.98 * saving.step_seconds


@pytest.mark.parametrize(
    ("name", "batch", "limits"),
    [
        ("qwen2.5-7b", 8, {}),  # all layers are saved
        ("qwen2.5-14b", 32, {"device_limit": 110 * 2**30}),  # none is saved
        ("qwen2.5-7b", 32, {"device_limit": 40 * 2**30}),
    ],
)
def test_the_planner_saves_outputs_where_this_is_faster(
    name: str, batch: int, limits: dict[str, int]
) -> None:
    model, work = ModelSpec.load(name), msgspec.structs.replace(WORK, batch=batch)
    chosen = best(model, work, **limits)
    assert chosen.feasible
    assert chosen.plan.knobs.rebuild_outputs == 0
    other = assess(with_knobs(chosen.plan, rebuild_outputs=1), cost_model(H200, model, work))
    assert other.step_seconds > chosen.step_seconds


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"compiled": False}, "qwen2.5-7b"), ({}, "gemma-2-9b"), ({"fp8": "rowwise"}, "qwen2.5-7b")],
)
def test_other_layers_never_rebuild_outputs(changes: dict[str, Any], name: str) -> None:
    model, work = ModelSpec.load(name), msgspec.structs.replace(WORK, batch=4, **changes)
    assert rebuilt_estimate(model, work) == 0
    for plan in plans_of(model, H200, work):
        assert plan.knobs == Knobs()


def test_only_policies_that_read_the_knob_begin_with_it() -> None:
    names = ("overlapped", "resident", "double_buffer", "sequential")
    plans = plans_of(SEVEN, H200, WORK, policies=names)
    assert [plan.knobs.rebuild_outputs for plan in plans] == [1, 1, 0, 0]


def test_several_gpus_rebuild_outputs_too() -> None:
    (plan,) = plans_of(SEVEN, H200, WORK, policies=["overlapped"])
    choice = shared_step(plan, H200, 2)
    few = shared_step(
        msgspec.structs.replace(plan, workload=msgspec.structs.replace(WORK, batch=4)), H200, 2
    )
    assert choice.feasible
    assert choice.plan.knobs.rebuild_outputs == 1
    assert shared_step(with_knobs(plan, rebuild_outputs=0), H200, 2).plan == choice.plan
    assert alone(with_knobs(choice.plan, rebuild_outputs=0), H200).knobs == plan.knobs
    assert few.plan.placed("saved_activations") == {str(index) for index in range(SEVEN.layers)}
    assert few.plan.knobs.rebuild_outputs == 0


def test_more_memory_gains_something_for_layers_that_rebuild() -> None:
    """Without the knob, a plan with one more GiB is slower than the chosen one."""
    device, _ = one_more_gib(best(SEVEN, WORK), H200, cost_model(H200, SEVEN, WORK))
    assert device.gain > 0
    assert device.knobs is not None
    assert device.knobs.rebuild_outputs == 1


@pytest.mark.parametrize("rebuild", [0, 1])
def test_lower_bounds_have_the_durations_of_the_plan(rebuild: int) -> None:
    plan = planned(
        rebuild_outputs=rebuild, placement=Placement(saved_activations="2-3"), chunk_bytes=2**28
    )
    costs = cost_model(H200, plan.model, WORK)
    total = sum(costs.duration_ns(op) for op in lower(plan).lanes["compute"])
    assert LowerBound(plan, costs).compute_ns(plan) == pytest.approx(total, rel=1e-3)
    search = PlacementSearch(plan, costs)
    assert search.lower_bound.compute_ns(plan) == LowerBound(plan, costs).compute_ns(plan)


def test_a_step_that_saves_all_outputs_is_the_shortest_of_an_outlook() -> None:
    """`outlook` returns a lower bound of the step time of all plans, with any `rebuild_outputs`."""
    work = msgspec.structs.replace(WORK, batch=8)
    first = outlook(SEVEN, H200, work, policies=["overlapped"])
    assert first is not None
    assert first.step_seconds < best(SEVEN, work).step_seconds
    saved = with_knobs(first.plan, placement=Placement(saved_activations="all"))
    with_outputs, without = (
        LowerBound(plan, cost_model(H200, SEVEN, work)).compute_ns(plan) / 1e9
        for plan in (saved, with_knobs(saved, rebuild_outputs=0))
    )
    assert first.step_seconds <= without < with_outputs


def test_splits_of_a_step_are_compared_with_rebuilt_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed, time_ns = list[Plan](), batch_splits._time_ns
    monkeypatch.setattr(
        batch_splits, "_time_ns", lambda plan, costs: (timed.append(plan), time_ns(plan, costs))[1]
    )
    batch_splits.best_split(SEVEN, H200, WORK, 32 * 1024, policies=["overlapped"])
    assert {plan.knobs.rebuild_outputs for plan in timed} == {1}


def test_advice_begins_with_rebuilt_outputs() -> None:
    """The choice saves its outputs, and the layers of a larger micro-batch rebuild them."""
    small = msgspec.structs.replace(WORK, batch=8)
    choice, costs = best(SEVEN, small), cost_model(H200, SEVEN, small)
    plan = choice.plan
    adviser = Adviser(choice, H200, costs, ["overlapped"], None, [])  # type: ignore[arg-type]
    found = list(adviser._bounds(WORK, plan.device_limit_bytes, plan.host_limit_bytes))
    (begun,) = plans_of(SEVEN, H200, WORK, policies=["overlapped"])
    others = cost_model(H200, SEVEN, WORK)
    search = PlacementSearch(begun, others)
    assert found[0] == (search.least_ns() + others.step_overhead_ns) / 1e9
