"""Tests of costs from a calibration: interpolation, extrapolation, and what is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_table import SHAPE, load, table

from megatrain.experiments.cli.options import OneLineParser, add_workload, workload
from megatrain.experiments.heldout.suites import suite
from megatrain.simulator import policies
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import Calibrated, cost_model
from megatrain.simulator.costs.datasheet import Datasheet
from megatrain.simulator.costs.interpolation import Point, fixed_ns, interpolate
from megatrain.simulator.costs.measured_shapes import measured_chunks
from megatrain.simulator.costs.missing import missing_measurement
from megatrain.simulator.hardware.cost_table import COMPUTE_KINDS, Workspace
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.attention_masks import (
    added_mask_bytes,
    lasting_mask_bytes,
    mask_bytes,
    saved_mask_bytes,
)
from megatrain.simulator.model.op_work import attention_shape, op_work, share_of_row
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import DOCUMENTS, Workload, rebuilding, shortened
from megatrain.simulator.schedule import Op
from megatrain.simulator.schedule.plan import Plan

RESULTS = Path(__file__).parents[3] / "experiments" / "results"
CALIBRATION = RESULTS / "h200-heldout" / "hardware.toml"


def forward(batch: int | str) -> Op:
    """Returns a forward op of `batch` sequences with 10 FLOPs each, or of a shape with 1 FLOP."""
    if isinstance(batch, str):
        return Op(id="F0.m0", lane="compute", flops=1, shape=batch)
    return Op(id="F0.m0", lane="compute", flops=10 * batch, shape=SHAPE.format(batch))


@pytest.mark.parametrize(
    ("size", "duration", "flagged"),
    [
        (1000, 110, False),
        (1500, 160, False),
        (2000, 210, False),
        (3000, 280, False),
        (4000, 350, False),
        (6000, 490, True),
        (500, 60, True),
    ],
)
def test_curves_are_lines_between_points_and_beyond_the_ends(
    size: int, duration: int, flagged: bool
) -> None:
    costs = Calibrated(table())
    assert (costs.duration_ns(load(size)), costs.extrapolated(load(size))) == (duration, flagged)


@given(
    st.dictionaries(st.integers(0, 1000), st.integers(0, 1000), min_size=2, max_size=6),
    st.integers(0, 1500),
)
def test_interpolation_stays_between_its_neighbours(points: dict[int, int], size: int) -> None:
    curve = tuple(sorted(points.items()))
    duration, flagged = interpolate(curve, size)
    assert duration >= 0
    assert flagged == (not curve[0][0] <= size <= curve[-1][0])
    if size in points:
        assert duration == points[size]
    elif not flagged:
        below = max(point for point in curve if point[0] < size)
        above = min(point for point in curve if point[0] > size)
        assert min(below[1], above[1]) <= duration <= max(below[1], above[1])


def test_a_steep_curve_never_goes_below_zero() -> None:
    assert interpolate(((1000, 10), (2000, 1000)), 100) == (0, True)


def test_two_near_points_with_a_fixed_part_are_a_line() -> None:
    """As the bytes of two similar batches."""
    nearly = ((8192, 1_000_008_192), (9216, 1_000_009_216))
    assert interpolate(nearly, 512) == (1_000_000_512, True)


def test_two_points_of_nearly_one_size_do_not_give_the_slope_beyond_them() -> None:
    """Layers of two models may have nearly as many parameters. The noise of their times, divided by
    the difference of their sizes, is no slope.
    """
    points = ((100_000, 1_000), (200_000, 2_000), (200_001, 2_500))
    assert interpolate(points, 400_000) == (5_500, True)
    assert interpolate(points[1:], 400_002) == (5_000, True)
    low = ((100_000, 1_500), (100_001, 1_000), (200_000, 2_000))
    assert interpolate(low, 50_000) == (1_250, True)


def test_a_lane_may_have_a_curve_of_its_own() -> None:
    """A curve named `norm@compute` is only for norms on that lane."""
    costs = Calibrated(table())
    assert costs.duration_ns(Op(id="N0", lane="compute", parameters=1000)) == 5
    assert costs.duration_ns(Op(id="N0", lane="cpu", parameters=1000)) == 50
    assert costs.duration_ns(Op(id="C", lane="cpu")) == 7
    assert not costs.extrapolated(Op(id="C", lane="cpu"))


def test_adding_may_have_a_curve_of_its_own() -> None:
    """A curve whose name ends with `:add` is for ops that add to what they write."""
    curves = {"accumulate_gradients": ((1000, 10),), "accumulate_gradients:add": ((1000, 15),)}
    costs, target = Calibrated(table(curves=curves)), "host.gradients:0"
    first = Op(
        id="A0.m0",
        lane="cpu",
        reads=("host.gradient_staging:0",),
        writes=(target,),
        parameters=1000,
    )
    assert costs.duration_ns(first) == 10
    assert (
        costs.duration_ns(
            msgspec.structs.replace(first, id="A0.m1", reads=("host.gradient_staging:0", target))
        )
        == 15
    )


def test_sums_of_groups_on_the_device_are_not_timed_like_sums_on_the_host(
    make_plan: Callable[..., Plan],
) -> None:
    """They read two fp32 sums and write one, at the rate of the device."""
    plan = make_plan("overlapped", accumulation=4, sum_group=2, micro_batch_group=2)
    op = next(op for op in policies.lower(plan).ops if op.kind == "accumulate_gradients")
    hardware = HardwareSpec.load("h200")
    costs = Calibrated(
        table(curves={"accumulate_gradients:add": ((op.parameters, 10**9),)}),
        Datasheet(hardware, plan.model, plan.workload),
    )
    assert costs.duration_ns(op) == math.ceil(12 * op.parameters / hardware.device_gb_per_s)
    assert costs.extrapolated(op)
    assert costs.duration_ns(msgspec.structs.replace(op, lane="cpu")) == 10**9


def test_a_curve_of_one_point_is_proportional() -> None:
    """A curve of one point gives durations in proportion to the size."""
    assert interpolate(((1000, 50),), 1000) == (50, False)
    assert interpolate(((1000, 50),), 3000) == (150, True)


def test_the_time_of_a_measured_shape_is_used_unchanged() -> None:
    costs = Calibrated(table())
    assert (costs.duration_ns(forward(8)), costs.extrapolated(forward(8))) == (800, False)


def test_without_a_datasheet_costs_without_documents_predict_documents_and_are_flagged() -> None:
    """Without a datasheet, costs measured without documents also predict documents, and are
    flagged.
    """
    costs, packed = (
        Calibrated(table()),
        msgspec.structs.replace(forward(8), shape=forward(8).shape + DOCUMENTS),
    )
    assert (costs.duration_ns(packed), costs.extrapolated(packed)) == (800, True)


def test_token_counts_between_are_interpolated_and_others_scaled_and_flagged() -> None:
    costs = Calibrated(table())
    assert (costs.duration_ns(forward(12)), costs.extrapolated(forward(12))) == (1167, False)
    assert (costs.duration_ns(forward(64)), costs.extrapolated(forward(64))) == (6000, True)
    assert (costs.duration_ns(forward(4)), costs.extrapolated(forward(4))) == (400, True)


def test_between_measured_sequence_lengths_a_token_takes_more_by_a_line() -> None:
    """Between two measured sequence lengths, the time of a token grows linearly.

    Here 1,024 tokens take 10 ns in a sequence of 1,024, and 11 ns in a sequence of 2,048. The head
    has no attention, so its time does not depend on the sequence length.
    """
    shapes = {
        SHAPE.format(8): (80, 80),
        SHAPE.format(32): (320, 320),
        SHAPE.format(8).replace("x1024-", "x2048-"): (200, 176),
    }
    costs = Calibrated(table(compute={"forward": shapes, "head": shapes}))
    half = Op(
        id="F0.m0", lane="compute", flops=1, shape=SHAPE.format(8).replace("x1024-", "x1536-")
    )  # 12 x 1,024 tokens
    assert (costs.duration_ns(half), costs.extrapolated(half)) == (120 + 6, False)
    longer = msgspec.structs.replace(half, shape=SHAPE.format(8).replace("x1024-", "x4096-"))
    assert costs.extrapolated(longer)
    head = msgspec.structs.replace(half, id="H.m0")
    assert costs.duration_ns(head) == 80 + round((176 - 80) / 2)


@pytest.mark.parametrize("sequence", [512, 1024])
def test_of_as_many_tokens_those_in_the_nearest_sequences_are_scaled(sequence: int) -> None:
    model, hardware = ModelSpec.load("qwen2.5-3b"), HardwareSpec.load("h200")
    measured = {
        f"{model.shape}/16x512-bf16": (80, 1_000_000),
        f"{model.shape}/8x1024-bf16": (80, 3_000_000),
    }
    larger = Workload(batch=32 * 1024 // sequence, sequence=sequence)
    rows = {"16x2x128-bf16": ((512, 1, 2), (2048, 2, 4))}  # attention takes almost no time
    curves = table(compute={"forward": measured}, attention=rows)
    machine = msgspec.structs.replace(hardware, costs=curves)
    costs = cost_model(machine, model, larger)
    op = Op(id="F0.m0", lane="compute", flops=320, shape=f"{model.shape}/{larger.shape}")
    assert costs.extrapolated(op)
    expected = {512: 4_000_000, 1024: 12_000_000}[sequence]
    assert costs.duration_ns(op) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("batch", "times"), [(17, 17 / 16), (32, 2.0), (160, 10.0)])
def test_a_layer_is_scaled_by_tokens_if_attention_alone_takes_longer(
    batch: int, times: float
) -> None:
    """Attention was measured separately. Here it takes a hundred times as long as the whole layer,
    which cannot be. With as many tokens a row, both parts of the layer grow with the tokens.
    """
    model, hardware = ModelSpec.load("qwen2.5-3b"), HardwareSpec.load("h200")
    measured = {f"{model.shape}/16x512-bf16": (80, 1_000_000)}
    work = Workload(batch=batch, sequence=512)
    rows = {"16x2x128-bf16": ((512, 10_000_000, 20_000_000), (2048, 160_000_000, 320_000_000))}
    curves = table(compute={"forward": measured}, attention=rows)
    costs = cost_model(msgspec.structs.replace(hardware, costs=curves), model, work)
    op = Op(id="F0.m0", lane="compute", flops=320, shape=f"{model.shape}/{work.shape}")
    assert costs.duration_ns(op) == pytest.approx(times * 1_000_000, rel=0.01)


@pytest.mark.parametrize(
    ("small", "batch", "expected"),
    [
        (3_100_000, 1, 3_000_000),
        (3_100_000, 2, 3_100_000),
        (3_100_000, 5, 3_100_000),  # the host's time
        (3_100_000, 15, 6_000_000),  # the GPU's time, 15 / 20 of 8 ms
        (3_100_000, 20, 8_000_000),
        (3_900_000, 11, 5_950_000),  # not flat: half of the way from 2 to 20
        (9_000_000, 11, 8_500_000),  # noise: the larger batch took less time
    ],
)
def test_a_time_that_does_not_depend_on_few_tokens_is_that_of_the_host(
    small: int, batch: int, expected: int
) -> None:
    """The GPU waits for the host's calls until it takes longer itself."""
    model, hardware = ModelSpec.load("qwen2.5-3b"), HardwareSpec.load("h200")
    measured = {
        f"{model.shape}/{rows}x512-bf16": (80, duration)
        for rows, duration in ((1, 3_000_000), (2, small), (20, 8_000_000))
    }
    work = Workload(batch=batch, sequence=512)
    curves = table(compute={"forward": measured})
    costs = cost_model(msgspec.structs.replace(hardware, costs=curves), model, work)
    op = Op(id="F0.m0", lane="compute", flops=320, shape=f"{model.shape}/{work.shape}")
    assert costs.duration_ns(op) == expected
    assert not costs.extrapolated(op)


