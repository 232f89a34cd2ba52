"""Draws timelines as rows of bars, for print: the kinds of ops differ in colour and in hatch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from megatrain.simulator.plots.pictures import KIND_COLOURS
from megatrain.simulator.schedule import LANES
from megatrain.simulator.schedule.timeline import Timeline

_HATCHES = {
    "backward": "////",
    "recompute": "....",
    "load_state": "////",
    "save_state": "////",
    "cpu_update": "xxxx",
    "update": "xxxx",
    "head": "++++",
}
"""Hatches of kinds of ops that would look like another kind of the same lane in grey."""


def lanes_of(timelines: Sequence[Timeline]) -> list[str]:
    """Returns the lanes on which any of the timelines has an op."""
    return [
        lane
        for lane in LANES
        if any(span.lane == lane for timeline in timelines for span in timeline.spans)
    ]


def draw_lanes(axes: Axes, timeline: Timeline, lanes: Sequence[str], end_s: float) -> None:
    """Draws one row for each lane, on an axis of `end_s` seconds. Ops of one kind with gaps of less
    than a 4,000th of the axis are one bar. The dashed line is the end of the step.
    """
    gap = end_s / 4000
    for row, lane in enumerate(lanes):
        runs: list[tuple[str, float, float]] = []
        for span in sorted(
            (span for span in timeline.spans if span.lane == lane), key=lambda span: span.start_ns
        ):
            start, end = span.start_ns / 1e9, span.end_ns / 1e9
            if runs and runs[-1][0] == span.kind and start - runs[-1][2] < gap:
                runs[-1] = (span.kind, runs[-1][1], end)
            else:
                runs.append((span.kind, start, end))
        for kind in sorted({kind for kind, _, _ in runs}):
            bars = [(start, end - start) for name, start, end in runs if name == kind]
            axes.broken_barh(
                bars,
                (row - 0.4, 0.8),
                facecolor=KIND_COLOURS.get(kind, "#c9b27c"),
                edgecolor="#1f2933",
                linewidth=0.15,
                hatch=_HATCHES.get(kind, ""),
            )
    axes.axvline(timeline.makespan_ns / 1e9, color="#1f2933", linewidth=0.9, linestyle=(0, (4, 2)))
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(0, end_s)
    axes.tick_params(axis="y", length=0)


def kind_handles(timelines: Sequence[Timeline]) -> list[Patch]:
    """Returns legend entries of the kinds that take at least a 200th of a step."""
    busy: Counter[str] = Counter()
    for timeline in timelines:
        for span in timeline.spans:
            busy[span.kind] += span.duration_ns
    least = max(timeline.makespan_ns for timeline in timelines) / 200
    kinds = [kind for kind in KIND_COLOURS if busy[kind] >= least]
    return [
        Patch(
            facecolor=KIND_COLOURS[kind],
            edgecolor="#1f2933",
            linewidth=0.3,
            hatch=_HATCHES.get(kind, ""),
            label=kind.replace("_", " "),
        )
        for kind in kinds
    ]
