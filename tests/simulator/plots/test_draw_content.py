"""Tests of what the pictures show: names, numbers, bars and areas.

They are read from the figure before it becomes a PNG.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from megatrain.simulator.compare.compare import compare
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.plots import canvas
from megatrain.simulator.plots.error_pictures import errors_png
from megatrain.simulator.plots.loss_picture import loss_png
from megatrain.simulator.plots.memory_picture import memory_png
from megatrain.simulator.plots.pictures import timeline_png
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.buffer import Buffer
from megatrain.simulator.schedule.timeline import Span, Timeline

GIB, MILLISECOND = 2**30, 10**6
SPANS = (
    ("W0f.m0.c0", "h2d", 0, 4),
    ("F0.m0", "compute", 4, 9),
    ("B0.m0", "compute", 9, 19),
    ("G0.c0", "d2h", 19, 20),
)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """A list to which every drawn figure is added. Each must be readable."""
    figures: list[Figure] = []

    def save(figure: Figure, _: Path) -> None:
        assert_readable(figure)
        figures.append(figure)

    monkeypatch.setattr(canvas, "save", save)
    return figures


def assert_readable(figure: Figure) -> None:
    """Asserts that all panels with their names and legends are inside of the figure, and that none
    is drawn over another.
    """
    panels = {axes.get_position().bounds: axes.get_tightbbox() for axes in figure.axes}
    for box in panels.values():
        assert figure.bbox.padded(1).containsx(box.x0), (figure.bbox, box)
        assert figure.bbox.padded(1).containsx(box.x1), (figure.bbox, box)
        assert figure.bbox.padded(1).containsy(box.y0), (figure.bbox, box)
        assert figure.bbox.padded(1).containsy(box.y1), (figure.bbox, box)
    for one, other in itertools.combinations(panels.values(), 2):
        assert not one.padded(-1).overlaps(other.padded(-1)), (one, other)


def timeline(name: str, factor: int = 1) -> Timeline:
    spans = [
        Span(
            op=op,
            lane=lane,
            start_ns=start * factor * MILLISECOND,
            end_ns=end * factor * MILLISECOND,
        )
        for op, lane, start, end in SPANS
    ]
    return Timeline(name=name, digest="", spans=tuple(spans))


def texts(axes: Axes) -> list[str]:
    return [
        child.get_text()
        for child in axes.get_children()
        if isinstance(child, Text) and child.get_text()
    ]


def heights(axes: Axes, time: float) -> list[float]:
    """Returns the upper edge of each stacked area at `time`."""
    found = []
    for area in axes.collections:
        corners = area.get_paths()[0].vertices
        found.append(max(y for x, y in corners if x == pytest.approx(time)))
    return found


def test_a_timeline_names_its_lanes_with_their_shares_and_its_step(drawn: list[Figure]) -> None:
    timeline_png(Path("step.png"), [timeline("predicted"), timeline("measured", 2)], "a step")
    (figure,) = drawn
    upper, lower = figure.axes
    for axes in figure.axes:
        assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "h2d", "d2h"]
        assert list(axes.get_yticks()) == [0, 1, 2]
        assert [text for text in texts(axes) if text.endswith(" %")] == ["75 %", "20 %", "5 %"]
    assert "step 20.000 ms   -50.0 % against measured" in texts(upper)
    assert "step 40.000 ms" in texts(lower)
    assert upper.get_xlim() == lower.get_xlim()
    assert upper.get_xlim()[1] == pytest.approx(40, rel=0.05)
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "time from the start of the step (ms)")
    kinds = {"load_weights", "forward", "backward", "save_gradients"}
    assert {text.get_text() for text in figure.legends[0].get_texts()} == kinds | {
        "end of measured"
    }


def test_each_op_is_a_bar_in_its_lane_s_row(drawn: list[Figure]) -> None:
    timeline_png(Path("step.png"), [timeline("predicted")], "a step")
    (axes,) = drawn[0].axes
    bars = {}
    for path in next(
        found for found in axes.collections if len(found.get_paths()) == len(SPANS)
    ).get_paths():
        (left, low), (right, high) = path.vertices.min(axis=0), path.vertices.max(axis=0)
        assert (high - low) == pytest.approx(0.8)
        bars[round(left)] = (round(right), round((low + high) / 2))
    assert bars == {0: (4, 1), 4: (9, 0), 9: (19, 0), 19: (20, 2)}
    assert {"W0f.m0.c0", "F0.m0", "B0.m0"} <= set(texts(axes))
    colours = {text.get_text(): text.get_color() for text in axes.texts}
    assert (colours["F0.m0"], colours["B0.m0"]) == (canvas.INK, "white"), "B0.m0 is dark blue"


def test_ops_too_short_for_a_bar_of_their_own_are_joined_if_they_touch(drawn: list[Figure]) -> None:
    """Thousands of bars with light edges would look like one pale bar."""
    starts = [*range(3000), *range(4000, 6000)]
    spans = tuple(
        Span(
            op=f"F0.m{start}",
            lane="compute",
            start_ns=start * MILLISECOND,
            end_ns=(start + 1) * MILLISECOND,
        )
        for start in starts
    )
    timeline_png(Path("step.png"), [Timeline(name="predicted", digest="", spans=spans)], "a step")
    (bars,) = drawn[0].axes[0].collections
    edges = [path.vertices[:, 0] for path in bars.get_paths()]
    assert [(min(x), max(x)) for x in edges] == [
        (0, pytest.approx(3)),
        (pytest.approx(4), pytest.approx(6)),
    ]


def buffer(pool: str, data: Any, **traits: Any) -> Buffer:
    return Buffer(id=f"{pool}:0", bytes=GIB, data=data, dtype="bf16", **traits)


@pytest.mark.parametrize(
    ("limit", "said", "line"),
    [
        (5 * GIB, "most held 3.00 GiB of 5.00 GiB", True),
        (3 * GIB, "most held 3.00 GiB of 3.00 GiB", True),
        (3 * GIB - 1, "most held 3.00 GiB of 3.00 GiB: does not fit", True),
        (7 * GIB, "most held 3.00 GiB of 7.00 GiB (limit above the axis)", False),
    ],
)
def test_memory_is_stacked_to_its_peak_below_its_limit(
    drawn: list[Figure], limit: int, said: str, line: bool
) -> None:
    """Memory is stacked, with a line at its limit.

    A limit far above the peak is only written as text, so the pools are tall enough to read.
    """
    usage = {
        "device.weights": [(0, GIB), (5 * MILLISECOND, 2 * GIB)],
        "device.hidden": [(MILLISECOND, GIB), (9 * MILLISECOND, 0)],
    }
    kinds = {
        "device.weights": buffer("device.weights", "weights", persistent=True),
        "device.hidden": buffer("device.hidden", "hidden"),
    }
    memory_png(
        Path("memory.png"), usage, limit, 64 * GIB, "memory", step_ns=12 * MILLISECOND, kinds=kinds
    )
    (axes,) = drawn[0].axes
    assert "device" in texts(axes)
    assert said in texts(axes)
    assert ("limit" in texts(axes)) is line
    lines = [
        found.get_ydata()[0]
        for found in axes.lines
        if len(set(found.get_ydata())) == 1 and found.get_color() in (canvas.INK, canvas.ALARM)
    ]
    assert lines == ([pytest.approx(limit / GIB)] if line else [])
    assert axes.get_ylabel() == "GiB"
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] > max(3, limit / GIB if line else 0)
    assert axes.get_xlim() == (0, 12)
    assert max(heights(axes, 5)) == pytest.approx(3)
    assert max(heights(axes, 0)) == pytest.approx(1)
    assert max(heights(axes, 12)) == pytest.approx(2)
    assert sorted(text.get_text() for text in axes.get_legend().get_texts()) == [
        "inputs and outputs of layers   1.00 GiB",
        "weights   2.00 GiB",
    ]


def test_both_places_have_one_order_and_plain_names(drawn: list[Figure]) -> None:
    """Pools that differ only in their layers are one area, and so are pools that only pass data on.

    Resident data is below streamed data.
    """
    made: dict[str, dict[str, Any]] = {
        "weights": {"data": "weights", "persistent": True},
        "moments": {"data": "moments", "persistent": True},
        "gradients": {"data": "gradients", "persistent": True},
        "gradients_vocabulary": {"data": "gradients", "persistent": True},
        "slots": {"data": "weights"},
        "moments_chunks": {"data": "moments", "chunk": True},
        "gradients_chunks": {"data": "gradients", "chunk": True},
        "checkpoints": {"data": "hidden"},
    }
    usage = {
        f"{place}.{pool}": [(0, (number + 1) * GIB), (5, GIB)]
        for place, pools in (("device", [*made]), ("host", [*made][:3]))
        for number, pool in enumerate(reversed(pools))
    }
    kinds = {pool: buffer(pool, **made[pool.partition(".")[2]]) for pool in usage}
    memory_png(Path("memory.png"), usage, 99 * GIB, 99 * GIB, "memory", kinds=kinds)
    host, device = (
        [text.get_text().rpartition("   ")[0] for text in axes.get_legend().get_texts()][::-1]
        for axes in drawn[0].axes
    )
    assert host == ["weights", "moments of the optimizer", "gradients"]
    assert device == [
        *host,
        "weights, streamed",
        "chunks that are copied",
        "inputs and outputs of layers",
    ]
    assert len({area.get_facecolor().tobytes() for area in drawn[0].axes[1].collections}) == 6


def test_errors_have_no_sign_at_zero_and_a_sentence(drawn: list[Figure], make_plan: Any) -> None:
    plan = make_plan()
    schedule = lower(plan)
    step = simulate(schedule, cost_model(HardwareSpec.load("h200"), plan.model, plan.workload))
    report = compare(step, msgspec.structs.replace(step, name="measured"), schedule)
    report = msgspec.structs.replace(report, error=0.02, engine_error=0.05, cost_model_error=-0.03)
    errors_png(Path("errors.png"), report, "errors")
    (figure,) = drawn
    assert "The step took" in figure.texts[1].get_text()
    assert "an error of +2.0 %." in figure.texts[1].get_text()
    assert "contribute -3.0 %, wrong starts +5.0 %." in figure.texts[1].get_text()
    figure.draw_without_rendering()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert "0 %" in labels
    assert not {"+0 %", "+0.0 %", "-0.0 %"} & set(labels)
    assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(("batch", "unit"), [(1, "us"), (2**12, "ms")])
def test_times_of_errors_have_one_unit(
    drawn: list[Figure], make_plan: Any, batch: int, unit: str
) -> None:
    plan = make_plan(batch=batch)
    schedule = lower(plan)
    step = simulate(schedule, cost_model(HardwareSpec.load("h200"), plan.model, plan.workload))
    report = compare(step, msgspec.structs.replace(step, name="measured"), schedule)
    errors_png(Path("errors.png"), report, "errors")
    drawn[0].draw_without_rendering()
    for axes in drawn[0].axes[1:]:
        labels = [label.get_text() for label in axes.get_xticklabels()]
        assert {label.partition(" ")[2] for label in labels} == {unit}
        assert all(abs(float(label.partition(" ")[0])) < 5000 for label in labels)


def test_errors_have_three_panels_with_a_row_for_each_kind_lane_and_part(
    drawn: list[Figure], make_plan: Any
) -> None:
    plan = make_plan()
    schedule = lower(plan)
    step = simulate(schedule, cost_model(HardwareSpec.load("h200"), plan.model, plan.workload))
    report = compare(step, msgspec.structs.replace(step, name="measured"), schedule)
    errors_png(Path("errors.png"), report, "errors")
    others = [part.name for part in report.parts[1:-1]]
    for axes, heading, rows, bars in zip(
        drawn[0].axes,
        (
            "part of the step's error, by kind of operation",
            "busy time of each lane",
            "what the step consists of",
        ),
        (
            [kind.kind for kind in report.kinds],
            [lane.lane for lane in report.lanes],
            ["compute busy", *(f"{lane} alone" for lane in others), "no lane busy"],
        ),
        (1, 2, 2),
        strict=True,
    ):
        assert heading in texts(axes)
        assert [label.get_text() for label in axes.get_yticklabels()] == rows
        assert len(axes.patches) == bars * len(rows)
    seconds = [bar.get_width() for bar in drawn[0].axes[2].patches]
    assert seconds == pytest.approx(
        [part.predicted_seconds for part in report.parts]
        + [part.measured_seconds for part in report.parts]
    )


def test_small_pools_are_one_area(drawn: list[Figure]) -> None:
    usage = {
        "host.moments": [(0, 100 * GIB)],
        "host.one": [(0, GIB // 8), (5, GIB // 4)],
        "host.two": [(0, GIB // 4)],
        "host.large": [(0, GIB)],
    }
    memory_png(Path("memory.png"), usage, GIB, 128 * GIB, "memory")
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.get_legend().get_texts()][-2:] == [
        "large   1.00 GiB",
        "moments   100.00 GiB",
    ]
    assert "other, 2 kinds   512.00 MiB" in [
        text.get_text() for text in axes.get_legend().get_texts()
    ]


def test_a_panel_is_as_high_as_the_names_of_its_pools(drawn: list[Figure]) -> None:
    usage = {
        f"{place}.pool{number}": [(0, (number + 20) * GIB), (5, GIB)]
        for place in ("device", "host")
        for number in range(22)
    }
    memory_png(Path("memory.png"), usage, 999 * GIB, 999 * GIB, "memory")
    assert [len(axes.get_legend().get_texts()) for axes in drawn[0].axes] == [22, 22]


@pytest.mark.parametrize(("count", "window"), [(49, 0), (50, 2), (400, 16)])
def test_a_loss_with_its_running_mean_rate_norm_and_speed(
    drawn: list[Figure], count: int, window: int
) -> None:
    steps, losses = list(range(1, count + 1)), [10 / step for step in range(1, count + 1)]
    loss_png(
        Path("loss.png"),
        steps,
        losses,
        [*[2e-5] * (count - 1), 1e-6],
        [None, *range(2, count + 1)],
        [1000.0] * count,
        "a run",
        evaluations=[(10, 0.5), (20, 0.25)],
        window=window,
    )
    upper, lower, norms, rates = drawn[0].axes
    assert [axes.get_xlabel() for axes in drawn[0].axes] == ["", "step", "", ""]
    assert "highest 2e-5, last 1e-6" in texts(rates)
    assert f"median {(count + 2) / 2:.3g}, largest {count}" in texts(norms)
    assert list(norms.lines[0].get_xdata()) == steps[1:]
    curves = [(list(line.get_xdata()), list(line.get_ydata())) for line in upper.lines]
    assert curves[0] == (steps, losses)
    assert curves[-1] == ([10, 20], [0.5, 0.25])
    assert len(curves) == (3 if window else 2)
    if window:
        assert curves[1][1] == pytest.approx(
            [float(np.mean(losses[first : first + window])) for first in range(count - window + 1)]
        )
        assert curves[1][0][0] == 1 + window // 2
        mean = f"mean of the last {window} steps {np.mean(losses[-window:]):.4f}"
        assert f"last {losses[-1]:.4f}, {mean}, evaluation 0.2500" in texts(upper)
    assert "median 1,000.0" in texts(lower)
    smoothed = [f"mean of {window} steps"] if window else []
    named = [text.get_text() for text in upper.get_legend().get_texts()]
    assert named == ["each step", *smoothed, "evaluation"]
    assert any(text.endswith(", evaluation 0.2500") for text in texts(upper))
    assert lower.get_ylim() == (0, 1200)