def test_two_batches_of_almost_the_same_size_are_no_flat_part() -> None:
    model, hardware = ModelSpec.load("qwen2.5-3b"), HardwareSpec.load("h200")
    measured = {
        f"{model.shape}/{rows}x512-bf16": (80, duration)
        for rows, duration in ((10, 4_000_000), (12, 4_300_000), (32, 8_300_000))
    }
    work = Workload(batch=22, sequence=512)
    curves = table(compute={"forward": measured})
    costs = cost_model(msgspec.structs.replace(hardware, costs=curves), model, work)
    op = Op(id="F0.m0", lane="compute", flops=320, shape=f"{model.shape}/{work.shape}")
    assert costs.duration_ns(op) == 6_300_000


def test_a_head_with_other_chunks_of_the_loss_than_measured_is_scaled_and_flagged() -> None:
    model, hardware = ModelSpec.load("qwen2.5-3b"), HardwareSpec.load("h200")
    measured = table(
        compute={"head": {SHAPE.format(8): (80, 1_000_000)}},
        workspace={SHAPE.format(8): Workspace(layer=1, head=1)},
        loss_chunk=1024,
    )
    head = Op(id="H.m0", lane="compute", flops=80, shape=SHAPE.format(8))

    def costs(chunk: int) -> Any:
        return cost_model(
            msgspec.structs.replace(hardware, costs=measured),
            model,
            Workload(batch=8, sequence=1024, loss_chunk=chunk),
        )

    assert (costs(1024).duration_ns(head), costs(1024).extrapolated(head)) == (1_000_000, False)
    assert costs(4096).duration_ns(head) < 1_000_000
    assert costs(4096).extrapolated(head)
    assert costs(512).duration_ns(head) > 1_000_000
    assert costs(1024).workspace(
        model, Workload(batch=8, sequence=1024, loss_chunk=1024)
    ) == Workspace(layer=1, head=1)
    assert costs(4096).workspace(model, Workload(batch=8, sequence=1024, loss_chunk=4096)) is None


