"""Draws timelines, memory over a step, and the loss of a run, as PNG files 1600 pixels wide.

Op kinds are coloured by what they do: blue for compute, green for copies to the device, orange for
copies from it, purple for updates, and grey for norms and clipping. These colours can be told apart
with every common colour blindness. Kinds of one colour differ in lightness, so that they also
differ when printed in grey.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatrain.simulator.base.units import format_bytes, format_seconds
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
    "load_gradients": "#bfe5c8",
    "load_state": "#186a46",
    "load_second_moment": "#0c4a30",
    "save_gradients": "#e07b39",
    "save_activations": "#f3b27f",
    "save_state": "#a84f16",
    "accumulate_gradients": "#d9b3dd",
    "update": "#7b3f98",
    "cpu_update": "#8e5aa8",
    "norm": "#8a949e",
    "update_ratios": "#6d7780",
    "clip": "#4a5560",
    "cpu_adam": "#b26fc4",
    "host_pass": "#c76b8f",
    "thread_pass": "#8c2f55",
    "device_pass": "#a3b86c",
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
_OTHER_COLOUR = "#dfe3e7"
UNKNOWN = "#c9b27c"
DOTS = (0, (1, 1.5))
_ROW_INCHES, _RIGHT_INCHES = 0.34, 0.75
_LEGEND_INCHES = 0.193  # height of a legend's line in 9 point type
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
    scale, unit = _time_unit(end_ns)
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


def _time_unit(end_ns: float) -> tuple[float, str]:
    """Returns the best unit to write `end_ns` in, as (units per nanosecond, name of the unit)."""
    return (1e-9, "s") if end_ns >= 2e9 else (1e-6, "ms") if end_ns >= 2e6 else (1e-3, "us")


def _rows(axes: Axes, timeline: Timeline, lanes: Sequence[str]) -> None:
    """Draws the rows of the lanes on pale bands, with their names at the left and the share of the
    step in which each is busy at the right.
    """
    axes.set_yticks(range(len(lanes)), lanes)
    axes.tick_params(axis="y", length=0, pad=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
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
    # Pixels per nanosecond.
    pixels = axes.get_position().width * canvas.WIDTH_PIXELS / (axes.get_xlim()[1] / scale)
    kinds: dict[str, list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda span: span.start_ns):
        kinds.setdefault(span.kind, []).append(span)
    corners, colours = [], []
    for kind, spans in kinds.items():
        apart, colour = (
            statistics.median(span.duration_ns for span in spans) * pixels >= 8,
            KIND_COLOURS.get(kind, UNKNOWN),
        )
        bars: list[tuple[float, float, int]] = []
        for span in spans:
            start, end, row = (
                float(span.start_ns),
                span.end_ns - apart / pixels,
                lanes.index(span.lane),
            )
            if bars and not apart and row == bars[-1][2] and start - bars[-1][1] < 0.2 / pixels:
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
                    if length * _GLYPH_PIXELS <= span.duration_ns * pixels
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


def memory_png(
    path: Path,
    usage: Mapping[str, Sequence[tuple[int, int]]],
    device_limit_bytes: int,
    host_limit_bytes: int,
    title: str,
    fixed: Mapping[str, int] | None = None,
    subtitle: str = "",
    step_ns: int = 0,
    data: Mapping[str, str] | None = None,
) -> None:
    """Draws the bytes of each pool over a step as stacked areas, with the limits of memory.

    The device is in the upper panel, and the host in the lower one.

    Args:
        path: The PNG file to write.
        usage: Pool, such as `device.weights`, -> (time in ns, bytes held from then on), ascending.
        device_limit_bytes: Limit of device memory.
        host_limit_bytes: Limit of host memory.
        title: Title of the picture.
        fixed: Pool -> bytes, for pools whose bytes do not change, such as `device.workspace`.
        subtitle: Text below the title.
        step_ns: End of the step, if it is later than the last change.
        data: Pool -> data that it holds, a key of DATA_COLOURS.

    Raises ValueError if no pool holds anything over time, and UserError if `path` cannot be
    written.
    """
    steps = {**{pool: [(0, size)] for pool, size in (fixed or {}).items()}, **usage}
    most = {pool: max((held for _, held in points), default=0) for pool, points in steps.items()}
    limits = {"device": device_limit_bytes, "host": host_limit_bytes}
    places = [
        place
        for place in limits
        if any(most[pool] for pool in steps if pool.startswith(f"{place}."))
    ]
    end_ns = max([step_ns, *(time for points in steps.values() for time, _ in points)])
    if not places or not end_ns:
        raise ValueError(f"{path.name}: nothing to draw; no pool holds anything over time")
    scale, unit = _time_unit(end_ns)
    top, bottom, gap = 0.98 if subtitle else 0.72, 0.62, 0.62
    stacks = {
        place: {pool: points for pool, points in steps.items() if pool.startswith(f"{place}.")}
        for place in places
    }
    # A panel is high enough for a legend that names every pool.
    heights = {
        place: max(2.75, _LEGEND_INCHES * (len(pools) + 1)) for place, pools in stacks.items()
    }
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(
            top + bottom + sum(heights.values()) + gap * (len(places) - 1), title, subtitle
        )
        base = bottom
        for place in reversed(places):
            axes = canvas.add_axes(figure, base, heights[place], 3.45)
            axes.set_xlim(0, end_ns * scale)
            if base == bottom:
                axes.set_xlabel(f"time from the start of the step ({unit})")
            _stack(axes, place, stacks[place], limits[place], end_ns, scale, data or {})
            base += heights[place] + gap
        canvas.save(figure, path)


def _stack(
    axes: Axes,
    place: str,
    pools: Mapping[str, Sequence[tuple[int, int]]],
    limit: int,
    end_ns: int,
    scale: float,
    data: Mapping[str, str],
) -> None:
    """Draws the pools of one place as stacked areas, with heading, limit and legend."""
    times = sorted({0, end_ns, *(time for points in pools.values() for time, _ in points)})
    held = {pool.partition(".")[2]: _held_at(points, times) for pool, points in pools.items()}
    peak = int(np.sum(list(held.values()), axis=0).max())
    small = [pool for pool, values in held.items() if values.max() < 0.004 * peak]
    if len(small) > 1:
        held[f"other, {len(small)} pools"] = np.sum([held.pop(pool) for pool in small], axis=0)
    most = {pool: int(values.max()) for pool, values in held.items()}
    swing = {pool: np.ptp(values) / max(1, most[pool]) for pool, values in held.items()}
    order = sorted(held, key=lambda pool: (swing[pool] > 0, swing[pool] > 0.5, -most[pool]))
    colours = _pool_colours({pool: data.get(f"{place}.{pool}", "") for pool in order})
    factor, unit = next(
        (
            (size, name)
            for size, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"))
            if peak >= 2 * size
        ),
        (2**10, "KiB"),
    )
    below, x = np.zeros(len(times)), np.array(times) * scale
    for pool in order:
        above = below + held[pool] / factor
        axes.fill_between(x, below, above, step="post", color=colours[pool], linewidth=0, zorder=2)
        if not swing[pool] and most[pool] > 0.01 * peak:
            axes.plot(x, above, color="white", linewidth=0.6, zorder=3)
        below = above
    near, over = limit <= 2.2 * peak, peak > limit
    axes.set_ylim(0, max(1.12 * peak, 1.12 * limit if near else 0) / factor)
    if near:
        axes.axhline(
            limit / factor,
            color=canvas.ALARM if over else canvas.INK,
            linewidth=1.2,
            linestyle=(0, (5, 3)),
            zorder=4,
        )
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1.5}
        axes.annotate(
            "limit",
            (0, limit / factor),
            (5, 5),
            textcoords="offset points",
            fontsize=8.5,
            color=canvas.ALARM if over else canvas.INK,
            bbox=box,
            zorder=5,
        )
    text = f"most held {format_bytes(peak)} of {format_bytes(limit)}" + (
        ": does not fit" if over else "" if near else " (limit above the axis)"
    )
    canvas.add_heading(axes, place, text, canvas.ALARM if over else canvas.INK)
    axes.set_ylabel(unit)
    canvas.make_plain(axes)
    handles = [
        Patch(facecolor=colours[pool], label=f"{pool}   {format_bytes(most[pool])}")
        for pool in reversed(order)
    ]
    corner, heading = (1.015, 1.02), "pool, most bytes held"
    axes.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=corner,
        title=heading,
        alignment="left",
        title_fontsize=8.5,
        **canvas.SWATCHES,
    )


def _held_at(
    points: Sequence[tuple[int, int]], times: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns the bytes held at each of `times`: int64 [times]."""
    starts, values = (
        np.array([time for time, _ in points], dtype=np.int64),
        np.array([0, *(held for _, held in points)], dtype=np.int64),
    )
    return values[np.searchsorted(starts, np.array(times, dtype=np.int64), side="right")]


