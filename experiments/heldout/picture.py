"""Picture of the held-out results: predicted and measured steps, the error over the length of the
step, the targets, and one row for each plan with all of its errors.

Each policy has its own marker and colour, so the picture can also be read in grey. The planner's
choice has a ring. A number that misses its target is bold.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from megatrain.experiments.heldout import summary as targets
from megatrain.experiments.heldout.rows import HeldoutRow
from megatrain.experiments.heldout.suites import BEST
from megatrain.experiments.heldout.summary import (
    ErrorSummary,
    device_error,
    format_value,
    host_error,
    judged,
    step_error,
    summarize_errors,
)
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_seconds
from megatrain.simulator.compare.error_table import signed_percent
from megatrain.simulator.plots import canvas

_LOOKS = {
    "overlapped": ("#009E73", "D"),
    "k_buffer": ("#0072B2", "o"),
    "double_buffer": ("#E69F00", "s"),
    "sequential": ("#CC79A7", "^"),
    "resident": ("#56B4E9", "P"),
}
_OTHER = ("#8a949e", "X")
_WIDE, _NARROW = "#eceff2", "#d5dbe1"  # bands of the targets for the worst and the mean error
_ROW_INCHES, _PLOT_INCHES, _APART = 0.175, 3.7, 0.35  # _APART: gap between groups, in rows
_COLUMNS = {
    "predicted": 0.20,
    "measured": 0.43,
    "step": 0.60,
    "device": 0.77,
    "host": 0.92,
    "replay": 1.08,
}


def draw(rows: Sequence[HeldoutRow], path: Path) -> None:
    """Writes a PNG of the rows that ran, with each plan once. Raises UserError if no row ran."""
    ran = [row for row in rows if not row.failure and not row.same_as]
    if not ran:
        raise UserError(
            str(path),
            found="no executed case",
            allowed="one or more",
            fix="run `python -m megatrain.experiments.heldout` first",
        )
    groups: dict[str, list[HeldoutRow]] = {}
    for row in ran:
        groups.setdefault(row.group, []).append(row)
    summary = summarize_errors(rows)
    lines = len(ran) + (1 + _APART) * len(groups)
    below, judging, top, gap, bottom = (
        _ROW_INCHES * lines,
        _ROW_INCHES * (len(summary.targets()) + 0.5),
        1.0,
        0.95,
        0.45,
    )
    base = bottom + below + 0.7
    plots = base + judging + gap
    where = ", ".join(sorted({f"{row.machine}, {row.date}" for row in ran}))
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(
            plots + _PLOT_INCHES + top,
            "Predicted and measured steps of plans that were not calibrated on",
            f"{where}; {len(ran)} plans, each predicted before it ran; errors are (predicted -"
            " measured) / measured",
        )
        width = canvas.WIDTH_PIXELS / canvas.DPI
        _against(canvas.add_axes(figure, plots, _PLOT_INCHES, width / 2 + 0.3), ran)
        _errors(canvas.add_axes(figure, plots, _PLOT_INCHES, 0.35, width / 2 + 0.55), ran)
        _targets(canvas.add_axes(figure, base, judging, 4.6, 0.14), summary)
        _legend(canvas.add_axes(figure, base, judging, 0.35, width - 3.5), ran)
        _cases(canvas.add_axes(figure, bottom, below, 4.1, 2.95), groups)
        canvas.save(figure, path)


def _mark(axes: Axes, x: float, y: float, row: HeldoutRow) -> None:
    """Draws the marker of the row's policy, with a ring if the planner chose it."""
    colour, marker = _LOOKS.get(row.plan.policy, _OTHER)
    axes.plot(
        [x],
        [y],
        marker=marker,
        color=colour,
        markersize=5,
        markeredgecolor="white",
        markeredgewidth=0.4,
        linestyle="none",
        zorder=5,
    )
    if row.policy == BEST:
        axes.plot(
            [x],
            [y],
            marker="o",
            markersize=9.5,
            markerfacecolor="none",
            markeredgecolor=canvas.INK,
            markeredgewidth=0.9,
            linestyle="none",
            zorder=6,
        )


