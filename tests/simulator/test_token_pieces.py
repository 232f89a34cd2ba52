"""Tests of layers that compute in token pieces: bytes, FLOPs, refusals, and found plans."""

from __future__ import annotations

import msgspec
import pytest
from wide_models import wide_model

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.formulas import activations_estimate, workspace_estimate
from megatrain.simulator.model.layer_memory import TILE, saved_bytes
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.capacity import longest_context, usable
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

SEVEN = ModelSpec.load("qwen2.5-7b")


def planned(model: ModelSpec, work: Workload, **knobs: object) -> Plan:
    return Plan(
        policy="overlapped",
        hardware="h200",
        source="",
        model=model,
        workload=work,
        knobs=Knobs(**knobs),  # type: ignore[arg-type]
        device_limit_bytes=2**40,
        host_limit_bytes=2**42,
    )


def test_activations_and_temporary_values_of_7b_in_pieces() -> None:
    work = Workload(batch=1, sequence=524288, token_piece=8192)
    plain = msgspec.structs.replace(work, token_piece=None)
    saved, whole = (activations_estimate(SEVEN, each) for each in (work, plain))
    assert saved < 0.2 * whole
    layers = [
        activations_estimate(SEVEN, each) + workspace_estimate(SEVEN, each).layer
        for each in (work, plain)
    ]
    assert layers[0] < 0.4 * layers[1]
    # A piece with all tokens means no pieces.
    one = msgspec.structs.replace(work, token_piece=524288)
    assert activations_estimate(SEVEN, one) == whole
    assert workspace_estimate(SEVEN, one) == workspace_estimate(SEVEN, plain)


def test_a_recomputed_layer_computes_no_more_than_without_pieces() -> None:
    plain = Workload(batch=1, sequence=8192)
    pieces = msgspec.structs.replace(plain, token_piece=2048)
    for model, skips in ((SEVEN, True), (ModelSpec.load("gemma-2-9b"), False)):
        flops = {
            (kind, work.piece): op_work(model, kind, "0", work).flops
            for kind in ("forward", "recompute", "backward")
            for work in (plain, pieces)
        }
        mlp = 2 * plain.tokens * 3 * model.hidden * model.config["intermediate_size"]
        assert model.skips_mlp("0") is skips
        assert flops["forward", 2048] == flops["forward", 0]
        assert flops["backward", 2048] == flops["backward", 0] + mlp
        assert flops["recompute", 2048] == flops["recompute", 0] - (mlp if skips else 0)


def test_a_recompute_whose_output_is_read_computes_the_mlp() -> None:
    """In a block of two layers, the recompute of the second reads the output of the first."""
    work = Workload(batch=1, sequence=8192, token_piece=2048)
    model = SEVEN.with_layers(4)
    schedule = lower(planned(model, work, checkpoint_interval=2))
    costs = cost_model(HardwareSpec.load("h200"), model, work)
    ops = {op.id: op for op in schedule.ops if op.kind == "recompute"}
    first, second = ops["R0.m0"], ops["R1.m0"]
    assert len(first.writes) == 2
    assert len(second.writes) == 1
    assert first.flops == op_work(model, "forward", "0", work).flops
    assert second.flops == op_work(model, "recompute", "0", work).flops
    forward = next(op for op in schedule.ops if op.id == "F0.m0")
    assert costs.duration_ns(first) == costs.duration_ns(forward) > costs.duration_ns(second)


def test_small_pieces_take_more_time() -> None:
    costs = {}
    for piece in (None, 65536, 2048, 256):
        work = Workload(batch=1, sequence=131072, token_piece=piece)
        plan = planned(SEVEN.with_layers(2), work, placement=Placement(saved_activations="all"))
        found = cost_model(HardwareSpec.load("h200"), plan.model, work)
        costs[piece] = sum(found.duration_ns(op) for op in lower(plan).ops if op.lane == "compute")
    assert sorted(costs.values()) == list(costs.values())


def test_experts_in_pieces_read_all_their_weights_for_each_piece() -> None:
    """The products have fewer rows for each expert, and compute whole tiles."""
    model = ModelSpec.load("qwen3-30b-a3b").shortest(1)
    plain = Workload(batch=1, sequence=65536)
    pieces = msgspec.structs.replace(plain, token_piece=4096)  # 256 rows for each expert
    c = model.config
    experts = 3 * c["num_experts"] * c["moe_intermediate_size"] * model.hidden
    whole, parts = (op_work(model, "forward", "0", work) for work in (plain, pieces))
    assert parts.linear_flops - whole.linear_flops == 15 * 2 * (TILE // 2) * experts
    added = parts.moved_bytes - whole.moved_bytes
    assert added == 15 * 2 * (experts + c["num_experts"] * model.hidden + model.hidden * 2)
    assert model.skips_mlp("0")
    recompute, backward = (op_work(model, kind, "0", pieces) for kind in ("recompute", "backward"))
    assert recompute.linear_flops < 0.5 * whole.linear_flops
    assert backward.linear_flops > 2 * parts.linear_flops


def test_a_router_loss_keeps_the_logits_and_computes_the_experts_again() -> None:
    """Its gradient reads the logits of the recompute, so the experts are not left out."""
    plain = ModelSpec.load("qwen3-30b-a3b").shortest(1)
    switch = {"output_router_logits": True, "router_aux_loss_coef": 0.001}
    routed = ModelSpec.from_config({**plain.config, **switch}, "config.json")
    work = Workload(batch=1, sequence=65536, token_piece=4096)
    assert op_work(routed, "recompute", "0", work) == op_work(routed, "forward", "0", work)
    logits = 4 * work.tokens * plain.config["num_experts"]
    assert saved_bytes(routed, "0", work) == saved_bytes(plain, "0", work) + logits


def test_unable_models_and_another_system_are_refused() -> None:
    work = Workload(batch=1, sequence=32, token_piece=16)
    linear = wide_model("qwen3_5_text")
    lower(planned(linear, work))
    with pytest.raises(UserError, match="found 16 with compiled layers of qwen3_5_text"):
        lower(planned(linear, msgspec.structs.replace(work, compiled=True)))
    lower(planned(ModelSpec.load("mixtral-8x7b"), work))
    with pytest.raises(UserError, match="found 16 with phimoe, whose experts draw random numbers"):
        lower(planned(wide_model("phimoe"), work))
    shared = wide_model("granitemoeshared").config | {"shared_intermediate_size": 64}
    with pytest.raises(UserError, match="of some layer is not one module"):
        lower(planned(ModelSpec.from_config(shared, "config.json"), work))
    with pytest.raises(UserError, match="found 16 with zero3_offload, a system"):
        lower(msgspec.structs.replace(planned(SEVEN, work), policy="zero3_offload"))


def test_pieces_allow_longer_contexts() -> None:
    hardware, longest = HardwareSpec.load("h200"), {}
    for piece in (None, 2048):
        work = Workload(batch=1, sequence=4096, token_piece=piece)
        plan = msgspec.structs.replace(
            planned(SEVEN, work),
            device_limit_bytes=hardware.device_bytes,
            host_limit_bytes=512 * 2**30,
        )
        costs = cost_model(hardware, SEVEN, work)
        longest[piece] = longest_context(list(usable(plan, hardware, costs, ["overlapped"])), work)
    assert longest[None] < 524_288 < longest[2048]
