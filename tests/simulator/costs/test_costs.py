"""Tests of cost models: the datasheet against measured times, and what all cost models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_table import SHAPE, load, table

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import Calibrated, Datasheet, Replayed, cost_model
from megatrain.simulator.costs.contention import Demand
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.engine.evaluator import evaluate
from megatrain.simulator.hardware.cost_table import HostMemorySpec, Workspace
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Clipping, Workload
from megatrain.simulator.schedule import Op, OpId
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Span, Timeline


def datasheet(name: str) -> Datasheet:
    return Datasheet(
        HardwareSpec.load(name), ModelSpec.load("qwen2.5-7b"), Workload(batch=32, sequence=1024)
    )


def forward(batch: int | str) -> Op:
    """Returns a forward op of `batch` sequences with 10 FLOPs each, or of a shape with 1 FLOP."""
    if isinstance(batch, str):
        return Op(id="F0.m0", lane="compute", flops=1, shape=batch)
    return Op(id="F0.m0", lane="compute", flops=10 * batch, shape=SHAPE.format(batch))


@pytest.mark.parametrize(
    ("size", "rate"), [(1, 38.4), (4, 49.8), (16, 53.5), (64, 55.0), (256, 55.4)]
)
def test_the_datasheet_gives_the_measured_rate_of_a_copy(size: int, rate: float) -> None:
    """The datasheet's rate of a pinned H2D copy is the measured one.

    `size` is in MiB and `rate` in GB/s, measured on an H200 (PCIe 5.0 x16) on 2026-11-21.
    """
    assert size * 2**20 / datasheet("h200").duration_ns(load(size * 2**20)) == pytest.approx(
        rate, rel=0.001
    )


@pytest.mark.parametrize(
    ("size", "rate"),
    [(0.25, 18.0), (1, 40.1), (4, 50.6), (16, 54.1), (64, 54.9), (256, 55.3), (2048, 55.4)],
)
def test_a_copy_on_a_measured_curve_is_not_extrapolated(size: float, rate: float) -> None:
    """The datasheet's rate of a pinned D2H copy is the measured one. Units are as above."""
    costs, op = datasheet("h200"), Op(id="G0.c0", lane="d2h", bytes=round(size * 2**20))
    assert op.bytes / costs.duration_ns(op) == pytest.approx(rate, rel=0.001)
    assert not costs.extrapolated(op)


def test_a_copy_beyond_the_curve_is_extrapolated_from_its_end_and_flagged() -> None:
    costs = datasheet("h200")
    ends = [(2**18 - 1, 2**18), (2**31, 2**31 + 1)]
    assert [tuple(costs.extrapolated(load(size)) for size in pair) for pair in ends] == [
        (True, False),
        (False, True),
    ]
    assert costs.duration_ns(load(2**32)) / costs.duration_ns(load(2**31)) == pytest.approx(
        2, rel=0.01
    )
    assert 10_000 < costs.duration_ns(load(1)) < 12_000, "the time in ns of the smallest copy"


@pytest.mark.parametrize(("code", "rate"), [("HP0", 107), ("TP0", 13), ("DP0", 3990)])
def test_a_pass_over_memory_has_the_measured_rate(code: str, rate: float) -> None:
    """Rates in GB/s of an H200 and its host: all threads, one thread, and the GPU."""
    op = Op(id=code, lane="compute" if code == "DP0" else "cpu", bytes=2**34)
    assert op.bytes / datasheet("h200").duration_ns(op) == pytest.approx(rate, rel=0.001)


def test_a_time_is_corrected_by_the_factor_of_its_kind_or_lane_or_of_all_ops() -> None:
    plain = datasheet("h200")
    factors = {"load_weights@h2d": 1.5, "h2d": 2.0, "all": 4.0}
    machine = msgspec.structs.replace(plain.hardware, corrections=factors)
    costs = cost_model(machine, plain.model, plain.workload)
    for name, lane, factor in (("W0", "h2d", 1.5), ("L0", "h2d", 2.0), ("G0", "d2h", 4.0)):
        op = Op(id=name, lane=lane, bytes=2**30)
        assert costs.duration_ns(op) == round(factor * plain.duration_ns(op))


