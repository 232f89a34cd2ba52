"""Draws timelines as PNG files 1600 pixels wide, and defines the colours of all pictures.

The colour of an op kind says what it does: blue for compute, green for copies to the device, orange
for copies from it, purple for updates, and grey for norms and clipping. People with any common
colour blindness can distinguish these colours. Kinds of one colour differ in lightness, so they
also differ when printed in grey.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatrain.simulator.base.units import format_seconds
from megatrain.simulator.compare.error_table import signed_percent
from megatrain.simulator.plots import canvas
from megatrain.simulator.schedule import LANES
from megatrain.simulator.schedule.timeline import Span, Timeline

KIND_COLOURS = {
    "embed": "#7fc8c2",
    "forward": "#6aaee0",
    "head": "#f2c94c",
    "loss": "#f7e3a1",
    "recompute": "#bcdcf4",
    "backward": "#1f5f9e",
    "embed_backward": "#2b7a78",
    "load_weights": "#2e9e6b",
    "load_activations": "#8ed1a8",
    "load_attention": "#a3e0b4",
    "load_gradients": "#bfe5c8",
    "load_state": "#186a46",
    "load_second_moment": "#0c4a30",
    "save_gradients": "#e07b39",
    "save_activations": "#f3b27f",
    "save_attention": "#f7cfa8",
    "save_state": "#a84f16",
    "accumulate_gradients": "#d9b3dd",
    "update": "#7b3f98",
    "cpu_update": "#8e5aa8",
    "norm": "#8a949e",
    "encode_gradients": "#6f7b86",
    "update_ratios": "#6d7780",
    "clip": "#4a5560",
    "cpu_adam": "#b26fc4",
    "host_pass": "#c76b8f",
    "thread_pass": "#8c2f55",
    "device_pass": "#a3b86c",
    "gather_weights": "#b5485d",
    "exchange_gradients": "#dd93a1",
    "exchange_sums": "#7d2436",
    "sum_rows": "#a3adb6",
}
"""Kind of op -> colour, in the order of the legend."""
DATA_COLOURS = {
    "weights": "#2e9e6b",
    "master_low": "#8ed1a8",
    "moments": "#8e5aa8",
    "gradients": "#e07b39",
    "staging": "#f3b27f",
    "activations": "#6aaee0",
    "saved_activations": "#2b7a78",
    "hidden": "#1f5f9e",
    "attention": "#7fc8c2",
    "tokens": "#f2c94c",
    "workspace": "#b9c1c9",
}
"""Data that a pool holds -> colour. `staging` is for data that only passes through the pool."""
UNKNOWN = "#c9b27c"
"""The colour of any other op kind."""
DOTS = (0, (1, 1.5))
"""The dotted line style of matplotlib for the end of the measured step."""
_ROW_INCHES, _RIGHT_INCHES = 0.34, 0.75
_GLYPH_PIXELS = 12.0  # width per character of an id in 8 point type, including its margins


def timeline_png(path: Path, timelines: Sequence[Timeline], title: str, subtitle: str = "") -> None:
    """Draws timelines one above the other, with a common time axis.

    Each timeline has a row for each lane. An op is a bar with the colour of its kind, and with its
    id if that fits. The heading shows the length of the step. If there is a timeline named
    `measured`, the headings of the others also show their signed errors against it. The share of
    time in which a lane is busy is at the right. The legend leaves out kinds whose ops are shorter
    than a pixel in total.

    Raises ValueError if no span has a length, and UserError if `path` cannot be written.
    """
    lanes = [
        lane
        for lane in LANES
        if any(span.lane == lane for timeline in timelines for span in timeline.spans)
    ]
    end_ns = max((timeline.makespan_ns for timeline in timelines), default=0)
    if not lanes or not end_ns:
        raise ValueError(f"{path.name}: nothing to draw; all spans have length 0")
    busy: Counter[str] = Counter()
    for span in (span for timeline in timelines for span in timeline.spans):
        busy[span.kind] += span.duration_ns
    kinds = sorted(
        (kind for kind in busy if busy[kind] > end_ns / canvas.WIDTH_PIXELS),
        key=[*KIND_COLOURS, *busy].index,
    )
    reference = next((timeline for timeline in timelines if timeline.name == "measured"), None)
    handles: list[Artist] = [
        Patch(facecolor=KIND_COLOURS.get(kind, UNKNOWN), label=kind) for kind in kinds
    ]
    if reference is not None and len(timelines) > 1:
        handles.append(
            Line2D([], [], color=canvas.INK, linewidth=1.0, linestyle=DOTS, label="end of measured")
        )
    legend_rows, rows = -(-len(handles) // 7), _ROW_INCHES * len(lanes)
    panel, top, bottom = rows + 0.44, 0.6 if subtitle else 0.34, 0.62 + 0.24 * legend_rows
    scale, unit = time_unit(end_ns)
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(top + bottom + len(timelines) * panel - 0.1, title, subtitle)
        for index, timeline in enumerate(timelines):
            axes = canvas.add_axes(
                figure, bottom + (len(timelines) - 1 - index) * panel, rows, _RIGHT_INCHES
            )
            axes.set_xlim(0, end_ns * scale * 1.012)
            axes.set_ylim(len(lanes) - 0.5, -0.5)
            _rows(axes, timeline, lanes)
            _bars(axes, timeline, lanes, scale)
            _step_mark(axes, timeline, reference, scale)
            axes.tick_params(axis="x", length=3, labelbottom=timeline is timelines[-1])
        axes.set_xlabel(f"time from the start of the step ({unit})")
        place = (0.5, 0.08 / figure.get_figheight())
        figure.legend(
            handles=handles,
            loc="lower center",
            ncol=-(-len(handles) // legend_rows),
            bbox_to_anchor=place,
            columnspacing=1.6,
            **canvas.SWATCHES,
        )
        canvas.save(figure, path)


def time_unit(end_ns: float) -> tuple[float, str]:
    """Returns the best unit for times up to `end_ns`, as (units per ns, name of the unit)."""
    return (1e-9, "s") if end_ns >= 2e9 else (1e-6, "ms") if end_ns >= 2e6 else (1e-3, "us")


def _rows(axes: Axes, timeline: Timeline, lanes: Sequence[str]) -> None:
    """Draws the rows of the lanes on pale bands, with their names at the left and the share of the
    step in which each is busy at the right.
    """
    axes.set_yticks(range(len(lanes)), lanes)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    axes.set_axisbelow(True)
    for row, lane in enumerate(lanes):
        axes.axhspan(row - 0.4, row + 0.4, color=canvas.ROW, linewidth=0, zorder=0)
        busy = timeline.busy_ns(lane) / timeline.makespan_ns if timeline.makespan_ns else 0.0
        axes.text(
            1.05,
            row,
            f"{100 * busy:.0f} %",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            color=canvas.MUTED,
            fontsize=8.5,
        )
    axes.annotate(
        "busy",
        (1.05, 1),
        (0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="baseline",
        color=canvas.MUTED,
        fontsize=8.5,
    )


def _bars(axes: Axes, timeline: Timeline, lanes: Sequence[str], scale: float) -> None:
    """Draws one bar for each op, with the op's id if it fits.

    Bars of a kind are one pixel apart if they are wide enough. Otherwise, bars that touch are
    joined.
    """
    pixels_per_ns = axes.get_position().width * canvas.WIDTH_PIXELS / (axes.get_xlim()[1] / scale)
    kinds: dict[str, list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start_ns):
        kinds.setdefault(span.kind, []).append(span)
    corners, colours = [], []
    for kind, spans in kinds.items():
        apart, colour = (
            statistics.median(span.duration_ns for span in spans) * pixels_per_ns >= 8,
            KIND_COLOURS.get(kind, UNKNOWN),
        )
        bars: list[tuple[float, float, int]] = []
        for span in spans:
            start, end, row = (
                float(span.start_ns),
                span.end_ns - apart / pixels_per_ns,
                lanes.index(span.lane),
            )
            touches = bars and row == bars[-1][2] and start - bars[-1][1] < 0.2 / pixels_per_ns
            if touches and not apart:
                start = bars.pop()[0]
            bars.append((start, max(start, end), row))
        corners += [
            [
                (x * scale, row + y)
                for x, y in ((start, -0.4), (end, -0.4), (end, 0.4), (start, 0.4))
            ]
            for start, end, row in bars
        ]
        colours += [colour] * len(bars)
        lengths = [
            (max(len(span.op.rsplit(".", parts)[0]) for span in spans), parts)
            for parts in (0, 1, 2)
        ]
        for span in spans:
            fitting = next(
                (
                    parts
                    for length, parts in lengths
                    if length * _GLYPH_PIXELS <= span.duration_ns * pixels_per_ns
                ),
                None,
            )
            if fitting is not None:
                text = span.op.rsplit(".", fitting)[0]
                place = ((span.start_ns + span.end_ns) / 2 * scale, lanes.index(span.lane))
                axes.text(
                    *place,
                    text,
                    ha="center",
                    va="center_baseline",
                    fontsize=8,
                    color=_readable(colour),
                    zorder=4,
                    clip_on=True,
                )
    axes.add_collection(
        PolyCollection(corners, facecolors=colours, edgecolors="none", linewidths=0, zorder=2),
        autolim=False,
    )


def _readable(colour: str) -> str:
    """Returns the text colour, dark or white, that is readable on `colour`."""
    red, green, blue = to_rgb(colour)
    return "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.58 else canvas.INK


def _step_mark(axes: Axes, timeline: Timeline, reference: Timeline | None, scale: float) -> None:
    """Draws a line at the end of the step, and a heading with its length and its error."""
    axes.axvline(timeline.makespan_ns * scale, color=canvas.INK, linewidth=1.0, zorder=5)
    text = f"step {format_seconds(timeline.makespan_ns / 1e9)}"
    if reference is not None and timeline is not reference and reference.makespan_ns:
        text += (
            f"   {signed_percent(timeline.makespan_ns / reference.makespan_ns - 1)} against"
            " measured"
        )
        axes.axvline(
            reference.makespan_ns * scale, color=canvas.INK, linewidth=1.0, linestyle=DOTS, zorder=5
        )
    canvas.add_heading(axes, timeline.name, text)