def test_a_head_that_was_measured_with_two_chunks_needs_no_datasheet_for_them() -> None:
    """The measured ratio of times and difference of bytes apply to other micro-batches."""
    model = ModelSpec.load("qwen2.5-3b")
    shapes = [f"{model.shape}/{batch}x1024-bf16" for batch in (8, 4, 2)]
    measured = table(
        compute={"head": {shapes[0]: (80, 1_000_000), shapes[1]: (40, 600_000)}},
        workspace={shape: Workspace(layer=1, head=500) for shape in shapes},
        heads={shapes[0]: ((2048, 800_000, 700),)},
        loss_chunk=1024,
    )
    hardware = msgspec.structs.replace(HardwareSpec.load("h200"), costs=measured)
    assert measured_chunks(measured, model, Workload(batch=8, sequence=1024)) == {1024, 2048}
    documents = Workload(batch=8, sequence=1024, documents=True)
    assert measured_chunks(measured, model, documents) == {1024, 2048}
    for batch, chunk, expected in ((8, 2048, 800_000), (4, 2048, 480_000), (2, 2048, None)):
        work = Workload(batch=batch, sequence=1024, loss_chunk=chunk)
        costs, shape = cost_model(hardware, model, work), f"{model.shape}/{work.shape}"
        head = Op(id="H.m0", lane="compute", flops=10 * batch, shape=shape)
        if expected:
            assert (costs.duration_ns(head), costs.extrapolated(head)) == (expected, False)
            assert costs.workspace(model, work) == Workspace(layer=1, head=700)
        else:  # a micro-batch of one chunk is derived
            assert chunk not in measured_chunks(measured, model, work)
            assert costs.extrapolated(head)
            assert costs.workspace(model, work) is None
    other = Workload(batch=8, sequence=1024, loss_chunk=4096)
    assert 4096 not in measured_chunks(measured, model, other)
    assert cost_model(hardware, model, other).workspace(model, other) is None


def test_a_head_with_an_unmeasured_chunk_is_derived_from_the_largest_measured_one_below() -> None:
    """The micro-batch has one chunk of 8,192 tokens. The head was measured with eight and with four
    chunks. With four, it took a tenth of the time.
    """
    model = ModelSpec.load("qwen2.5-3b")
    measured = table(
        compute={"head": {SHAPE.format(8): (80, 1_000_000)}},
        heads={SHAPE.format(8): ((2048, 100_000, 700),)},
        loss_chunk=1024,
    )
    hardware = msgspec.structs.replace(HardwareSpec.load("h200"), costs=measured)
    head = Op(id="H.m0", lane="compute", flops=80, shape=SHAPE.format(8))

    def ns(machine: HardwareSpec, chunk: int) -> int:
        work = Workload(batch=8, sequence=1024, loss_chunk=chunk)
        return cost_model(machine, model, work).duration_ns(head)

    sheet = HardwareSpec.load("h200")
    share = ns(sheet, 8192) / ns(sheet, 2048)
    assert 0.5 < share < 0.95
    assert ns(hardware, 8192) == pytest.approx(share * 100_000, rel=0.001)
    assert ns(hardware, 1500) == pytest.approx(
        ns(sheet, 1500) / ns(sheet, 1024) * 1_000_000, rel=0.001
    )


def test_a_head_with_a_larger_chunk_is_derived_from_the_usual_one_if_that_is_nearest() -> None:
    """Regression test: it was derived from a smaller chunk that was measured in addition."""
    model, usual = ModelSpec.load("qwen2.5-3b"), 2048
    measured = table(
        compute={"head": {SHAPE.format(8): (80, 1_000_000)}},
        heads={SHAPE.format(8): ((1024, 3_000_000, 700),)},
        loss_chunk=usual,
    )
    head = Op(id="H.m0", lane="compute", flops=80, shape=SHAPE.format(8))

    def ns(machine: HardwareSpec, chunk: int) -> int:
        work = Workload(batch=8, sequence=1024, loss_chunk=chunk)
        return cost_model(machine, model, work).duration_ns(head)

    sheet = HardwareSpec.load("h200")
    hardware = msgspec.structs.replace(sheet, costs=measured)
    share = ns(sheet, 2049) / ns(sheet, usual)
    assert ns(hardware, 2049) == pytest.approx(share * 1_000_000, rel=0.001)
    assert ns(hardware, 1024) == 3_000_000


