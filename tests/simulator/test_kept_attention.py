"""Tests of saved attention: its schedule, its costs, its memory, and when the search chooses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import Calibrated, Datasheet, cost_model
from megatrain.simulator.hardware.cost_table import CostTable
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess, with_knobs
from megatrain.simulator.planner.capacity import MemoryFootprint
from megatrain.simulator.planner.search import search
from megatrain.simulator.schedule import SAVED_ATTENTION_SUFFIX, Op
from megatrain.simulator.schedule.arithmetic import cost_keys
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

pytestmark = pytest.mark.usefixtures("without_libraries")

GIB = 2**30
MODEL, H200 = ModelSpec.load("qwen2.5-7b"), HardwareSpec.load("h200")
LONG = Workload(batch=1, sequence=131072, compiled=True)


def planned(work: Workload, placement: Placement, **knobs: Any) -> Plan:
    limits = {"device_limit_bytes": H200.device_bytes, "host_limit_bytes": H200.host_bytes}
    return Plan(
        policy="overlapped",
        hardware="h200",
        source="",
        model=MODEL,
        workload=work,
        knobs=Knobs(placement=placement, **knobs),
        **limits,
    )


def recompute(plan: Plan, *, kept: bool) -> Op:
    return Op(id="R0.m0", lane="compute", **cost_keys(plan, "recompute", "0", kept=kept))


# ---- the schedule


@pytest.mark.parametrize("policy", policies.names())
def test_forward_saves_attention_recompute_reads_it_and_backward_releases_it(
    make_plan: Callable[..., Plan], policy: str
) -> None:
    """Forward saves the output of attention, recompute reads it, and backward releases it."""
    plan = make_plan(
        policy,
        accumulation=2,
        checkpoint_interval=2,
        placement=Placement(saved_attention="0-2", saved_activations="2"),
    )
    schedule = policies.lower(plan)
    schedule.check()
    for layer, held in (("0", True), ("1", True), ("2", False), ("3", False)):
        for micro in range(2):
            found = {}
            for kind in "FRB":
                op = schedule.by_id.get(f"{kind}{layer}.m{micro}")
                names = op.buffers if op else ()
                found[kind] = [name for name in names if name.startswith("device.attention:")]
            if held:
                (slot,) = found["F"]
                assert found == {"F": [slot], "R": [slot], "B": [slot]}
                assert slot in schedule.by_id[f"F{layer}.m{micro}"].acquires
                assert slot in schedule.by_id[f"B{layer}.m{micro}"].releases
            else:
                assert not any(found.values())
    assert sum(buffer.data == "attention" for buffer in schedule.buffers) == 2


@pytest.mark.parametrize(("interval", "slots"), [(1, 1 + 2), (4, 1 + 3)])
def test_offloaded_attention_stays_in_host_memory_until_recompute(
    make_plan: Callable[..., Plan], interval: int, slots: int
) -> None:
    """Forward releases the slot after a copy to the host, and recompute loads it into another slot.

    The attention of all layers of a block is on the device at the same time.
    """
    plan = make_plan(
        accumulation=2,
        checkpoint_interval=interval,
        placement=Placement(saved_attention="0-3", offloaded_attention="0,2-3"),
    )
    schedule = policies.lower(plan)
    schedule.check()
    size = plan.model.kept_attention("0", plan.workload).bytes
    for layer, offloaded in (("0", True), ("1", False), ("2", True), ("3", True)):
        for micro in range(2):
            around = [schedule.by_id.get(f"{kind}{layer}.m{micro}") for kind in ("T", "TL")]
            if not offloaded:
                assert around == [None, None]
                continue
            down, up = around
            assert down
            assert up
            home = f"host.offloaded_attention:{layer}"
            assert (list(down.writes), list(up.reads)) == ([home], [home])
            assert (down.lane, up.lane, down.bytes, up.bytes) == ("d2h", "h2d", size, size)
            assert down.releases == down.reads == schedule.by_id[f"F{layer}.m{micro}"].writes[1:]
            (slot,) = up.writes
            assert slot in schedule.by_id[f"R{layer}.m{micro}"].reads
            assert slot in schedule.by_id[f"B{layer}.m{micro}"].releases
    kept = [buffer for buffer in schedule.buffers if buffer.data == "attention"]
    assert sum(buffer.place == "host" for buffer in kept) == 3
    assert sum(buffer.place == "device" for buffer in kept) == slots


def test_offloaded_attention_grows_with_the_tokens(make_plan: Callable[..., Plan]) -> None:
    """The memory of a larger micro-batch, which gives the room in a verdict, includes it."""
    plan = make_plan(placement=Placement(saved_attention="0-3", offloaded_attention="0,2-3"))
    costs = cost_model(HardwareSpec.load("h200"), plan.model, plan.workload)
    work = msgspec.structs.replace(plan.workload, batch=4 * plan.workload.batch)
    larger = msgspec.structs.replace(plan, workload=work)
    found = MemoryFootprint(plan, costs).account(work).pools["host.offloaded_attention"]
    expected = MemoryFootprint(larger, costs).account().pools["host.offloaded_attention"]
    assert found == expected > 0


def test_saved_attention_changes_only_the_recompute_op(make_plan: Callable[..., Plan]) -> None:
    """Saved attention changes only the FLOPs and the cost key of recompute."""
    plan = make_plan()
    kept = with_knobs(plan, placement=Placement(saved_attention="1"))
    before, after = policies.lower(plan), policies.lower(kept)
    for op in before.ops:
        other = after.by_id[op.id]
        if op.id == "R1.m0":
            work = op_work(plan.model, "recompute", "1", plan.workload)
            assert op.flops - other.flops == work.attention_flops > 0
            assert other.shape == op.shape.replace("/", f"{SAVED_ATTENTION_SUFFIX}/")
        else:
            assert (other.flops, other.shape, other.bytes) == (op.flops, op.shape, op.bytes)


def test_saved_attention_takes_its_output_and_four_bytes_per_head_and_token() -> None:
    """Saved attention takes its output, and 4 bytes for each head and token."""
    choice = assess(planned(LONG, Placement(saved_attention="0-9")), cost_model(H200, MODEL, LONG))
    assert choice.account.pools["device.attention"] == 10 * 131072 * 28 * (128 * 2 + 4)


def test_a_layer_that_cannot_save_attention_is_named(make_plan: Callable[..., Plan]) -> None:
    for family, layer in (("gemma2", "0"), ("phi3", "1")):
        with pytest.raises(
            UserError, match=rf"placement: saved_attention: found layer {layer} of a {family} model"
        ):
            make_plan(family=family, placement=Placement(saved_attention=layer)).placed(
                "saved_attention"
            )
    model = make_plan(family="mistral").model
    model = msgspec.structs.replace(model, config={**model.config, "sliding_window": 8})
    windowed = make_plan(model=model, placement=Placement(saved_attention="all"))
    with pytest.raises(UserError, match="sliding_attention"):
        policies.lower(windowed)


# ---- kernels


def test_a_kernel_is_named_in_shapes_only_where_it_is_chosen() -> None:
    """A cost key names the kernel of attention only if the plan chooses one."""
    work = Workload(batch=1, sequence=8)
    assert [
        msgspec.structs.replace(work, attention=kernel).shape for kernel in (None, "flash", "cudnn")
    ] == ["1x8-bf16", "1x8-bf16-flash", "1x8-bf16-cudnn"]


@pytest.mark.parametrize(
    ("kernel", "sequence", "measured"),
    [
        ("flash", 32768, 351),
        ("flash", 131072, 333),
        ("cudnn", 32768, 620),
        ("cudnn", 131072, 563),
        ("cudnn", 524288, 483),
    ],
)
def test_the_datasheet_has_each_kernel_s_rate(kernel: Any, sequence: int, measured: float) -> None:
    """The datasheet's rate of each attention kernel is near the measured one.

    `measured` is in TFLOP/s on an H200 on 2026-11-21, for the forward pass. The datasheet's rate is
    that of forward and backward together.
    """
    plan = planned(Workload(batch=1, sequence=sequence, attention=kernel), Placement())
    costs = Datasheet(H200, MODEL, plan.workload)
    seconds = (
        costs.duration_ns(recompute(plan, kept=False))
        - costs.duration_ns(recompute(plan, kept=True))
    ) / 1e9
    assert op_work(
        MODEL, "recompute", "0", plan.workload
    ).attention_flops / seconds / 1e12 == pytest.approx(measured, rel=0.15)


# ---- costs


def table(plan: Plan, **durations: int) -> CostTable:
    """Returns a calibration of recompute with attention (`full`) and without it (`kept`)."""
    ops = {name: recompute(plan, kept=name == "kept") for name in durations}
    compute = {"recompute": {op.shape: (op.amount, durations[name]) for name, op in ops.items()}}
    return CostTable(measured_on="here", date="2026-11-21", curves={}, compute=compute)


def test_a_measured_recompute_without_attention_is_looked_up() -> None:
    plan = planned(LONG, Placement())
    costs = Calibrated(table(plan, full=1000, kept=300))
    assert [
        (costs.duration_ns(op), costs.extrapolated(op))
        for op in (recompute(plan, kept=False), recompute(plan, kept=True))
    ] == [(1000, False), (300, False)]


def test_an_unmeasured_recompute_without_attention_is_scaled_by_the_datasheet() -> None:
    """Recompute without attention that was not measured is scaled from recompute with attention.

    The datasheet gives the factor.
    """
    plan = planned(LONG, Placement())
    sheet = Datasheet(H200, MODEL, LONG)
    share = sheet.duration_ns(recompute(plan, kept=True)) / sheet.duration_ns(
        recompute(plan, kept=False)
    )
    costs, op = Calibrated(table(plan, full=10**9), sheet), recompute(plan, kept=True)
    assert (costs.duration_ns(op), costs.extrapolated(op)) == (
        pytest.approx(share * 1e9, abs=1),
        True,
    )
    assert 0.1 < share < 0.5


def test_a_recompute_with_attention_is_never_scaled_from_one_without() -> None:
    plan, shorter = (
        planned(msgspec.structs.replace(LONG, sequence=sequence), Placement())
        for sequence in (131072, 65536)
    )
    with pytest.raises(UserError, match="no time of the recompute of a decoder layer of "):
        Calibrated(table(shorter, kept=300)).duration_ns(recompute(plan, kept=False))


# ---- the search


def chosen(
    work: Workload, device_limit: int = H200.device_bytes, host_limit: int = H200.host_bytes
) -> Plan:
    limits = {"device_limit": device_limit, "host_limit": host_limit}
    choice = search(MODEL, H200, work, policies=["overlapped"], **limits)[0]
    assert choice.feasible
    return choice.plan


def seconds(plan: Plan) -> float:
    return assess(plan, cost_model(H200, MODEL, plan.workload)).step_seconds


@pytest.mark.parametrize(
    "work",
    [
        LONG,
        msgspec.structs.replace(LONG, accumulation=2),
        Workload(batch=1, sequence=65536, attention="cudnn"),
    ],
)
def test_saving_the_attention_of_long_sequences_makes_a_step_faster(work: Workload) -> None:
    """The search saves the attention of long sequences, and the step is faster."""
    plan = chosen(work)
    placement = plan.knobs.placement
    assert len(plan.placed("saved_attention") | plan.placed("saved_activations")) == 28
    without = with_knobs(plan, placement=msgspec.structs.replace(placement, saved_attention=""))
    assert seconds(plan) < 0.92 * seconds(without)


def test_checkpoints_are_offloaded_if_saved_attention_does_not_fit_next_to_them() -> None:
    """If checkpoints and saved attention do not both fit, the checkpoints are offloaded."""
    plan = chosen(LONG, 90 * GIB)
    assert plan.knobs.placement.offloaded_inputs == "all"
    assert len(plan.placed("saved_attention")) > 20
    assert seconds(plan) < 0.9 * seconds(
        with_knobs(
            plan, placement=msgspec.structs.replace(plan.knobs.placement, saved_attention="")
        )
    )


def test_saved_attention_that_does_not_fit_the_device_is_offloaded() -> None:
    plan = chosen(LONG, 40 * GIB, 136 * GIB)
    placement = plan.knobs.placement
    assert placement.offloaded_inputs == "all"
    offloaded = plan.placed("offloaded_attention")
    assert offloaded < plan.placed("saved_attention")
    assert len(offloaded) > 3
    others = plan.placed("saved_attention") - offloaded
    here = msgspec.structs.replace(
        placement, saved_attention=",".join(others), offloaded_attention=""
    )
    assert seconds(plan) < 0.97 * seconds(with_knobs(plan, placement=here))


@pytest.mark.parametrize(
    "work",
    [
        Workload(batch=32, sequence=1024),
        msgspec.structs.replace(LONG, sequence=32768, dtype="fp32"),
    ],
)
def test_attention_of_short_sequences_and_in_fp32_is_not_saved(work: Workload) -> None:
    """The search does not save the attention of short sequences or fp32."""
    assert not chosen(work).knobs.placement.saved_attention