def _seconds(axis: Axes, low: float, high: float, name: str) -> None:
    """Formats a logarithmic axis with round seconds."""
    digits = (1, 2, 5) if high > 10 * low else (1, 1.5, 2, 3, 4, 6, 8)
    ticks = [
        value
        for power in range(-6, 5)
        for value in (digit * 10.0**power for digit in digits)
        if low <= value <= high
    ]
    getattr(axis, f"set_{name}scale")("log")
    getattr(axis, f"set_{name}lim")(low, high)
    ruler = getattr(axis, f"{name}axis")
    ruler.set_minor_locator(NullLocator())
    ruler.set_ticks(ticks)
    ruler.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms")
    )


def _span(rows: Sequence[HeldoutRow]) -> tuple[float, float]:
    """Returns the limits in seconds of an axis of step times."""
    times = [
        time
        for row in rows
        if row.plan.prediction and row.step_seconds
        for time in (row.plan.prediction.step_seconds, row.step_seconds)
    ]
    return min(times) / 1.25, max(times) * 1.25


def _against(axes: Axes, rows: Sequence[HeldoutRow]) -> None:
    low, high = _span(rows)
    for share, colour in ((targets.STEP_WORST, _WIDE), (targets.STEP_MEAN, _NARROW)):
        axes.fill_between(
            [low, high],
            [low * (1 - share), high * (1 - share)],
            [low * (1 + share), high * (1 + share)],
            color=colour,
            linewidth=0,
            zorder=1,
        )
    axes.plot([low, high], [low, high], color=canvas.MUTED, linewidth=0.7, zorder=2)
    for row in rows:
        if row.plan.prediction and row.step_seconds:
            _mark(axes, row.step_seconds, row.plan.prediction.step_seconds, row)
    for name in ("x", "y"):
        _seconds(axes, low, high, name)
    _plain(axes, "predicted step over measured", "measured")
    axes.set_ylabel("predicted")


def _errors(axes: Axes, rows: Sequence[HeldoutRow]) -> None:
    low, high = _span(rows)
    for share, colour in ((targets.STEP_WORST, _WIDE), (targets.STEP_MEAN, _NARROW)):
        axes.axhspan(-share, share, color=colour, linewidth=0, zorder=1)
    axes.axhline(0, color=canvas.MUTED, linewidth=0.7, zorder=2)
    for row in rows:
        if row.step_seconds:
            _mark(axes, row.step_seconds, step_error(row), row)
    _seconds(axes, low, high, "x")
    axes.set_ylim(-_reach(rows), _reach(rows))
    _percents(axes.yaxis)
    _plain(axes, "error of the step", "measured")


def _percents(axis: Axis) -> None:
    axis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 3) + 0.0:+g} %"))


def _plain(axes: Axes, heading: str, label: str) -> None:
    canvas.add_heading(axes, heading, "")
    canvas.make_plain(axes)
    axes.set_axisbelow(False)
    axes.grid(visible=False)
    axes.set_xlabel(label)


def _reach(rows: Sequence[HeldoutRow]) -> float:
    """Returns the limit of an axis of errors, as a share."""
    return 1.15 * max([targets.STEP_WORST, *(abs(step_error(row)) for row in rows)])


def _targets(axes: Axes, summary: ErrorSummary) -> None:
    """Writes one line for each target: its name, the value, the target and whether it was met."""
    lines = summary.targets()
    _empty(axes, len(lines) + 0.5)
    canvas.add_heading(axes, "targets", "")
    for line, (what, value, target, met) in enumerate(lines):
        missed = value is not None and not met
        for x, text, align in (
            (0.0, what, "left"),
            (0.56, format_value(what, value), "right"),
            (0.62, f"aimed at {target}", "left"),
            (0.86, judged(value, met), "left"),
        ):
            axes.text(
                x,
                line + 0.5,
                text,
                ha=align,
                va="center",
                fontsize=8.5,
                fontweight="bold" if missed else "normal",
                color=canvas.ALARM if missed else canvas.INK,
            )