def test_a_smaller_head_with_another_chunk_never_has_fewer_than_no_bytes() -> None:
    """Another chunk saves 200 bytes of the large micro-batch. The small one has only 100."""
    model = ModelSpec.load("qwen2.5-3b")
    large, small = (f"{model.shape}/{batch}x1024-bf16" for batch in (8, 4))
    measured = table(
        compute={"head": {large: (80, 1_000_000)}},
        workspace={large: Workspace(layer=1, head=500), small: Workspace(layer=1, head=100)},
        heads={large: ((2048, 800_000, 300),)},
        loss_chunk=1024,
    )
    for batch, head in ((8, 300), (4, 0)):
        work = Workload(batch=batch, sequence=1024, loss_chunk=2048)
        assert Calibrated(measured).workspace(model, work) == Workspace(layer=1, head=head)


@pytest.mark.parametrize(
    ("points", "found"), [(((0, 1, 1),), "0; allowed"), (((2, 1, 0), (2, 1, 0)), "2 after 2")]
)
def test_heads_of_a_cost_table_are_checked(points: Any, found: str) -> None:
    with pytest.raises(UserError, match=found):
        table(heads={SHAPE.format(8): points})


def test_the_time_that_saved_attention_saves_is_interpolated_between_measured_lengths() -> None:
    """The time that saved attention saves is interpolated between the measured sequence lengths.

    With 8,192 tokens, it saves 80 us for sequences of 1,024 tokens and 240 us for 2,048. Halfway
    between, it saves 160 us.
    """
    full, long = SHAPE.format(8), SHAPE.format(4).replace("x1024-", "x2048-")
    shapes = {
        full: (80, 800_000),
        SHAPE.format(32): (320, 3_200_000),
        long: (80, 900_000),
        full.replace("/", "-kept/"): (70, 720_000),
        long.replace("/", "-kept/"): (70, 660_000),
    }
    costs = cost_model(
        msgspec.structs.replace(
            HardwareSpec.load("h200"), costs=table(compute={"recompute": shapes})
        ),
        ModelSpec.load("qwen2.5-3b"),
        Workload(batch=16, sequence=1024),
    )
    kept = Op(id="R0.m0", lane="compute", flops=140, shape=SHAPE.format(16).replace("/", "-kept/"))
    assert (costs.duration_ns(kept), costs.extrapolated(kept)) == (
        pytest.approx(1_440_000, abs=20),
        False,
    )
    between = msgspec.structs.replace(kept, shape=kept.shape.replace("16x1024", "8x1536"))
    assert costs.duration_ns(between) == pytest.approx(1_200_000 + 75_000 - 240_000, abs=20)
    beyond = msgspec.structs.replace(kept, shape=kept.shape.replace("16x1024", "16x512"))
    assert costs.extrapolated(beyond)


def test_beyond_the_measured_lengths_attention_grows_by_its_own_curve() -> None:
    """The time of attention follows its own curve, and the rest grows with the tokens.

    A layer took 800 us with 8,192 tokens in rows of 1,024. The forward attention of one row of S
    tokens takes S (S + 1,024) / 2^20 x 10 us, and the backward twice that. So attention takes
    160 us of the 800 us. The rest takes 640 us, and four times as long with 32,768 tokens.
    """

    def row(length: int) -> int:
        return 10_000 * length * (length + 1024) // 2**20

    measured, model = SHAPE.format(8), ModelSpec.load("qwen2.5-3b")
    layers = {
        kind: {measured: (80, 800_000), measured.replace("/", "-kept/"): (80, 650_000)}
        for kind in ("forward", "recompute")
    } | {"backward": {measured: (160, 1_600_000)}}
    rows = tuple((length, row(length), 2 * row(length)) for length in (1024, 4096))
    curves = table(compute=layers, attention={"16x2x128-bf16": rows})
    costs = cost_model(
        msgspec.structs.replace(HardwareSpec.load("h200"), costs=curves),
        model,
        Workload(batch=1, sequence=32768),
    )

    def op(name: str, shape: str) -> Op:
        return Op(id=f"{name}0.m0", lane="compute", flops=1, shape=shape)

    long = measured.replace("8x1024", "1x32768")
    for name, times in (("F", 1), ("R", 1), ("B", 2)):
        expected = times * (4 * 640_000 + row(32768))
        assert costs.duration_ns(op(name, long)) == pytest.approx(expected, rel=1e-4)
        assert costs.extrapolated(op(name, long))
    kept = op("R", long.replace("/", "-kept/"))
    assert costs.duration_ns(kept) == pytest.approx(4 * 640_000, rel=1e-4)
    assert costs.extrapolated(kept)


def test_attention_of_short_sequences_takes_no_longer_than_in_the_shortest_measured() -> None:
    """Saved attention saves 80 us of 800 us with 8 x 1,024 tokens. The kernel alone takes 400 us
    for rows of 2,048 and more tokens, because it mostly waits. That says nothing about 128.
    """
    measured, model = SHAPE.format(8), ModelSpec.load("qwen2.5-3b")
    short = measured.replace("8x1024", "64x128")
    layers = {
        "recompute": {
            measured: (80, 800_000),
            short: (80, 790_000),
            measured.replace("/", "-kept/"): (80, 720_000),
        }
    }
    rows = ((2048, 400_000, 800_000), (4096, 410_000, 820_000))
    curves = table(compute=layers, attention={"16x2x128-bf16": rows})
    costs = cost_model(
        msgspec.structs.replace(HardwareSpec.load("h200"), costs=curves),
        model,
        Workload(batch=64, sequence=128),
    )
    kept = Op(id="R0.m0", lane="compute", flops=1, shape=short.replace("/", "-kept/"))
    assert costs.duration_ns(kept) == pytest.approx(790_000 - 80_000, abs=20)
    assert costs.extrapolated(kept)


