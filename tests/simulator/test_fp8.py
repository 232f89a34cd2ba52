"""Tests of fp8 matrix products in the simulator: workload, costs, memory, machines and verdict.

`tests/runtime/test_fp8.py` tests their arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from counted_memory import counted
from small_model import SMALL

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import Calibrated, Datasheet, cost_model
from megatrain.simulator.costs.kernel_traffic import products_slowdown
from megatrain.simulator.hardware.cost_table import CostTable, Workspace
from megatrain.simulator.hardware.machine import HardwareSpec, library
from megatrain.simulator.memory.formulas import (
    activations_estimate,
    fp8_saved_bytes,
    fp8_temporary_bytes,
    workspace_estimate,
)
from megatrain.simulator.model.op_work import fp8_share, op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload, without_fp8
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.op import OpId
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict import notes

WORK = Workload(batch=8, sequence=1024)
ROWWISE = msgspec.structs.replace(WORK, fp8="rowwise")
H200 = HardwareSpec.load("h200")
WITHOUT = {
    "a100-40",
    "a100-80-pcie",
    "a100-80-sxm",
    "a6000",
    "apple-m3-ultra",
    "apple-m4-max",
    "mi300x",
    "rtx3080-10gb",
    "rtx3090",
    "ryzen-ai-max-395-128gb",
}
"""Machines without fp8 products, and one with another fp8 format."""


def test_fp8_is_a_part_of_the_shape_and_needs_bf16() -> None:
    packed = msgspec.structs.replace(ROWWISE, compiled=True, documents=True)
    assert packed.shape == "8x1024-bf16-fp8-rowwise-compiled-documents"
    assert without_fp8(packed.shape) == "8x1024-bf16-compiled-documents"
    assert (WORK.precision, ROWWISE.precision) == ("bf16", "bf16 with rowwise fp8 products")
    with pytest.raises(UserError, match="workload: fp8: found rowwise with dtype fp32"):
        Workload(batch=1, sequence=16, dtype="fp32", fp8="rowwise")


def test_a_schedule_is_the_same_except_for_the_shape_of_its_layers(
    make_plan: Callable[..., Plan],
) -> None:
    plain, fp8 = (lower(make_plan(fp8=fp8)) for fp8 in (None, "rowwise"))
    assert plain.buffers == fp8.buffers
    assert [msgspec.structs.replace(op, shape=without_fp8(op.shape)) for op in fp8.ops] == [
        *plain.ops
    ]


def test_other_systems_are_not_predicted_with_fp8(make_plan: Callable[..., Plan]) -> None:
    with pytest.raises(UserError, match=r"zero_offload: fp8: found rowwise; allowed: products in"):
        lower(make_plan("zero_offload", fp8="rowwise"))


@pytest.mark.parametrize("name", library())
def test_machines_with_fp8_have_twice_the_rate_of_bf16(name: str) -> None:
    machine = HardwareSpec.of_library(name)
    if name in WITHOUT:
        assert machine.fp8_speed() is None
        with pytest.raises(UserError, match=f"hardware {name}: .* no rate for fp8; .*bf16$"):
            cost_model(machine, SMALL, ROWWISE)
    else:
        assert machine.fp8_speed() == pytest.approx(1.85, rel=0.02)


def test_a_calibration_has_the_rates_that_it_measured_or_those_of_the_datasheet() -> None:
    table = CostTable(measured_on="NVIDIA H200", date="2026-11-21", curves={}, compute={})
    machine = msgspec.structs.replace(H200, costs=table, peak_tflops={"bf16": 700.0})
    assert machine.fp8_speed() == pytest.approx(1.85, rel=0.001)
    both = msgspec.structs.replace(machine, peak_tflops={"bf16": 700.0, "fp8": 1260.0})
    assert both.fp8_speed() == pytest.approx(1.8)
    assert both.shared("a CPU", "1").matrix_tflops == 700.0
    elsewhere = msgspec.structs.replace(table, measured_on="a card that nobody knows")
    assert msgspec.structs.replace(machine, costs=elsewhere).fp8_speed() is None


@pytest.mark.parametrize("kind", ["forward", "recompute", "backward"])
def test_products_and_casts_are_what_changes_in_the_time_of_a_layer(kind: str) -> None:
    work = msgspec.structs.replace(ROWWISE, compiled=True)
    bf16 = msgspec.structs.replace(WORK, compiled=True)
    plain, fp8 = op_work(SMALL, kind, "0", bf16), op_work(SMALL, kind, "0", work)
    assert (plain.linear_flops, plain.attention_flops) == (fp8.linear_flops, fp8.attention_flops)
    assert (plain.fp8_flops, fp8.fp8_flops) == (0, fp8.linear_flops), "all layers are able"
    tokens, weights = WORK.tokens, SMALL.fp8_weights("0").values()
    source, target, elements = (
        tokens * sum(shape[1] for shape in weights),
        tokens * sum(shape[0] for shape in weights),
        sum(map(math.prod, weights)),
    )
    casts = {False: 5 * (source + elements), True: 7 * (source + elements) + 12 * target}
    assert fp8.moved_bytes - plain.moved_bytes == casts[kind == "backward"]
    assert fp8.unfused_bytes - plain.unfused_bytes == casts[kind == "backward"]
    slower = products_slowdown(SMALL, work, kind, "0")
    saved = (
        slower * fp8.linear_flops * (1 - 1 / H200.fp8_speed()) / (989e3 * H200.linear_efficiency)
    )
    added = casts[kind == "backward"] / H200.device_gb_per_s
    before, after = (
        Datasheet(H200, SMALL, each).duration_ns(op_of(kind, each)) for each in (bf16, work)
    )
    assert before - after == pytest.approx(saved - added, abs=2)


def op_of(kind: str, work: Workload) -> Op:
    return Op(
        id=str(OpId(kind, "0", micro=0)),
        lane="compute",
        shape=f"{SMALL.decoders[0].signature}/{work.shape}",
        flops=op_work(SMALL, kind, "0", work).flops,
    )


def test_rows_that_do_not_fit_stay_in_bf16() -> None:
    odd = msgspec.structs.replace(ROWWISE, batch=1, sequence=1023)
    plain = msgspec.structs.replace(odd, fp8=None)
    assert op_work(SMALL, "backward", "0", odd) == op_work(SMALL, "backward", "0", plain)
    assert (fp8_share(SMALL, ROWWISE), fp8_share(SMALL, odd)) == (1.0, 0.0)
    assert activations_estimate(SMALL, odd) == activations_estimate(SMALL, plain)
    assert "none of the matrix products is in fp8, because the 1,023" in notes.fp8(SMALL, odd)
    assert notes.fp8(SMALL, WORK) == ""


def test_experts_and_routers_stay_in_bf16() -> None:
    mixture = ModelSpec.load("mixtral-8x7b")
    assert set(mixture.fp8_weights("0")) == {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    assert notes.fp8(mixture, ROWWISE) == (
        "10.6 % of the layers' matrix products, by FLOPs, are in fp8 (rowwise); these stay in bf16:"
        " mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj"
    )
    latent = ModelSpec.load("deepseek-v3")
    assert notes.fp8(latent, ROWWISE).endswith(
        "bf16: mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.gate.weight"
    )
    assert notes.fp8(SMALL, ROWWISE).startswith("100 % of the layers' matrix products")
    assert notes.fp8(SMALL, ROWWISE).endswith("(rowwise)")


def test_layers_that_are_never_compiled_cast_as_eager_ones() -> None:
    """The first three of four layers of Qwen3-Next have linear attention."""
    model = ModelSpec.load("qwen3-next-80b-a3b")
    compiled = msgspec.structs.replace(ROWWISE, compiled=True)
    for kind in ("forward", "backward"):
        apart, full = (
            [
                op_work(model, kind, layer, work).moved_bytes
                - op_work(model, kind, layer, msgspec.structs.replace(work, fp8=None)).moved_bytes
                for work in (ROWWISE, compiled)
            ]
            for layer in ("0", "3")
        )
        assert 0 < apart[1] == apart[0]
        assert 0 < full[1] < full[0]
    apart = model.with_layers(3)
    assert fp8_temporary_bytes(apart, compiled) == fp8_temporary_bytes(apart, ROWWISE) > 0
    assert fp8_saved_bytes(apart, compiled) == 0 < fp8_saved_bytes(model, compiled)


def test_layers_that_were_measured_in_bf16_are_scaled() -> None:
    plain, fp8 = op_of("forward", WORK), op_of("forward", ROWWISE)
    table = CostTable(
        measured_on="NVIDIA H200",
        date="2026-11-21",
        curves={},
        compute={"forward": {plain.shape: (plain.amount, 1_000_000)}},
        activations={f"{SMALL.shape}/{WORK.shape}": (WORK.tokens, 10**9)},
        workspace={f"{SMALL.shape}/{WORK.shape}": Workspace(layer=5, head=6)},
    )
    machine = msgspec.structs.replace(H200, costs=table, peak_tflops={"bf16": 989.0})
    costs = cost_model(machine, SMALL, ROWWISE)
    assert isinstance(costs, Calibrated)
    share = Datasheet(H200, SMALL, ROWWISE).duration_ns(fp8) / Datasheet(
        H200, SMALL, WORK
    ).duration_ns(plain)
    assert costs.duration_ns(fp8) == math.ceil(share * 1_000_000)
    assert costs.extrapolated(fp8)
    assert not cost_model(machine, SMALL, WORK).extrapolated(plain)
    assert costs.workspace(SMALL, ROWWISE) == Workspace(
        layer=5 + fp8_temporary_bytes(SMALL, ROWWISE), head=6
    )
    assert costs.activations_bytes(SMALL, ROWWISE) == 10**9
    own = {"forward": {**table.compute["forward"], fp8.shape: (fp8.amount, 600_000)}}
    measured = msgspec.structs.replace(machine, costs=msgspec.structs.replace(table, compute=own))
    costs = cost_model(measured, SMALL, ROWWISE)
    assert (costs.duration_ns(fp8), costs.extrapolated(fp8)) == (600_000, False)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
@pytest.mark.parametrize("sequence", [128, 2048])
def test_the_peak_of_a_layer_is_not_predicted_too_low(scaling: Any, sequence: int) -> None:
    model = ModelSpec.load("llama-3.2-1b").shortest(1)
    work = Workload(batch=2, sequence=sequence, fp8=scaling)
    plain = msgspec.structs.replace(work, fp8=None)
    found = counted(model, model.decoders[0], work)
    assert found.saved == counted(model, model.decoders[0], plain).saved
    predicted = activations_estimate(model, work) + workspace_estimate(model, work).layer
    assert 1 <= predicted / found.all < 1.5
    compiled = msgspec.structs.replace(work, compiled=True)
    assert fp8_saved_bytes(model, work) == 0
    weights = model.fp8_weights("0")
    rebuilt = 2 * (2 * model.hidden + model.decoders[0].inner)  # two norms and the MLP's product
    assert fp8_saved_bytes(model, compiled) == sum(map(math.prod, weights.values())) + (
        compiled.tokens * (8 * len(weights) - rebuilt)
    )
