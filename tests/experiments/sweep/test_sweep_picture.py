"""Tests of a sweep's picture: all markers in one place are visible, and labels are readable."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from megatrain.experiments.sweep import picture
from megatrain.experiments.sweep.store import SweepRow
from megatrain.experiments.sweep.table import table
from megatrain.simulator.schedule.plan import Plan

GIB = 2**30


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """A list to which every drawn figure is added. No file is written."""
    figures: list[Figure] = []

    def keep(figure: Figure, stem: Path, _: str) -> Path:
        figures.append(figure)
        return stem

    monkeypatch.setattr(picture, "_save", keep)
    return figures


def row(plan: Plan, policy: str, batch: int, device: float, seconds: float) -> SweepRow:
    work = msgspec.structs.replace(plan.workload, batch=batch)
    return SweepRow(
        key=f"{policy}{batch}{device}",
        model="small",
        hardware="h200",
        policy=policy,
        knobs=plan.knobs,
        workload=work,
        device_limit_bytes=64 * GIB,
        host_limit_bytes=64 * GIB,
        decided_by="engine",
        device_peak_bytes=int(device * GIB),
        step_seconds=seconds,
        tokens_per_second=work.step_tokens / seconds,
    )


def notes(figure: Figure) -> list[Annotation]:
    (axes,) = figure.axes
    return [note for note in axes.texts if isinstance(note, Annotation) and note.xy != (0, 1)]


def test_policies_at_one_place_are_seen_and_points_say_their_batch(
    make_plan: Callable[..., Plan], drawn: list[Figure]
) -> None:
    plan = make_plan()
    rows = [
        row(plan, policy, batch, 2 + batch + shift, 3.0 + shift)
        for policy, shift in (("double_buffer", 0.0), ("k_buffer", 0.0), ("overlapped", 0.4))
        for batch in (1, 2, 4, 8)
    ]
    picture.draw(rows, Path("sweep"), "12 plans of small on h200", "12 fit")
    figure = drawn[0]
    (axes,) = figure.axes
    sizes = {
        line.get_label(): line.get_markersize()
        for line in axes.lines
        if line.get_label() in ("double_buffer", "k_buffer", "overlapped")
    }
    # a diamond is 1.41 times as wide as its size
    assert sizes["double_buffer"] > 1.41 * sizes["k_buffer"] > 1.41 * 1.41 * sizes["overlapped"]
    orders = [line.get_zorder() for line in axes.lines if line.get_label() in sizes]
    assert orders == sorted(orders), "the smaller ones are above"
    labels = notes(figure)
    assert {note.get_text() for note in labels} == {f"batch {batch}" for batch in (1, 2, 4, 8)}
    boxes = [note.get_window_extent() for note in labels]
    assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 for box in boxes)
    left = axes.get_window_extent().x0
    assert axes.title.get_text() == ""
    assert axes.get_title(loc="left") == "12 plans of small on h200"
    title: Any = vars(axes)["_left_title"]
    assert title.get_window_extent().x0 == pytest.approx(left, abs=2)


def test_few_of_many_plans_are_labelled(
    make_plan: Callable[..., Plan], drawn: list[Figure]
) -> None:
    """Labels of plans that are close together would overlap."""
    plan = make_plan()
    rows = [
        row(plan, "k_buffer", batch, 5 + number / 50, 2.0 - number / 1000)
        for batch in (1, 2, 4)
        for number in range(40)
    ]
    picture.draw(rows, Path("sweep"), "120 plans", "120 fit")
    labels = notes(drawn[0])
    assert 1 <= len(labels) <= 6
    boxes = [note.get_window_extent() for note in labels]
    assert not any(first.overlaps(second) for first, second in combinations(boxes, 2))


def test_the_picture_and_the_table_have_the_same_front(
    make_plan: Callable[..., Plan], drawn: list[Figure]
) -> None:
    """A plan that takes more memory and is hardly faster is in neither."""
    plan = make_plan()
    rows = [
        row(plan, "k_buffer", 1, device, seconds)
        for device, seconds in ((20.9, 4.672), (21.3, 4.671), (30.0, 4.0), (31.0, 3.99))
    ]
    picture.draw(rows, Path("sweep"), "4 plans", "4 fit")
    (axes,) = drawn[0].axes
    (line,) = [line for line in axes.lines if str(line.get_label()).startswith("Pareto front")]
    assert line.get_label() == "Pareto front, each plan at least 1% faster"
    ringed = [line for line in axes.lines if line.get_markeredgecolor() == picture.INK][-1]
    text = table(rows, []).partition("Pareto front")[2]
    listed = [float(size) for size in re.findall(r"([\d.]+) GiB +0 B", text)]
    assert listed == [20.9, 30.0]
    for drawn_line in (line, ringed):
        assert list(drawn_line.get_xdata()) == pytest.approx(listed, abs=0.01)


def test_the_fastest_plan_is_labelled_with_three_settings(
    make_plan: Callable[..., Plan], drawn: list[Figure]
) -> None:
    """Regression test: only two settings were named, so labels of different plans were the same,
    and the fastest plan had none, because its neighbours on the front came first.
    """
    plan = make_plan()
    rows = [
        msgspec.structs.replace(
            found, workload=msgspec.structs.replace(found.workload, clipping=clipping, state=state)
        )
        for batch, (device, seconds) in enumerate(((20, 4.0), (29, 3.0), (29.5, 2.9)), 1)
        for clipping, state, slower in (("global", "exact", 1.05), ("none", "master24", 1.0))
        for found in [row(plan, "k_buffer", batch, device + slower, slower * batch * seconds)]
    ]
    picture.draw(rows, Path("sweep"), "6 plans", "6 fit")
    assert "batch 3, clipping none, state master24" in {note.get_text() for note in notes(drawn[0])}


@pytest.mark.parametrize(
    ("policies", "shown"),
    [
        (
            ("double_buffer", "k_buffer", "overlapped", "resident", "sequential", "zero3_offload"),
            None,
        ),
        (
            ("mine/first.py", "my/folder/of/policies/second.py", "/tmp/first.py", "resident"),
            ["tmp/first.py", "mine/first.py", "policies/second.py", "resident"],
        ),
    ],
)
def test_the_legend_is_in_the_picture_and_has_short_names_of_files(
    policies: tuple[str, ...],
    shown: list[str] | None,
    make_plan: Any,
    drawn: list[Figure],
    tmp_path: Path,
) -> None:
    plan = make_plan("k_buffer")
    rows = [row(plan, name, 1, place + 1, 1.0) for place, name in enumerate(policies)]
    picture.draw(rows, tmp_path / "sweep", "title", "caption")
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()][1:] == (shown or list(policies))
    box = legend.get_window_extent()
    assert drawn[0].bbox.x0 <= box.x0
    assert box.x1 <= drawn[0].bbox.x1


def test_no_label_covers_the_axis(make_plan: Any, drawn: list[Figure], tmp_path: Path) -> None:
    """Points above the fastest plan leave room for its label only below."""
    plan = make_plan("k_buffer")
    rows = [row(plan, "k_buffer", 1, 10, 4000.0), row(plan, "k_buffer", 2, 100, 2 * 200.0)]
    rows += [row(plan, "k_buffer", 3, at, 3 * 226.0) for at in (94, 97, 103, 106)]
    picture.draw(rows, tmp_path / "sweep", "title", "caption")
    (axes,) = drawn[0].axes
    (label,) = [note for note in notes(drawn[0]) if note.get_text() == "batch 2"]
    assert label.get_position()[1] < 0
    assert label.get_window_extent().y0 >= axes.get_window_extent().y0