def test_a_mask_for_documents_counts_once_beyond_the_measured_lengths() -> None:
    """In fp32 a mask separates documents, and the layer was measured without the mask.

    The predicted time is that of the layer without documents at this length, times the factor that
    the mask adds.
    """
    measured, model = SHAPE.format(8).replace("bf16", "fp32"), ModelSpec.load("qwen2.5-3b")
    rows = tuple((length, length**2 // 100, length**2 // 50) for length in (1024, 4096))
    curves = table(
        compute={"forward": {measured: (80, 800_000_000)}},
        attention={f"16x2x128-fp32{kernel}": rows for kernel in ("", "-flash")},
    )
    hardware = msgspec.structs.replace(HardwareSpec.load("h200"), costs=curves)
    shape = measured.replace("8x1024", "1x32768")
    works = [
        Workload(batch=1, sequence=32768, dtype="fp32", documents=documents)
        for documents in (False, True)
    ]
    plain, masked = (
        cost_model(hardware, model, work).duration_ns(
            Op(id="F0.m0", lane="compute", flops=1, shape=shape + "-documents" * work.documents)
        )
        for work in works
    )
    op = Op(id="F0.m0", lane="compute", flops=1, shape=shape + "-documents")
    plain_sheet, masked_sheet = (Datasheet(hardware, model, work) for work in works)
    share = masked_sheet.share(op, op, plain_sheet)
    assert share > 1.05
    assert masked == pytest.approx(share * plain, rel=1e-6)


def test_the_attention_of_a_window_is_a_share_of_the_measured_row() -> None:
    model = ModelSpec.load("qwen2.5-3b")
    work = Workload(batch=2, sequence=4096)
    assert share_of_row(model, "0", work) == 2
    assert attention_shape(model, work) == "16x2x128-bf16"
    packed = msgspec.structs.replace(work, documents=True)
    assert attention_shape(model, packed) == "16x2x128-bf16-flash-lengths"
    masked = msgspec.structs.replace(packed, dtype="fp32")
    assert attention_shape(model, masked) == "16x2x128-fp32-flash"
    windowed = ModelSpec.load("gpt-oss-20b")
    shares = sorted({share_of_row(windowed, layer.name, work) for layer in windowed.decoders})
    assert shares == pytest.approx([2 * 128 * (2 * 4096 - 128) / 4096**2, 2], rel=1e-6)


def test_a_summed_gradient_costs_the_additional_bytes_that_it_moves() -> None:
    """A gradient that is summed takes longer by the additional bytes that it moves.

    For each parameter of a decoder layer, that is 2 bytes for the first contribution and 6 for each
    further one. A tied embedding always has two contributions.
    """
    hardware, model = HardwareSpec.load("h200"), ModelSpec.load("qwen2.5-3b")
    compute = {
        kind: {SHAPE.format(8): (80, 1_000_000)}
        for kind in ("backward", "head", "embed_backward", "forward")
    }
    curves = {"norm": ((1, 10), (10**9, 10**9)), "norm:wide": ((1, 20), (10**9, 2 * 10**9))}
    machine = msgspec.structs.replace(hardware, costs=table(compute=compute, curves=curves))
    one, two = (
        cost_model(machine, model, Workload(batch=8, sequence=1024, accumulation=count))
        for count in (1, 2)
    )

    def op(code: str, *reads: str, size: int = 0) -> Op:
        return Op(
            id=code,
            lane="compute",
            flops=0 if size else 80,
            parameters=size,
            shape="" if size else SHAPE.format(8),
            reads=reads,
            writes=("device.g",),
        )

    layer, table_elements = model.stack["0"].elements, model.stack["e"].elements
    for code, reads, extra in (
        ("B0.m0", (), 2 * layer),
        ("B0.m1", ("device.g",), 6 * layer),
        ("F0.m0", (), 0),
        ("H.m0", (), 0),
        ("H.m1", ("device.g",), 4 * table_elements),
        ("EB.m0", ("device.g",), 0),
    ):
        assert one.duration_ns(op(code, *reads)) == 1_000_000
        assert two.duration_ns(op(code, *reads)) == 1_000_000 + round(
            extra / hardware.device_gb_per_s
        )
    assert two.duration_ns(op("N0", size=1000)) == pytest.approx(
        2 * one.duration_ns(op("N0", size=1000)), rel=0.02
    )


def test_workspace_is_a_line_over_the_tokens() -> None:
    small, large = Workspace(layer=100, head=50, update=7), Workspace(layer=300, head=50, update=7)
    costs = Calibrated(table(workspace={SHAPE.format(8): small, SHAPE.format(32): large}))
    model = ModelSpec.load("qwen2.5-3b")
    assert costs.workspace(model, Workload(batch=20, sequence=1024)) == Workspace(
        layer=200, head=50, update=7
    )
    assert costs.workspace(model, Workload(batch=8, sequence=1024)) == small
    assert costs.workspace(model, Workload(batch=20, sequence=1024, dtype="fp32")) is None
    alone = Calibrated(table(workspace={SHAPE.format(8): small}))
    assert alone.workspace(model, Workload(batch=20, sequence=1024)) is None


def test_more_tokens_than_were_measured_need_at_least_as_much_workspace() -> None:
    """Regression test: a layer that took a little less with more tokens was predicted to take less
    and less.
    """
    small, large = Workspace(layer=300, head=50, update=7), Workspace(layer=290, head=40, update=7)
    costs = Calibrated(table(workspace={SHAPE.format(8): small, SHAPE.format(32): large}))
    model = ModelSpec.load("qwen2.5-3b")
    assert costs.workspace(model, Workload(batch=64, sequence=1024)) == large
    between = costs.workspace(model, Workload(batch=20, sequence=1024))
    assert between == Workspace(layer=295, head=45, update=7)


def test_a_head_of_one_chunk_does_not_predict_a_head_of_several() -> None:
    """A head of one chunk is not used to interpolate the workspace of several chunks.

    The numbers are an H200's, measured with 1, 3 and 6 chunks. The workspace of two chunks is on
    the line through those of three and six.
    """
    model = ModelSpec.load("qwen2.5-3b")
    one, three, six = (
        Workspace(layer=tokens, head=head, update=7)
        for tokens, head in ((1024, 3_309), (3072, 5_677), (6144, 5_683))
    )
    costs = Calibrated(
        table(workspace={SHAPE.format(1): one, SHAPE.format(3): three, SHAPE.format(6): six})
    )
    assert costs.workspace(model, Workload(batch=2, sequence=1024)) == Workspace(
        layer=2048, head=5_675, update=7
    )


def test_the_workspace_of_a_head_with_another_number_of_chunks_follows_the_formula() -> None:
    """The workspace of a head with another number of chunks follows from the formula.

    The vocabulary has 151,936 entries and the hidden size is 2,048. One token less saves 12 bytes
    for each vocabulary entry, and 18 for each element of the norm. Several chunks also need the sum
    of their gradients (4 bytes per parameter) and the gradient of one chunk (2 bytes).
    """
    model, head = ModelSpec.load("qwen2.5-3b"), 6 * 10**9
    known = {
        SHAPE.format(1): Workspace(layer=1, head=head, update=1),
        SHAPE.format(2): Workspace(layer=1, head=head + 10**9, update=1),
    }
    costs = Calibrated(table(workspace=known))
    half, twice = (
        costs.workspace(model, work)
        for work in (Workload(batch=1, sequence=512), Workload(batch=3, sequence=1024))
    )
    assert half is not None
    assert twice is not None
    assert half.head == head - 512 * (151_936 * 12 + 2048 * 18)
    assert twice.head == head + 10**9
    short = {
        shape: Workspace(layer=1, head=head, update=1)
        for shape in (SHAPE.format(1), SHAPE.format(1).replace("1x1024", "1x512"))
    }
    summing = Calibrated(table(workspace=short)).workspace(model, Workload(batch=3, sequence=1024))
    assert summing == Workspace(layer=1, head=head + 6 * 151_936 * 2048, update=1)


def test_an_embedding_is_scaled_by_the_elements_that_it_moves() -> None:
    costs = Calibrated(table(compute={"embed": {SHAPE.format(8): (100, 70)}}))
    assert (
        costs.duration_ns(Op(id="E.m0", lane="compute", elements=300, shape=SHAPE.format(24)))
        == 210
    )


def test_the_same_model_is_nearer_than_the_same_flops() -> None:
    """A shape that was not measured is scaled from another shape of the same model.

    A shape of another model is not used, even if it has the same FLOPs.
    """
    other = SHAPE.replace("11008", "11009").format(16)
    costs = Calibrated(
        table(compute={"forward": {SHAPE.format(8): (80, 800), other: (160, 10**9)}})
    )
    assert costs.duration_ns(forward(16)) == 1600


@pytest.mark.parametrize(
    "op",
    [
        Op(id="U0", lane="update", parameters=4),
        Op(id="B0.m0", lane="compute", shape=SHAPE.format(8)),
        forward("unreadable"),
        forward(SHAPE.format(8).replace("bf16", "fp32")),
    ],
)
def test_a_shape_that_was_not_measured_is_refused_with_a_fix(op: Op) -> None:
    with pytest.raises(UserError, match=r"; fix: .*`megatrain calibrate") as error:
        Calibrated(table()).duration_ns(op)
    assert op.kind in str(error.value)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["mistral-7b", "gemma-2-9b"])
def test_a_layer_that_was_not_measured_takes_the_time_of_the_datasheet(
    name: str, compiled: bool, fp8: bool
) -> None:
    """The calibration measured other dense layers, without torch.compile, in bf16."""
    hardware = HardwareSpec.load(str(CALIBRATION))
    if fp8:
        peaks = {**hardware.peak_tflops, "fp8": 1200.0}
        hardware = msgspec.structs.replace(hardware, peak_tflops=peaks)
    model = ModelSpec.load(name)
    work = Workload(
        batch=4, sequence=1024, compiled=compiled, fp8="rowwise" if fp8 else None, documents=fp8
    )
    plan = Plan(
        policy="double_buffer",
        hardware="",
        source="",
        device_limit_bytes=2**40,
        host_limit_bytes=2**40,
        model=model,
        workload=work,
    )
    costs, sheet = cost_model(hardware, model, work), Datasheet(hardware, model, work)
    for op in policies.lower(plan).ops:
        if op.kind in ("forward", "recompute", "backward", "head"):
            assert costs.duration_ns(op) == sheet.duration_ns(op)
            assert costs.extrapolated(op)


def test_matrix_products_of_an_update_need_a_datasheet() -> None:
    """The curve of an update has no products, so a table alone does not predict them."""
    costs = Calibrated(table(curves={"update": ((4, 100),)}))
    elementwise = Op(id="U0", lane="update", parameters=4)
    assert costs.duration_ns(elementwise) == 100
    with pytest.raises(
        UserError,
        match=r"^costs of here: U0: found an update with matrix products, and no peak rate for",
    ):
        costs.duration_ns(msgspec.structs.replace(elementwise, flops=1, parameters=5))


def test_only_a_loss_that_was_not_measured_is_scaled_from_the_head() -> None:
    shape = SHAPE.format(8)
    loss = Op(id="HL.m0", lane="compute", flops=10, shape=shape)
    head = {"head": {shape: (30, 900)}}
    scaled = Calibrated(table(compute=head))
    assert (scaled.duration_ns(loss), scaled.extrapolated(loss)) == (300, True)
    measured = Calibrated(table(compute={**head, "loss": {shape: (10, 250)}}))
    assert (measured.duration_ns(loss), measured.extrapolated(loss)) == (250, False)
    with pytest.raises(UserError, match="backward"):
        scaled.duration_ns(Op(id="B0.m0", lane="compute", flops=10, shape=shape))


def test_saved_activations_scale_with_the_tokens_of_one_model() -> None:
    shape, tokens = SHAPE.format(8), 8 * 1024
    costs = Calibrated(
        table(activations={shape: (tokens, 800)}, workspace={shape: Workspace(layer=70, head=9)})
    )
    model, other = ModelSpec.load("qwen2.5-3b"), ModelSpec.load("qwen2.5-7b")
    works = [Workload(batch=batch, sequence=1024) for batch in (8, 32)]
    assert [costs.activations_bytes(model, work) for work in works] == [800, 3200]
    assert costs.activations_bytes(model, Workload(batch=4, sequence=4096)) == 1600
    assert costs.activations_bytes(other, works[0]) is None
    assert costs.activations_bytes(model, msgspec.structs.replace(works[0], dtype="fp32")) is None
    assert [costs.workspace(model, work) for work in works] == [Workspace(layer=70, head=9), None]


@pytest.mark.parametrize("documents", [False, True])
def test_masks_grow_with_the_square_of_the_row(
    make_model: Callable[..., ModelSpec], documents: bool
) -> None:
    """Regression test: the masks of rows of 64 tokens were scaled by the tokens, so those of four
    times longer rows were predicted at a quarter of their bytes.
    """
    model = make_model(
        family="qwen3",
        layer_types=["full_attention", "sliding_attention"] * 2,
        use_sliding_window=True,
        sliding_window=8,
    )

    def work(batch: int, sequence: int) -> Workload:
        return Workload(batch=batch, sequence=sequence, dtype="fp32", documents=documents)

    def kept(work: Workload) -> int:
        return 1000 * work.tokens + saved_mask_bytes(model, work)

    def temporary(work: Workload) -> Workspace:
        outside = lasting_mask_bytes(model, work)
        inside = mask_bytes(model, work) - added_mask_bytes(model, work)
        return Workspace(layer=10 * work.tokens + inside, head=9 + outside, update=7 + outside)

    points = {f"{model.shape}/{each.shape}": each for each in (work(4, 64), work(16, 64))}
    costs = Calibrated(
        table(
            activations={shape: (each.tokens, kept(each)) for shape, each in points.items()},
            workspace={shape: temporary(each) for shape, each in points.items()},
            loss_chunk=0,
        )
    )
    assert saved_mask_bytes(model, work(4, 64)) > 0
    for wanted in (work(4, 64), work(2, 256), work(1, 256), work(8, 64)):
        assert costs.activations_bytes(model, wanted) == kept(wanted)
        assert costs.workspace(model, wanted) == temporary(wanted)
        other = msgspec.structs.replace(wanted, documents=not documents)
        assert costs.activations_bytes(model, other) == kept(other)
        assert costs.workspace(model, other) == temporary(other)


def test_every_compute_op_has_an_amount(make_plan: Callable[..., Plan]) -> None:
    plan = make_plan("resident")
    for op in policies.lower(plan).ops:
        assert (op.amount > 0) == (op.kind in COMPUTE_KINDS)
        if op.kind in COMPUTE_KINDS:
            assert op.amount == (
                op_work(plan.model, op.kind, op.layer, plan.workload).flops
                or plan.workload.tokens * plan.model.hidden
            )


def test_layers_that_differ_are_looked_up_apart(
    make_plan: Callable[..., Plan], make_model: Callable[..., ModelSpec]
) -> None:
    """Layers of different kinds have different shapes and FLOPs.

    Here every other layer has a sliding window of 4 tokens.
    """
    model = make_model(
        family="gemma2", hidden=32, head_dim=8, sliding_window=4, hidden_activation="silu"
    )
    plan = make_plan("resident", model=model)
    ops = policies.lower(plan).by_id
    assert (ops["F0.m0"].shape, ops["F1.m0"].shape) == tuple(
        f"{model.decoders[index].signature}/{plan.workload.shape}" for index in (0, 1)
    )
    assert ops["F0.m0"].flops < ops["F1.m0"].flops
    assert ops["F0.m0"].shape == ops["F2.m0"].shape


@pytest.mark.parametrize(
    ("suffix", "how", "options"),
    [
        ("bf16-documents", "bf16, rows of several documents", "--dtype bf16 "),
        ("bf16-compiled", "bf16, compiled, rows of one text", "--dtype bf16 --compile --plain-p"),
        (
            "bf16-fp8-tensorwise-flash-documents",
            "fp8 (tensorwise), attention kernel flash, rows of several documents",
            "--dtype fp8 --fp8-scaling tensorwise --attention flash ",
        ),
        (
            "bf16-compiled-flash-rebuilt-short-documents",
            "bf16, attention kernel flash, compiled, outputs rebuilt, last products left out, rows"
            " of several documents",
            "--dtype bf16 --attention flash --compile --out",
        ),
        (
            "bf16-pieces2048-groups4-documents",
            "bf16, pieces of 2048 tokens, 4 groups of heads, rows of several documents",
            "--dtype bf16 --out",
        ),
    ],
)
def test_the_error_describes_a_shape_that_was_not_measured_in_words(
    suffix: str, how: str, options: str
) -> None:
    layer = "qwen2-3584x18944-28:4x128-v152064"
    known = [f"{layer}/{size}-fp32" for size in ("32x1024", "8x1024")]
    error = str(missing_measurement("an H200", "head", f"{layer}/4x2048-{suffix}", known))
    assert error.startswith(
        "measurements of an H200: found no time of the head of qwen2 of width 3,584 with 4 x 2,048"
        f" tokens in {how}; allowed: what was measured: fp32, rows of one text: 8 x 1,024 tokens,"
        " 32 x 1,024 tokens; fix: measure it with `megatrain calibrate MODEL --batch 4 --seq 2048"
        f" {options}"
    )
    assert layer not in error


@pytest.mark.parametrize(
    "changes",
    [
        {"fp8": "tensorwise", "compiled": True, "documents": True},
        {"attention": "cudnn"},
        {"attention": "flash", "documents": True},
        {"token_piece": 16, "head_groups": 2},
    ],
)
@pytest.mark.parametrize("suffixed", [str, shortened, rebuilding])
def test_the_options_of_a_shape_are_those_of_its_workload(
    make_plan: Callable[..., Plan], changes: dict[str, Any], suffixed: Callable[[str], str]
) -> None:
    """The suggested options of `calibrate` measure the missing shape. Pieces, groups, and layers
    that leave out or rebuild results have no option there.
    """
    work, model = Workload(batch=2, sequence=64, **changes), make_plan().model
    shape = f"{model.shape}/{suffixed(work.shape)}"
    error = str(missing_measurement("here", "forward", shape, []))
    options = re.search(r"calibrate MODEL (.*) --out", error)
    assert options
    parser = OneLineParser()
    add_workload(parser)
    args = parser.parse_args(options[1].split())
    measured = msgspec.structs.replace(work, token_piece=None, head_groups=None)
    assert workload(args, model).shape == measured.shape


@pytest.mark.parametrize(
    ("name", "kind", "milliseconds"),
    [
        ("olmoe-1b-7b", "forward", 1.627),
        ("olmoe-1b-7b", "backward", 3.139),
        ("qwen2.5-7b", "forward", 3.19),
        ("qwen2.5-7b", "backward", 6.19),
    ],
)
def test_a_layer_with_few_tokens_keeps_the_time_that_does_not_depend_on_them(
    name: str, kind: str, milliseconds: float
) -> None:
    """The smallest calibrated workloads have 8 and 32 x 1,024 tokens. With 4 x 1,024, the time is
    on the line through both, or proportional to the tokens if this line falls below 0.
    """
    hardware = HardwareSpec.load(str(RESULTS / "h200-16-cores-link" / "hardware.toml"))
    model = suite("compiled").models[name]
    layer = model.decoders[0]
    work = Workload(batch=4, sequence=1024, loss_chunk=2048, compiled=True)
    op = Op(
        id=f"{kind[0].upper()}0.m0",
        lane="compute",
        flops=op_work(model, kind, layer.name, work).flops,
        shape=f"{layer.signature}/{work.shape}",
    )
    costs = cost_model(hardware, model, work)
    assert costs.duration_ns(op) / 1e6 == pytest.approx(milliseconds, rel=0.005)
    assert costs.extrapolated(op)
    many = Workload(batch=128, sequence=1024, loss_chunk=2048, compiled=True)
    flops = op_work(model, kind, layer.name, many).flops
    more = Op(id=op.id, lane="compute", flops=flops, shape=f"{layer.signature}/{many.shape}")
    (_, longest), rows = (
        max(
            point
            for shape, point in hardware.costs.compute[kind].items()  # type: ignore[union-attr]
            if shape.startswith(f"{layer.signature}/64x1024")
        ),
        2,
    )
    assert cost_model(hardware, model, many).duration_ns(more) == pytest.approx(rows * longest)


def test_the_loop_of_a_short_row_is_short() -> None:
    """Rows of 1,024 tokens were measured, with 16 chunks. A row of 64 tokens has one."""
    folder = RESULTS / "h200-16-cores-compiled-set"
    hardware = HardwareSpec.load(str(folder / "hardware.toml"))
    model = suite("compiled").measured()["qwen3-next-64-experts"]
    layer, durations = model.decoders[0], []
    for sequence in (64, 1024):
        work = Workload(batch=1, sequence=sequence, loss_chunk=2048, compiled=True)
        flops = op_work(model, "backward", layer.name, work).flops
        shape = f"{layer.signature}/{work.shape}"
        op = Op(id="B0.m0", lane="compute", flops=flops, shape=shape)
        durations.append(cost_model(hardware, model, work).duration_ns(op))
    assert durations[0] < 1e6
    assert durations[1] > 5e6


def test_the_fixed_part_of_a_time_is_on_the_line_to_more_tokens() -> None:
    fewest = Point(100, 10, 50)
    near, other = Point(120, 10, 500), Point(200, 20, 51)
    assert fixed_ns([fewest, near, other], fewest) == 0, "no point that is far enough"
    assert fixed_ns([fewest, near, Point(125, 10, 60)], fewest) == 10
    assert fixed_ns([fewest, Point(300, 10, 130), Point(200, 10, 80)], fewest) == 20
    assert fixed_ns([fewest, Point(200, 10, 120)], fewest) == 0, "the line falls below 0"


@pytest.mark.parametrize(("kind", "calls", "longer"), [("forward", 37, 1.0), ("backward", 54, 1.6)])
def test_a_loop_over_chunks_takes_at_least_the_time_of_its_calls(
    kind: str, calls: int, longer: float
) -> None:
    """The host calls the functions of a chunk once for all rows. So one row of 4,096 tokens takes
    as long as the calls, and 64 rows take longer. Rows of this length were not measured. The calls
    of a backward pass take longer, by a factor if they were not measured.
    """
    measured = HardwareSpec.load(str(RESULTS / "h200-compiled-set" / "hardware.toml"))
    assert measured.costs is not None
    assert measured.costs.fixed is not None
    model = suite("compiled").measured()["qwen3-next-64-experts"]
    layer = model.decoders[0]
    fixed = measured.costs.fixed
    both = msgspec.structs.replace(fixed, backward_call_ns=15_000)
    known = msgspec.structs.replace(
        measured, costs=msgspec.structs.replace(measured.costs, fixed=both)
    )
    for hardware, call in (
        (measured, longer * fixed.launch_ns),
        (known, 15_000 if kind == "backward" else fixed.launch_ns),
        (msgspec.structs.replace(measured, costs=None), longer * 7200),
    ):
        durations = []
        for batch in (1, 64):
            work = Workload(batch=batch, sequence=4096, loss_chunk=2048, compiled=True)
            flops = op_work(model, kind, layer.name, work).flops
            shape = f"{layer.signature}/{work.shape}"
            op = Op(id=f"{kind[0].upper()}0.m0", lane="compute", flops=flops, shape=shape)
            durations.append(cost_model(hardware, model, work).duration_ns(op))
        least = 64 * calls * call
        assert 0.999 * least <= durations[0] < 1.5 * least < durations[1]
