"""Tests of the costs of short recomputes, which leave out products that no gradient needs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from small_table import table
from whole_models import model_of

from megatrain.simulator.costs import cost_model
from megatrain.simulator.costs.calibrated import Calibrated
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload, is_short, shortened, without_short
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op, ScheduleError, computes_output
from megatrain.simulator.schedule.operands import check_operands
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

H200 = HardwareSpec.load("h200")
SEVEN = ModelSpec.load("qwen2.5-7b").with_layers(4)
FULL = Workload(batch=8, sequence=1024)
SHORT = msgspec.structs.replace(FULL, short_recompute=True)
DOWN = 18944 * 3584
"""Elements of the matrix that a short recompute of Qwen2.5-7B does not multiply with."""
WITHOUT = {
    # A norm reads the output of the MLP.
    "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "olmo2", "olmo3", "glm4", "exaone4",
    "hyperclovax", "flex_olmo",
    # Every layer has routed experts, and the gradients of the router need their outputs.
    "granitemoe", "granitemoe_swa", "granitemoeshared", "gpt_oss", "mixtral", "olmoe", "jetmoe",
    "mellum", "minimax", "minimax_m2", "phimoe", "qwen3_5_moe_text", "solar_open", "aria_text",
    "hunyuan_v1_moe", "dbrx",
    # Its linear layers have transposed weights.
    "gpt2",
}  # fmt: skip
"""Families in which no layer has a product that a short recompute leaves out."""


def planned(work: Workload, model: ModelSpec = SEVEN, **knobs: Any) -> Plan:
    return Plan(
        policy="overlapped",
        hardware="h200",
        source="",
        model=model,
        workload=work,
        knobs=Knobs(**knobs),
        device_limit_bytes=2**40,
        host_limit_bytes=2**42,
    )


def ops(work: Workload, **knobs: Any) -> dict[str, Op]:
    return {op.id: op for op in lower(planned(work, **knobs)).ops}


def test_families_that_leave_out_a_product() -> None:
    models = {family: model_of(family) for family in FAMILIES}
    short = {
        family
        for family, model in models.items()
        if any(model.last_products(layer.name, SHORT) for layer in model.decoders)
    }
    assert set(FAMILIES) - short == WITHOUT
    assert SEVEN.last_products("0", SHORT) == {"mlp.down_proj.weight": (3584, 18944)}
    assert SEVEN.last_products("0", FULL) == {}


def test_only_the_recompute_is_shorter() -> None:
    for kind in ("forward", "backward", "head", "embed", "loss", "embed_backward"):
        assert op_work(SEVEN, kind, "0", SHORT) == op_work(SEVEN, kind, "0", FULL)
    full, short = (op_work(SEVEN, "recompute", "0", work) for work in (FULL, SHORT))
    assert full.flops - short.flops == 2 * FULL.tokens * DOWN
    assert full.moved_bytes - short.moved_bytes == 2 * DOWN
    kept = [op_work(SEVEN, "recompute", "0", work, kept=True) for work in (FULL, SHORT)]
    assert kept[0].flops - kept[1].flops == 2 * FULL.tokens * DOWN


def test_a_product_in_fp8_that_is_left_out_casts_its_input_only() -> None:
    full, short = (
        op_work(SEVEN, "recompute", "0", msgspec.structs.replace(work, fp8="rowwise"))
        for work in (FULL, SHORT)
    )
    assert full.fp8_flops - short.fp8_flops == 2 * FULL.tokens * DOWN
    assert full.moved_bytes - short.moved_bytes == (2 + 13) * DOWN


def test_in_pieces_the_backward_pass_is_shorter() -> None:
    """It computes the pieces of the MLP again. The recompute leaves out the whole MLP anyway."""
    full, short = (
        msgspec.structs.replace(work, batch=1, sequence=8192, token_piece=2048)
        for work in (FULL, SHORT)
    )
    assert op_work(SEVEN, "recompute", "0", full) == op_work(SEVEN, "recompute", "0", short)
    longer, shorter = (op_work(SEVEN, "backward", "0", work) for work in (full, short))
    assert longer.flops - shorter.flops == 2 * full.tokens * DOWN
    assert longer.moved_bytes - shorter.moved_bytes == 4 * 2 * DOWN
    # In a block, the recompute of the second layer reads the output of the first.
    found = ops(short, checkpoint_interval=2)
    assert [computes_output(found[f"R{layer}.m0"].shape) for layer in (0, 1)] == [True, False]
    assert is_short(found["B0.m0"].shape)
    assert not is_short(found["R1.m0"].shape)


def test_a_recompute_whose_output_is_read_is_full() -> None:
    found, costs = ops(SHORT, checkpoint_interval=2), cost_model(H200, SEVEN, SHORT)
    first, second, forward = (found[name] for name in ("R0.m0", "R1.m0", "F0.m0"))
    assert first.shape == forward.shape
    assert first.flops == forward.flops
    assert second.shape == shortened(forward.shape)
    assert costs.duration_ns(first) == costs.duration_ns(forward) > costs.duration_ns(second)
    # All plans of the workload without short recomputes have the same ops as before.
    assert not any(is_short(op.shape) for op in ops(FULL).values())


def test_a_short_recompute_that_writes_an_output_is_an_error() -> None:
    schedule = lower(planned(SHORT, checkpoint_interval=2))
    first = next(op for op in schedule.ops if op.id == "R0.m0")
    broken = msgspec.structs.replace(first, shape=shortened(first.shape))
    check_operands(first, schedule.buffer, schedule.dtype_of, lambda *_: 0)
    with pytest.raises(ScheduleError, match=r"R0.m0: writes device.hidden.* does not compute"):
        check_operands(broken, schedule.buffer, schedule.dtype_of, lambda *_: 0)


def test_the_published_code_computes_whole_layers_again() -> None:
    plan = msgspec.structs.replace(planned(SHORT), policy="megatrain_code")
    found = [op for op in lower(plan).ops if op.kind == "recompute"]
    assert found
    assert all(computes_output(op.shape) for op in found)


@pytest.mark.parametrize("work", [SHORT, msgspec.structs.replace(SHORT, documents=True)])
def test_the_suffix_of_a_shape(work: Workload) -> None:
    shape = f"qwen2-1x2-v9/{work.shape}"
    assert is_short(shortened(shape))
    assert not is_short(shape)
    assert without_short(shortened(shape)) == shape


def durations(measured: Workload, wanted: Workload, **knobs: Any) -> dict[str, float]:
    """Returns the durations of ops of layer 0 in a plan of `wanted`, relative to the datasheet. All
    ops of `measured` were measured, and took three times as long as in the datasheet.
    """
    compute: dict[str, dict[str, tuple[int, int]]] = {}
    sheet = Datasheet(H200, SEVEN, measured)
    for op in ops(measured).values():
        if op.lane == "compute" and op.shape:
            compute.setdefault(op.kind, {})[op.shape] = (op.amount, 3 * sheet.duration_ns(op))
    sheet = Datasheet(H200, SEVEN, wanted)
    costs, found = Calibrated(table(compute=compute), sheet), ops(wanted, **knobs)
    return {
        name: costs.duration_ns(op) / sheet.duration_ns(op)
        for name, op in found.items()
        if name in ("F0.m0", "R0.m0", "B0.m0")
    }


def packed(work: Workload) -> Workload:
    return msgspec.structs.replace(work, documents=True)


def in_pieces(work: Workload) -> Workload:
    return msgspec.structs.replace(work, token_piece=2048)


@pytest.mark.parametrize(
    ("measured", "wanted", "interval"),
    [
        *(
            (measured, wanted, interval)
            for interval in (1, 2)
            for measured, wanted in (
                (FULL, SHORT),
                (SHORT, FULL),
                (SHORT, SHORT),
                (packed(FULL), SHORT),
                (packed(SHORT), FULL),
                (FULL, packed(SHORT)),
                (FULL, in_pieces(SHORT)),
                (SHORT, in_pieces(SHORT)),
                (SHORT, in_pieces(FULL)),
            )
        ),
        (in_pieces(FULL), in_pieces(SHORT), 1),
        (in_pieces(SHORT), in_pieces(FULL), 1),
    ],
)
def test_measured_recomputes_give_the_time_of_the_others(
    measured: Workload, wanted: Workload, interval: int
) -> None:
    """Machines that were calibrated without short recomputes are not measured again."""
    found = durations(measured, wanted, checkpoint_interval=interval)
    assert found == pytest.approx(dict.fromkeys(found, 3.0), rel=1e-3)


@pytest.mark.parametrize("saved", ["", "all"], ids=["no attention saved", "attention saved"])
@pytest.mark.parametrize("rows", [8, 4])
@pytest.mark.parametrize("wanted", [SHORT, FULL], ids=["short", "full"])
@pytest.mark.parametrize("measured", [SHORT, FULL], ids=["short", "full"])
@pytest.mark.parametrize("changes", [{}, {"token_piece": 2048}, {"head_groups": 2}])
def test_a_time_that_is_derived_in_several_steps(
    measured: Workload, wanted: Workload, rows: int, saved: str, changes: dict[str, Any]
) -> None:
    """For example from another number of tokens, without pieces, and without saved attention. Each
    step compares with the work of its own workload.
    """
    for more in ({}, {"head_groups": 2, "documents": True}):
        found = durations(
            msgspec.structs.replace(measured, batch=rows),
            msgspec.structs.replace(wanted, **changes | more),
            placement=Placement(saved_attention=saved),
        )
        assert found == pytest.approx(dict.fromkeys(found, 3.0), rel=0.03)
