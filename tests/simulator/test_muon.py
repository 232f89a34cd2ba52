"""Tests of Muon in the simulator: state, chunks of whole matrices, time, and refused plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.contention import ContentionModel
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.engine.evaluator import uncontended_makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model import muon
from megatrain.simulator.model.muon import ITERATIONS, Matrices, matrices_of
from megatrain.simulator.model.optimizer import Optimizer, UpdateRule, find
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import BLOCK
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.planner.lower_bound import LowerBound, _EarliestTimes
from megatrain.simulator.planner.search import search
from megatrain.simulator.schedule import ScheduleError, op
from megatrain.simulator.schedule.arithmetic import kept_moments, layer_state
from megatrain.simulator.schedule.plan import Placement, Plan
from megatrain.simulator.schedule.update_layout import update_layout

pytestmark = pytest.mark.usefixtures("without_libraries")

H200 = HardwareSpec.load("h200")
MIXTURE = ModelSpec.load("qwen3-30b-a3b")


@pytest.mark.parametrize(
    ("kind", "name", "shape", "found"),
    [
        ("decoder", "self_attn.q_proj.weight", (64, 32), Matrices(1, 64, 32)),
        ("decoder", "mlp.experts.gate_up_proj", (8, 64, 32), Matrices(8, 64, 32)),
        ("decoder", "mlp.experts.gate_up_proj_bias", (8, 64), None),
        ("decoder", "input_layernorm.weight", (64,), None),
        ("decoder", "linear_attn.conv1d.weight", (64, 1, 4), None),
        ("decoder", "mlp.shared_expert_gate.weight", (1, 64), None),
        ("embedding", "embed_tokens.weight", (100, 64), None),
        ("head", "lm_head.weight", (100, 64), None),
    ],
)
def test_muon_updates_the_matrices_of_decoder_layers(
    kind: str, name: str, shape: tuple[int, ...], found: Matrices | None
) -> None:
    assert matrices_of(kind, name, shape) == found
    assert find("muon").update_rule(kind, name, shape) == UpdateRule(1 if found else 2, found)


@pytest.mark.parametrize(
    ("state", "matrix", "moment"),
    [("exact", 8, 4), ("master24", 4.0625, 1.0625), ("bf16-sr", 3.0625, 1.0625)],
)
def test_a_matrix_has_one_moment_and_every_other_tensor_two(
    state: str, matrix: float, moment: float
) -> None:
    model = ModelSpec.load("qwen2.5-7b")
    plan = Plan(
        policy="overlapped",
        hardware="h200",
        source="",
        device_limit_bytes=2**40,
        host_limit_bytes=2**40,
        model=model,
        workload=Workload(batch=1, sequence=1024, optimizer="muon", state=state),
    )
    layer, parts = model.stack["0"], layer_state(plan, "0")
    held = sum(parts[name].whole(layer.elements) for name in ("weights", "master_low", "moments"))
    vectors = sum(tensor.padded for tensor in layer.tensors if len(tensor.shape) == 1)
    assert held == matrix * layer.elements + moment * vectors
    assert layer_state(plan, "e")["moments"].whole(model.stack["e"].elements) == (
        2 * moment * model.stack["e"].elements
    )


def test_groups_of_matrices_are_whole_blocks_of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(muon, "_GROUP", 2**10)
    for rows, columns in ((10, 14), (16, 16), (5, 7), (64, 64)):
        every = Matrices(100, rows, columns)
        assert every.group == 100 or every.group * every.size % BLOCK == 0
        assert every.group <= max(BLOCK, 2**10 // every.size)
        assert every.padded % BLOCK == 0 <= every.padded - 100 * every.size < BLOCK


def test_iterations_take_the_flops_of_their_products() -> None:
    # [m, n] by [n, m], [m, m] by [m, m], and [m, m] by [m, n]
    m, n = 512, 3584
    products = 2 * m * n * m + 2 * m * m * m + 2 * m * m * n
    assert Matrices(1, m, n).flops == Matrices(1, n, m).flops == ITERATIONS * products


@pytest.mark.parametrize("limit", [2**16, 2**21, 2**26, 2**40])
def test_chunks_end_between_groups_of_matrices(limit: int) -> None:
    layer = MIXTURE.stack["0"]
    layout = update_layout("muon", layer)
    assert layout is not None
    chunks = layout.chunks(limit)
    assert [number for number, _, _ in chunks] == list(range(len(chunks)))
    ends = list(itertools.accumulate(count for _, _, count in chunks))
    assert [first for _, first, _ in chunks] == [0, *ends[:-1]]
    assert ends[-1] == layer.elements
    parts = [part for _, first, count in chunks for part in layout.parts(first, count)]
    assert sum(layout.flops(first, count) for _, first, count in chunks) == sum(
        matrices.number * matrices.flops for matrices in layout.matrices
    )
    largest = max(part.parameters for part in parts)
    assert all(count <= max(limit, largest) for _, _, count in chunks)
    assert sum(part.parameters for part in parts) >= layer.parameters
    assert sum(layout.kept(first, count) for _, first, count in chunks) == layout.values


PLACEMENTS = [
    Placement(),
    Placement(weights="all", master_low="all", moments="all", gradients="all"),
    Placement(weights="0", moments="1,e", host_updated="e,h"),
]


@pytest.mark.parametrize("state", ["exact", "master24", "bf16-sr"])
@pytest.mark.parametrize("clipping", ["global", "layer", "none"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_schedules_are_sound_and_name_the_sizes_of_both_kinds_of_state(
    make_plan: Callable[..., Plan], placement: Placement, clipping: str, state: str
) -> None:
    work = {"optimizer": "muon", "clipping": clipping, "state": state, "dtype": "bf16"}
    plan = make_plan("overlapped", placement=placement, **work)
    schedule = policies.lower(plan)
    schedule.check(kept_moments(plan))
    with pytest.raises(ScheduleError, match=r"has .* bytes"):
        schedule.check(2)
    outlined = policies.outline(plan)
    assert sum(b.bytes for b in outlined.buffers) == sum(b.bytes for b in schedule.buffers)
    layers = [layer for layer in plan.model.stack.values() if layer.kind == "decoder"]
    layouts = {layer.name: update_layout("muon", layer) for layer in layers}
    flops: dict[str, int] = {}
    for each in schedule.ops:
        if each.kind == "update":
            flops[each.layer] = flops.get(each.layer, 0) + each.flops
    for name, layout in layouts.items():
        assert layout is not None
        assert flops[name] == layout.flops(0, plan.model.stack[name].elements) > 0
    moved = {"load_state": 0, "save_state": 0}
    for each in schedule.ops:
        if each.kind in moved and each.layer == "2":
            moved[each.kind] += each.bytes
    if not placement.weights:
        layout = layouts["2"]
        assert layout is not None
        masters, moment = {"exact": (4, 4), "master24": (3, 34 / 32), "bf16-sr": (2, 34 / 32)}[
            state
        ]
        kept = masters * plan.model.stack["2"].elements + moment * layout.values
        assert moved["save_state"] == kept


@pytest.mark.parametrize("policy", ["double_buffer", "k_buffer", "sequential"])
def test_policies_that_update_on_the_host_are_refused_in_one_line(
    make_plan: Callable[..., Plan], policy: str
) -> None:
    plan = make_plan(policy, optimizer="muon")
    with pytest.raises(UserError) as caught:
        policies.lower(plan)
    with pytest.raises(UserError) as searched:
        search(plan.model, H200, plan.workload, policies=[policy])
    assert str(searched.value) == str(caught.value)
    assert str(caught.value) == (
        f"policy {policy}: optimizer: found layer 0 updated on the CPU with optimizer muon;"
        " allowed: updates of its matrices on the GPU, which orthogonalises them;"
        " fix: use policy overlapped"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"placement": Placement(host_updated="e,2")},
            "knobs.placement: host_updated: found layer 2 updated on the CPU with optimizer muon",
        ),
        ({"clipping": "update"}, "workload: clipping: found update with optimizer muon"),
        ({"state": "master24", "dtype": "fp32"}, "found master24 with dtype fp32"),
    ],
)
def test_unsupported_plans_with_muon_are_refused_by_name(
    make_plan: Callable[..., Plan], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        policies.lower(make_plan("overlapped", optimizer="muon", **changes))


def test_an_outside_optimizer_cannot_differ_between_tensors() -> None:
    from megatrain.simulator.model.optimizer import _refuse

    class Mine(Optimizer):
        name, moments, by_tensor = "mine", 1, True

    with pytest.raises(UserError, match="update_rule: found one that differs between tensors"):
        _refuse(Mine(), "optimizer mine.py")


@pytest.mark.parametrize("policy", ["overlapped", "resident"])
def test_compute_waits_for_updates_that_the_schedule_gives_priority(
    make_plan: Callable[..., Plan], policy: str
) -> None:
    plan = make_plan(policy, optimizer="muon", chunk_bytes=2**20)
    schedule, costs = policies.lower(plan), cost_model(H200, plan.model, plan.workload)
    first = {each.id for each in schedule.ops if each.high_priority}
    assert first == {each.id for each in schedule.ops if each.lane == "update" and each.flops}
    assert 0 < len(first) < len(schedule.lanes["update"])
    for each in schedule.ops:
        demand = costs.demand(each)
        assert bool(demand and demand.high_priority) == each.high_priority
    assert not any(each.high_priority for each in policies.lower(make_plan(policy)).ops)


@pytest.mark.parametrize("policy", ["overlapped", "resident"])
def test_only_updates_of_matrices_need_temporary_tensors(
    make_plan: Callable[..., Plan], policy: str
) -> None:
    plan = make_plan(policy, optimizer="muon")
    schedule = policies.lower(plan)
    (shared,) = (each.id for each in schedule.buffers if each.pool == "device.update_workspace")
    using = {each.layer for each in schedule.ops if shared in each.writes}
    assert using == {spec.name for spec in plan.model.decoders}


def test_an_update_takes_the_time_of_its_products_and_compute_waits(
    make_plan: Callable[..., Plan],
) -> None:
    model, work = MIXTURE, Workload(batch=1, sequence=1024, optimizer="muon")
    costs = cost_model(H200, model, work)
    idle = op.Op(id="U0", lane="update", parameters=2**24)
    busy = msgspec.structs.replace(idle, flops=10**13)
    rate = H200.peak_tflops["bf16"] * 1e3 * H200.linear_efficiency
    assert costs.duration_ns(busy) - costs.duration_ns(idle) == pytest.approx(10**13 / rate, abs=1)
    forward = next(
        each for each in policies.lower(make_plan("resident")).ops if each.kind == "forward"
    )
    sharing = ContentionModel({}, high_priority=True)
    demands = (
        sharing.demand("compute", 0, 1000, forward.kind),
        sharing.demand("update", 0, 1000, "update", high_priority=True),
    )
    assert all(demands)
    assert sharing.rates(tuple(each for each in demands if each)) == (1, 1_000_000)
    assert ContentionModel({}).demand("compute", 0, 1000, "forward") is None


@pytest.mark.parametrize(
    ("clipping", "state"), [("global", "exact"), ("layer", "exact"), ("global", "master24")]
)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_lower_bound_is_no_more_than_the_time(
    make_plan: Callable[..., Plan], placement: Placement, clipping: str, state: str
) -> None:
    for sizes in (
        {"hidden": 512, "intermediate": 2048, "head_dim": 64, "vocabulary": 1024, "layers": 6},
        {},
    ):
        plan = make_plan(
            "overlapped",
            optimizer="muon",
            state_slots=8,
            chunk_bytes=2**20,
            placement=placement,
            clipping=clipping,
            state=state,
            dtype="bf16",
            **sizes,
        )
        for hardware in (H200, HardwareSpec.load("a6000")):
            costs = cost_model(hardware, plan.model, plan.workload)
            schedule = policies.lower(plan)
            bound = LowerBound(plan, costs).step_ns(plan)
            assert 0 < bound <= uncontended_makespan_ns(schedule, costs)
            assert bound <= makespan_ns(schedule, costs)


def test_a_lower_bound_stores_no_matrix_before_it_is_updated(
    make_plan: Callable[..., Plan],
) -> None:
    """With slow products, the store of a layer ends when its update does, or later."""
    plan = make_plan("overlapped", optimizer="muon", hidden=512, intermediate=2048, head_dim=64)
    slow = msgspec.structs.replace(H200, peak_tflops={"bf16": 1.0})
    flow = _EarliestTimes(LowerBound(plan, cost_model(slow, plan.model, plan.workload)), plan, 1)
    flow._update("0")
    assert "0" in flow.matrices
    assert flow.loads < flow.updates <= flow.stores


def test_a_search_updates_no_decoder_layer_on_the_host(make_plan: Callable[..., Plan]) -> None:
    model = make_plan(layers=6, hidden=512, intermediate=2048, head_dim=64).model
    work = Workload(batch=2, sequence=16, optimizer="muon")
    found = search(model, H200, work, device_limit=2**27)
    assert {choice.plan.policy for choice in found} == {"overlapped", "resident"}
    best = found[0]
    assert best.feasible
    assert not best.plan.placed("host_updated") - {"e", "h"}
    assert assess(best.plan, cost_model(H200, model, work)).step_seconds == best.step_seconds