def test_a_link_without_a_curve_is_a_latency_and_a_rate() -> None:
    costs, machine = datasheet("rtx3090"), HardwareSpec.load("rtx3090")
    assert costs.duration_ns(load(10**9)) == machine.link_latency_ns + 10**9 / machine.h2d_gb_per_s
    assert not costs.extrapolated(load(10**9))


@pytest.mark.parametrize("name", ["h200", "gh200-96", "rtx3080-10gb"])
@given(sizes=st.lists(st.integers(1, 2**34), min_size=2, max_size=6))
def test_a_larger_copy_takes_no_less_time_and_none_beats_the_link(
    name: str, sizes: list[int]
) -> None:
    costs, machine = datasheet(name), HardwareSpec.load(name)
    durations = [costs.duration_ns(load(size)) for size in sorted(sizes)]
    assert durations == sorted(durations)
    fastest = max([machine.h2d_gb_per_s, *(rate for _, rate in machine.h2d_curve)])
    assert all(
        size / duration <= 1.001 * fastest
        for size, duration in zip(sorted(sizes), durations, strict=True)
    )


@pytest.mark.parametrize(
    "name", ["dgx-spark", "apple-m3-ultra", "apple-m4-max", "ryzen-ai-max-395-128gb"]
)
def test_nothing_is_copied_where_memory_is_unified(
    make_plan: Callable[..., Plan], name: str
) -> None:
    plan = make_plan("double_buffer")
    costs = Datasheet(HardwareSpec.load(name), plan.model, plan.workload)
    schedule = policies.lower(plan)
    copies = [op for op in schedule.ops if op.lane in ("h2d", "d2h")]
    assert {(costs.duration_ns(op), costs.extrapolated(op)) for op in copies} == {(0, False)}
    assert simulate(schedule, costs).makespan_ns >= sum(
        costs.duration_ns(op) for op in schedule.ops if op.lane == "compute"
    )


def test_two_memories_with_a_fast_link_are_not_unified() -> None:
    for name in ("gh200-96", "gh200-144", "gb200"):
        assert not HardwareSpec.load(name).unified
        assert datasheet(name).duration_ns(load(2**30)) > 10**6


@pytest.mark.parametrize(
    ("name", "batch", "measured_ms", "allowed"),
    [
        ("7b", 8, (6.64, 20.13), 0.08),
        ("7b", 32, (28.04, 85.17), 0.02),
        ("7b", 64, (57.83, 174.3), 0.04),
        ("14b", 8, (7.97, 25.14), 0.07),
        ("14b", 32, (32.88, 103.9), 0.03),
        ("14b", 64, (71.70, 210.7), 0.07),
    ],
)
def test_the_datasheet_gives_the_measured_time_of_a_layer(
    name: str, batch: int, measured_ms: tuple[float, float], allowed: float
) -> None:
    """The datasheet's time of an eager decoder layer is near the measured one.

    `measured_ms` has the forward pass, and forward and backward together, of sequences of 1024
    tokens, measured on an H200 on 2026-11-21. No rate is fitted to them.

    A measured layer takes 5 to 12 % longer per token with 64 sequences than with 8, so no single
    rate of matrix products can be within 5 % of all.
    """
    model, workload = ModelSpec.load(f"qwen2.5-{name}"), Workload(batch=batch, sequence=1024)
    costs = cost_model(HardwareSpec.load("h200"), model, workload)
    forward, backward = (
        costs.duration_ns(Op(id=f"{code}0.m0", lane="compute")) / 1e6 for code in "FB"
    )
    assert forward == pytest.approx(measured_ms[0], rel=allowed)
    assert backward == pytest.approx(measured_ms[1] - measured_ms[0], rel=allowed)