def _legend(axes: Axes, rows: Sequence[HeldoutRow]) -> None:
    _empty(axes, 1)
    used = {row.plan.policy for row in rows}
    entries: list[Line2D | Patch] = []
    for policy in [*(name for name in _LOOKS if name in used), *sorted(used - _LOOKS.keys())]:
        colour, marker = _LOOKS.get(policy, _OTHER)
        entries.append(
            Line2D(
                [], [], linestyle="none", marker=marker, color=colour, markersize=5, label=policy
            )
        )
    entries += [
        Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            markersize=9,
            markerfacecolor="none",
            markeredgecolor=canvas.INK,
            label="the planner's choice",
        ),
        Patch(facecolor=_NARROW, label=f"within {targets.STEP_MEAN:.0%}"),
        Patch(facecolor=_WIDE, label=f"within {targets.STEP_WORST:.0%}"),
    ]
    axes.legend(handles=entries, loc="upper left", bbox_to_anchor=(0.0, 1.1), **canvas.SWATCHES)


def _empty(axes: Axes, lines: float) -> None:
    """Hides the axes and sets their limits to 0..1 and to `lines`, counted from the top. Text can
    then be placed by line.
    """
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(lines, 0)


def _cases(axes: Axes, groups: dict[str, list[HeldoutRow]]) -> None:
    """Draws one row for each plan, grouped by workload and memory. The mark is the error of its
    step, and the numbers are all of its errors.
    """
    rows = [row for members in groups.values() for row in members]
    for share, colour in ((targets.STEP_WORST, _WIDE), (targets.STEP_MEAN, _NARROW)):
        axes.axvspan(-share, share, color=colour, linewidth=0, zorder=1)
    axes.axvline(0, color=canvas.MUTED, linewidth=0.7, zorder=2)
    line, names, places = 0.0, list[str](), list[float]()
    for group, members in groups.items():
        axes.text(
            -0.79,
            line,
            group.replace("/", ", "),
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=8,
            fontweight="bold",
            clip_on=False,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            zorder=4,
        )
        line += 1
        for row in members:
            error = step_error(row)
            axes.plot([0, error], [line, line], color=canvas.MUTED, linewidth=0.8, zorder=3)
            _mark(axes, error, line, row)
            _numbers(axes, line, row)
            chosen = (
                f"{row.plan.policy}, the planner's choice" if row.policy == BEST else row.policy
            )
            names.append(f"{chosen}, {row.variant}" if row.variant else chosen)
            places.append(line)
            line += 1
        line += _APART
    axes.set_yticks(places, names, fontsize=8)
    axes.set_ylim(line - _APART - 0.4, -0.6)
    axes.set_xlim(-_reach(rows), _reach(rows))
    _percents(axes.xaxis)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    canvas.add_heading(axes, "error of the step, plan by plan", "")
    canvas.add_column_names(axes, _COLUMNS)


def _numbers(axes: Axes, line: float, row: HeldoutRow) -> None:
    """Writes a case's times and errors at the height `line`, and marks those that miss a target."""
    assert row.plan.prediction is not None
    assert row.step_seconds is not None
    device, host, replay = device_error(row), host_error(row), row.replay_error
    cells = [
        (format_seconds(row.plan.prediction.step_seconds), False),
        (format_seconds(row.step_seconds), False),
        (signed_percent(step_error(row)), abs(step_error(row)) > targets.STEP_WORST),
        (
            signed_percent(device),
            abs(device) > targets.DEVICE_WORST or device < targets.DEVICE_SMALLEST,
        ),
        (signed_percent(host), host is not None and abs(host) > targets.HOST_WORST),
        (signed_percent(replay), replay is not None and abs(replay) > targets.REPLAY_WORST),
    ]
    for place, (text, missed) in zip(_COLUMNS.values(), cells, strict=True):
        weight, colour = ("bold", canvas.ALARM) if missed else ("normal", canvas.INK)
        axes.text(
            1 + place,
            line,
            text,
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="center",
            fontsize=8,
            fontweight=weight,
            color=colour,
        )
