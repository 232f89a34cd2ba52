"""Tests of picture files: their size, what changes them, and what is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.compare.compare import compare
from megatrain.simulator.plots import canvas
from megatrain.simulator.plots.canvas import WIDTH_PIXELS
from megatrain.simulator.plots.error_pictures import errors_png
from megatrain.simulator.plots.loss_picture import loss_png
from megatrain.simulator.plots.memory_picture import memory_png
from megatrain.simulator.plots.pictures import KIND_COLOURS, timeline_png
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import CODES
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Span, Timeline

GIB = 2**30
USAGE = {
    "device.weights": [(0, GIB), (5_000_000, 2 * GIB)],
    "device.hidden": [(0, 0), (1_000_000, GIB), (9_000_000, 0)],
    "host.moments": [(0, 40 * GIB)],
}


@pytest.mark.filterwarnings("error")
def test_a_letter_that_the_font_lacks_is_no_warning(tmp_path: Path) -> None:
    """The name of a model or a folder may have it."""
    figure = Figure()
    figure.add_subplot().set_title("model \u7a7a")
    canvas.save(figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def timeline(plan: Plan, name: str = "predicted", factor: int = 1) -> Timeline:
    schedule = lower(plan)
    spans: list[Span] = []
    end: dict[str, int] = {}
    for number, op in enumerate(schedule.ops):
        start = max([end.get(op.lane, 0), *(end[other] for other in op.after)])
        end[op.id] = end[op.lane] = start + factor * (100_000 + 7_000 * (number % 13))
        spans.append(Span(op=op.id, lane=op.lane, start_ns=start, end_ns=end[op.id]))
    return Timeline(name=name, digest=schedule.digest, spans=tuple(spans))


def size(path: Path) -> tuple[int, int]:
    """Returns the width and height of a PNG, and asserts that the file is complete."""
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_timelines_are_drawn_with_a_panel_each(
    make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    predicted, measured = timeline(make_plan()), timeline(make_plan(), "measured", 2)
    timeline_png(tmp_path / "one.png", [predicted], "a step")
    timeline_png(tmp_path / "two.png", [predicted, measured], "a step", "of double_buffer")
    (width, one), (_, two) = size(tmp_path / "one.png"), size(tmp_path / "two.png")
    assert width == WIDTH_PIXELS
    assert one < two
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.png", "two.png"], (
        "no temporary file is left"
    )


def test_a_picture_depends_only_on_its_timeline(
    make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    shown = timeline(make_plan())
    late = msgspec.structs.replace(shown.spans[3], end_ns=shown.spans[3].end_ns + 90_000)
    changed = msgspec.structs.replace(shown, spans=(*shown.spans[:3], late, *shown.spans[4:]))
    for name, one in (("first", shown), ("again", shown), ("changed", changed)):
        timeline_png(tmp_path / name, [one], "a step")
    first, again, other = ((tmp_path / name).read_bytes() for name in ("first", "again", "changed"))
    assert first == again
    assert first != other


@pytest.mark.parametrize("policy", ["sequential", "k_buffer", "resident"])
def test_every_policy_can_be_drawn(
    policy: str, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    plan = make_plan(policy, layers=24, accumulation=3)
    assert len(timeline(plan).spans) > 200
    timeline_png(tmp_path / "step.png", [timeline(plan), timeline(plan, "measured", 2)], policy)
    assert size(tmp_path / "step.png")[0] == WIDTH_PIXELS


def test_every_kind_has_a_colour_of_its_own() -> None:
    assert set(CODES.values()) <= KIND_COLOURS.keys()
    assert len(set(KIND_COLOURS.values())) == len(KIND_COLOURS)


def test_memory_has_a_panel_for_each_place_in_use(tmp_path: Path) -> None:
    device = {pool: points for pool, points in USAGE.items() if pool.startswith("device")}
    memory_png(
        tmp_path / "both.png",
        USAGE,
        4 * GIB,
        64 * GIB,
        "memory",
        fixed={"device.workspace": GIB // 2},
        step_ns=12_000_000,
    )
    memory_png(tmp_path / "device.png", device, 4 * GIB, 64 * GIB, "memory")
    memory_png(tmp_path / "over.png", device, GIB, 64 * GIB, "memory")
    assert size(tmp_path / "both.png")[0] == size(tmp_path / "device.png")[0] == WIDTH_PIXELS
    assert size(tmp_path / "both.png")[1] > 1.5 * size(tmp_path / "device.png")[1]
    assert (tmp_path / "device.png").read_bytes() != (tmp_path / "over.png").read_bytes(), (
        "the limit is not drawn"
    )


def test_many_pools_of_one_class_and_unknown_ones_are_drawn(tmp_path: Path) -> None:
    many = {
        f"device.{name}": [(0, GIB), (10, 2 * GIB)]
        for name in ("weights", "weights_vocabulary", "weights_other", *"abcdefgh")
    }
    memory_png(
        tmp_path / "many.png",
        {**many, "device.x": [(0, 1)], "device.y": [(0, 2)]},
        10 * GIB,
        0,
        "memory",
    )
    assert size(tmp_path / "many.png")[0] == WIDTH_PIXELS


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """A list to which every drawn figure is added. Files are not written, which takes longest."""
    figures: list[Figure] = []
    monkeypatch.setattr(canvas, "save", lambda figure, _: figures.append(figure))
    return figures


def test_a_place_of_many_pools_is_as_tall_as_its_legend(drawn: list[Figure]) -> None:
    """A panel is tall enough for its legend.

    Otherwise its last pools would be in the legend of the panel below.
    """
    for count in (3, 24):
        pools = {f"device.pool{number}": [(0, GIB), (10, 2 * GIB)] for number in range(count)}
        memory_png(
            Path("many.png"), {**pools, "host.moments": [(0, GIB)]}, 64 * GIB, 64 * GIB, "memory"
        )
    few, many = (figure.get_figheight() for figure in drawn)
    assert many - few > 24 * 0.19 - 2.75


def test_errors_are_drawn_with_a_row_for_each_kind_lane_and_part(
    make_plan: Callable[..., Plan], drawn: list[Figure]
) -> None:
    rows = []
    for policy in ("resident", "k_buffer"):
        plan = make_plan(policy)
        predicted, measured = timeline(plan), timeline(plan, "measured", 2)
        report = compare(predicted, measured, lower(plan), replayed=measured)
        errors_png(Path("errors.png"), report, policy)
        rows.append(len(report.kinds) + 2 * len(report.lanes) + 2 * len(report.parts))
        kinds, lanes, parts = drawn[-1].axes
        assert len(kinds.patches) == len(report.kinds)
        assert [bar.get_width() for bar in lanes.patches] == [
            *(lane.predicted_busy_seconds for lane in report.lanes),
            *(lane.measured_busy_seconds for lane in report.lanes),
        ]
        assert [bar.get_width() for bar in parts.patches] == [
            *(part.predicted_seconds for part in report.parts),
            *(part.measured_seconds for part in report.parts),
        ]
    low, high = (figure.get_figheight() for figure in drawn)
    assert high - low == pytest.approx((rows[1] - rows[0]) * 0.27)


@pytest.mark.parametrize("count", [1, 2, 40, 400])
def test_loss_of_short_and_long_runs(count: int, tmp_path: Path) -> None:
    steps = list(range(10, 10 + count))
    loss_png(
        tmp_path / "loss.png",
        steps,
        [10 / step for step in steps],
        [1e-5 for step in steps],
        [1 / step for step in steps],
        [1000.0 + step for step in steps],
        "a run",
    )
    assert size(tmp_path / "loss.png")[0] == WIDTH_PIXELS


def test_nothing_to_draw_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="spans have length 0"):
        timeline_png(tmp_path / "x.png", [Timeline(name="predicted", digest="", spans=())], "empty")
    with pytest.raises(ValueError, match="no pool"):
        memory_png(tmp_path / "x.png", {}, GIB, GIB, "empty")
    with pytest.raises(ValueError, match="2 steps, 1 losses"):
        loss_png(tmp_path / "x.png", [1, 2], [1.0], [1e-5] * 2, [1.0] * 2, [1.0] * 2, "uneven")
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="a folder that can be written"):
        loss_png(tmp_path / "file" / "loss.png", [1], [1.0], [1e-5], [None], [1.0], "a run")