@pytest.mark.parametrize(("batch", "measured_ms"), [(8, 1.25), (32, 3.77)])
def test_the_datasheet_gives_the_measured_time_of_summing_an_embedding_s_gradient(
    batch: int, measured_ms: float
) -> None:
    """7B on an H200 sums one block of columns with 8,192 tokens, and four with 32,768
    (docs/lab_notes.md, "Short kernels"). A table with half of the rows has less to set to zero.
    """
    model, work = ModelSpec.load("qwen2.5-7b"), Workload(batch=batch, sequence=1024)
    op = Op(id="EB.m0", lane="compute", shape="embedding")
    sheet = Datasheet(HardwareSpec.load("h200"), model, work)
    assert sheet.duration_ns(op) / 1e6 == pytest.approx(measured_ms, rel=0.1)
    half = ModelSpec(name="half", config={**model.config, "vocab_size": model.vocabulary // 2})
    less = Datasheet(HardwareSpec.load("h200"), half, work).duration_ns(op)
    assert sheet.duration_ns(op) - less == pytest.approx(
        2 * model.vocabulary / 2 * model.hidden / sheet.hardware.device_gb_per_s, rel=0.001
    )


@pytest.mark.parametrize(
    ("op", "measured_ns"),
    [("F0.m0", 10_441_424), ("R0.m0", 10_520_768), ("B0.m0", 21_368_805), ("Hh.m0", 183_843_990)],
)
def test_the_datasheet_gives_the_time_of_ops_in_a_run(op: str, measured_ns: int) -> None:
    """The datasheet's time of an op is near that in a measured run.

    The run is experiments/results/h200-qwen2.5-3b: Qwen2.5-3B, 32 x 1024 tokens, on an H200 on
    2026-11-21.
    """
    costs = Datasheet(
        HardwareSpec.load("h200"), ModelSpec.load("qwen2.5-3b"), Workload(batch=32, sequence=1024)
    )
    assert costs.duration_ns(Op(id=op, lane="compute")) == pytest.approx(measured_ns, rel=0.06)


@pytest.mark.parametrize(
    ("sequence", "forward", "backward"),
    [(1024, 250, 152), (4096, 334, 253), (32768, 351, 314), (131072, 333, 326)],
)
def test_the_datasheet_gives_the_measured_time_of_attention(
    sequence: int, forward: float, backward: float
) -> None:
    """The datasheet's rate of attention is near the measured one.

    `forward` and `backward` are TFLOP/s of causal flash attention with 28 heads of 128, on an H200
    on 2026-11-21. A backward pass counts as 2.5 forward passes.
    """
    hardware = HardwareSpec.load("h200")
    reached = (
        hardware.peak_tflops["bf16"]
        * hardware.attention_efficiency
        * sequence
        / (sequence + hardware.attention_half_tokens)
    )
    assert 3.5 / reached == pytest.approx(1 / forward + 2.5 / backward, rel=0.03)


def test_few_tokens_are_bound_by_reading_the_weights() -> None:
    model, machine = ModelSpec.load("qwen2.5-7b"), HardwareSpec.load("h200")
    costs = Datasheet(machine, model, Workload(batch=1, sequence=1))
    least = 2 * model.stack["0"].parameters / machine.device_gb_per_s
    assert least < costs.duration_ns(Op(id="F0.m0", lane="compute")) < 1.05 * least


@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_datasheet_knows_every_op_of_every_policy(
    make_plan: Callable[..., Plan], policy: str, dtype: str
) -> None:
    for clipping in get_args(Clipping):
        plan = make_plan(policy, dtype=dtype, accumulation=2, clipping=clipping)
        costs = Datasheet(HardwareSpec.load("h200"), plan.model, plan.workload)
        for op in policies.lower(plan).ops:
            assert costs.duration_ns(op) > 0 or op.kind == "clip"


def test_sums_of_ratios_read_the_gradient_and_the_second_moment(
    make_plan: Callable[..., Plan],
) -> None:
    """Clipping by update reads 6 bytes a parameter with bf16 gradients, while a norm reads 2.

    A calibration that did not measure it uses the datasheet's time and flags it.
    """
    plan = make_plan("resident", clipping="update")
    hardware = HardwareSpec.load("h200")
    costs = Datasheet(hardware, plan.model, plan.workload)
    ratios, norm = (
        Op(id="Q0", lane="update", parameters=3_990_000),
        Op(id="N0", lane="update", parameters=3_990_000),
    )
    assert (costs.duration_ns(ratios), costs.duration_ns(norm)) == (6000, 2000)
    old = cost_model(msgspec.structs.replace(hardware, costs=table()), plan.model, plan.workload)
    assert (old.duration_ns(ratios), old.extrapolated(ratios)) == (6000, True)
    new = cost_model(
        msgspec.structs.replace(
            hardware, costs=table(curves={"update_ratios@update": ((3_990_000, 7), (8_000_000, 9))})
        ),
        plan.model,
        plan.workload,
    )
    assert (new.duration_ns(ratios), new.extrapolated(ratios)) == (7, False)


def test_both_directions_of_the_link_share_by_the_duplex_fraction() -> None:
    hardware = msgspec.structs.replace(HardwareSpec.load("h200"), duplex_curve=(), host_memory=None)
    assert "d2h" not in hardware.contention["h2d"]
    assert together(hardware, load(2**28), save(2**28)) == (908_000, 908_000)
    assert together(hardware, load(2**28), Op(id="N0", lane="cpu", parameters=2**28))[0] == 971_000


def save(size: int) -> Op:
    return Op(id="G0.c0", lane="d2h", bytes=size)


def together(hardware: HardwareSpec, *ops: Op) -> tuple[int, ...]:
    costs = cost_model(hardware, ModelSpec.load("qwen2.5-7b"), Workload(batch=1, sequence=1024))
    demands = [costs.demand(op) for op in ops]
    return costs.rates(tuple(demand for demand in demands if demand is not None))


@pytest.mark.parametrize("policy", policies.names())
@pytest.mark.parametrize(
    "changes", [{}, {"tied": True, "accumulation": 2}, {"tied": True}], ids=str
)
def test_ops_of_one_size_cost_the_same(
    make_plan: Callable[..., Plan], policy: str, changes: dict[str, Any]
) -> None:
    """All ops of one size have the same cost.

    The simulator and the evaluator compute one cost for each size. If `Schedule.sizes` missed a
    difference, durations would be wrong.
    """
    plan = make_plan(policy, **changes)
    schedule = policies.lower(plan)
    costs = Datasheet(
        msgspec.structs.replace(
            HardwareSpec.load("h200"), host_memory=HostMemorySpec(gb_per_s=50.0)
        ),
        plan.model,
        plan.workload,
    )
    sizes = costs.sizes(schedule)
    assert len(sizes.ops) < len(schedule.ops)
    for op, size in zip(schedule.ops, sizes.which, strict=True):
        assert (costs.duration_ns(op), costs.demand(op)) == (
            costs.duration_ns(sizes.ops[size]),
            costs.demand(sizes.ops[size]),
        )
        # A measured machine also tells those that add to a gradient from those that write it.
        one = sizes.ops[size]
        assert (op.kind, op.lane, op.adds) == (one.kind, one.lane, one.adds)
    replayed = Replayed(evaluate(schedule, costs))
    assert evaluate(schedule, replayed) == evaluate(schedule, costs), (
        "each replayed op has its own duration"
    )


def test_adding_to_a_gradient_takes_longer_than_writing_it(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan("double_buffer", accumulation=2)
    costs, ops = (
        Datasheet(HardwareSpec.load("h200"), plan.model, plan.workload),
        policies.lower(plan).by_id,
    )
    assert costs.duration_ns(ops["A0b.m1"]) / costs.duration_ns(ops["A0b.m0"]) == pytest.approx(
        10 / 6, rel=0.01
    )


def test_a_machine_without_a_rate_for_the_dtype_is_refused() -> None:
    hardware = msgspec.structs.replace(HardwareSpec.load("h200"), peak_tflops={"bf16": 989.0})
    with pytest.raises(UserError, match="no rate for fp32"):
        cost_model(
            hardware, ModelSpec.load("qwen2.5-7b"), Workload(batch=1, sequence=8, dtype="fp32")
        )


def test_measured_costs_win_over_rates() -> None:
    hardware = msgspec.structs.replace(HardwareSpec.load("h200"), costs=table())
    assert isinstance(
        cost_model(hardware, ModelSpec.load("qwen2.5-7b"), Workload(batch=1, sequence=8)),
        Calibrated,
    )


def test_a_replay_of_another_schedule_is_refused() -> None:
    costs = Replayed(
        Timeline(
            name="measured",
            digest="",
            spans=(Span(op="F0.m0", lane="compute", start_ns=3, end_ns=10),),
        )
    )
    assert costs.duration_ns(forward("any")) == 7
    with pytest.raises(UserError, match=r"no span of W0\.c0"):
        costs.duration_ns(load(1))


# ---- documents


def packed_as(documents: bool, **changes: Any) -> Workload:
    return Workload(batch=32, sequence=1024, documents=documents, **changes)


def compute(kind: str, model: ModelSpec, work: Workload) -> Op:
    layer, op = model.decoders[0], str(OpId(kind, "" if kind == "head" else "0", "", 0))
    return Op(
        id=op,
        lane="compute",
        flops=op_work(model, kind, "0", work).flops,
        shape=f"{layer.signature}/{work.shape}",
    )


@pytest.mark.parametrize("kind", ["forward", "recompute", "backward"])
def test_documents_cost_flash_attention_over_whole_rows(kind: str) -> None:
    """With documents, attention has the rate of flash attention.

    A plan without them may use the rate of cuDNN.
    """
    hardware, model = HardwareSpec.load("h200"), ModelSpec.load("qwen2.5-7b")
    packed, flash, cudnn = (
        Datasheet(hardware, model, work)
        for work in (
            packed_as(True),
            packed_as(False, attention="flash"),
            packed_as(False, attention="cudnn"),
        )
    )
    op = compute(kind, model, packed_as(True))
    assert packed.duration_ns(op) == flash.duration_ns(op) > cudnn.duration_ns(op)
    assert not packed.extrapolated(op)


def test_a_mask_for_documents_costs_the_hidden_pairs_too_and_is_flagged() -> None:
    """If documents need a mask, attention also computes the masked pairs and is flagged."""
    hardware, model = HardwareSpec.load("h200"), ModelSpec.load("qwen2.5-7b")
    packed, plain = (
        Datasheet(hardware, model, packed_as(documents, dtype="fp32"))
        for documents in (True, False)
    )
    op = compute("forward", model, packed_as(True, dtype="fp32"))
    assert packed.duration_ns(op) - plain.duration_ns(op) == pytest.approx(
        plain.attention_ns("forward", "0"), rel=1e-3
    )
    assert (packed.extrapolated(op), plain.extrapolated(op)) == (True, False)


def test_scores_that_are_written_out_cost_the_same_with_documents() -> None:
    model = ModelSpec.load("gemma-2-27b")
    durations = {
        Datasheet(HardwareSpec.load("h200"), model, packed_as(documents))._compute_ns(
            "forward", "0"
        )
        for documents in (False, True)
    }
    assert len(durations) == 1


@pytest.mark.parametrize("measured_with", [False, True])
def test_costs_with_and_without_documents_predict_each_other_and_are_flagged(
    measured_with: bool,
) -> None:
    """Costs measured with documents predict a plan without them, and vice versa.

    Ops that depend on documents are flagged.
    """
    hardware, model = HardwareSpec.load("h200"), ModelSpec.load("qwen2.5-7b")
    measured, wanted = packed_as(measured_with), packed_as(not measured_with)
    ops = {kind: compute(kind, model, measured) for kind in ("forward", "head")}
    shape = f"{model.shape}/{measured.shape}"
    costs = Calibrated(
        table(
            compute={kind: {op.shape: (op.amount, 1000)} for kind, op in ops.items()},
            activations={shape: (measured.tokens, 77)},
            workspace={shape: Workspace(layer=5, head=6)},
        ),
        Datasheet(hardware, model, wanted),
    )
    assert [(costs.duration_ns(op), costs.extrapolated(op)) for op in ops.values()] == [
        (1000, False)
    ] * 2
    others = [compute(kind, model, wanted) for kind in ops]
    assert [(costs.duration_ns(op), costs.extrapolated(op)) for op in others] == [
        (1000, True),
        (1000, False),
    ], "only attention depends on documents, and the head has none"
    assert costs.activations_bytes(model, wanted) == 77
    assert costs.workspace(model, wanted) == Workspace(layer=5, head=6)
    chosen = packed_as(False, attention="cudnn")
    sheets = [Datasheet(hardware, model, each) for each in (chosen, packed_as(True))]
    assert sheets[0].share(ops["forward"], ops["forward"], sheets[1]) < 1


def test_copies_of_several_gpus_are_slower_while_both_directions_are_busy() -> None:
    hardware, model = HardwareSpec.load("h200"), ModelSpec.load("qwen2.5-3b")
    alone = cost_model(hardware, model, Workload(batch=1, sequence=1024))
    shared = ScaledCosts(alone, lambda op: op, both_slower={"h2d": 2.0, "d2h": 2.0})
    down, up, compute = Demand("h2d"), Demand("d2h"), Demand("compute")
    for busy in ((down,), (down, compute)):
        assert shared.rates(busy) == alone.rates(busy)
    busy = (down, up, compute)
    whole = alone.rates(busy)
    assert shared.rates(busy) == (round(whole[0] / 2), round(whole[1] / 2), whole[2])