def _pool_colours(data: Mapping[str, str]) -> dict[str, str]:
    """Returns the colour of each pool by the data that it holds. A further pool of the same data is
    paler.
    """
    colours: dict[str, str] = {}
    for pool in sorted(data, key=len):
        chosen = DATA_COLOURS.get(data[pool], _OTHER_COLOUR)
        while chosen in colours.values() and chosen != _OTHER_COLOUR:
            red, green, blue = (part + 0.45 * (1 - part) for part in to_rgb(chosen))
            chosen = to_hex((red, green, blue))
        colours[pool] = chosen
    return colours


def loss_png(
    path: Path,
    steps: Sequence[int],
    losses: Sequence[float],
    tokens_per_second: Sequence[float],
    title: str,
    subtitle: str = "",
    evaluations: Sequence[tuple[int, float]] = (),
) -> None:
    """Draws the loss and the speed of a run over its steps.

    The upper panel shows the loss of each step, its running mean if the run is long enough, and
    `evaluations` (step, loss) as points. The lower panel shows tokens per second.

    Raises ValueError if there are no steps or if the sequences differ in length, and UserError if
    `path` cannot be written.
    """
    if not steps or not len(steps) == len(losses) == len(tokens_per_second):
        raise ValueError(
            f"{path.name}: {len(steps)} steps, {len(losses)} losses, {len(tokens_per_second)}"
            " rates; there must be as many of each, and at least one"
        )
    window, marker = len(steps) // 25, "o" if len(steps) < 30 else ""
    smooth = window > 1
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(5.75 + (0.84 if subtitle else 0.58), title, subtitle)
        upper, lower = (
            canvas.add_axes(figure, 2.2, 3.4, 0.35),
            canvas.add_axes(figure, 0.62, 1.1, 0.35),
        )
        upper.plot(
            steps,
            losses,
            marker=marker,
            markersize=4,
            color="#9cc4e6" if smooth else "#1f5f9e",
            linewidth=0.8 if smooth else 1.6,
        )
        if smooth:
            means = np.convolve(losses, np.full(window, 1 / window), "valid")
            upper.plot(steps[window // 2 :][: len(means)], means, color="#1f5f9e", linewidth=1.8)
        if evaluations:
            upper.plot(
                *zip(*evaluations, strict=True),
                marker="D",
                markersize=4.5,
                color="#e07b39",
                linewidth=1.0,
            )
            upper.annotate(
                "evaluation",
                evaluations[-1],
                xytext=(-6, 7),
                textcoords="offset points",
                ha="right",
                fontsize=8,
                color="#a84f16",
            )
        canvas.add_heading(
            upper,
            "loss",
            f"last {losses[-1]:.4f}"
            + (
                f", mean of the last {window} steps {statistics.fmean(losses[-window:]):.4f}"
                if smooth
                else ""
            ),
        )
        lower.plot(
            steps, tokens_per_second, marker=marker, markersize=3.5, color="#2e9e6b", linewidth=1.2
        )
        lower.set_ylim(0, 1.2 * max(tokens_per_second) or 1)
        lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        lower.yaxis.set_major_locator(MaxNLocator(nbins=3))
        lower.set_xlabel("step")
        canvas.add_heading(lower, "tokens/s", f"median {statistics.median(tokens_per_second):,.1f}")
        margin = 0.02 * (steps[-1] - steps[0]) or 1
        for axes in (upper, lower):
            canvas.make_plain(axes)
            axes.set_xlim(steps[0] - margin, steps[-1] + margin)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10]))
        upper.tick_params(axis="x", labelbottom=False)
        canvas.save(figure, path)
