"""Draws an error report: the errors of op kinds and lanes, and the parts of the step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatrain.simulator.base.units import format_seconds
from megatrain.simulator.compare.error_report import ErrorReport, KindError, LaneErrors
from megatrain.simulator.compare.error_table import signed_percent
from megatrain.simulator.plots import canvas
from megatrain.simulator.plots.pictures import KIND_COLOURS, UNKNOWN, time_unit

_PREDICTED, _MEASURED = "#9cc4e6", "#1f5f9e"
_ROW_INCHES, _NAMES_INCHES, _NUMBERS_INCHES = 0.27, 1.6, 4.6


def errors_png(path: Path, report: ErrorReport, title: str) -> None:
    """Draws an error report as PNG, in three panels.

    The first has one row for each op kind: a bar for its weight in the step's error, and the errors
    of its durations as numbers. The second shows the busy time of each lane, and the third the
    parts of the step, both predicted and measured. Raises UserError if `path` cannot be written.
    """
    kinds, lanes, parts = (
        _ROW_INCHES * len(report.kinds),
        2.0 * _ROW_INCHES * len(report.lanes),
        2.0 * _ROW_INCHES * len(report.parts),
    )
    top, gap, bottom = 1.25, 0.85, 0.5
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(
            top + kinds + gap + lanes + gap + parts + bottom, title, _summary(report)
        )
        _kinds(
            canvas.add_axes(
                figure, bottom + parts + gap + lanes + gap, kinds, _NUMBERS_INCHES, _NAMES_INCHES
            ),
            report,
        )
        _lanes(
            canvas.add_axes(figure, bottom + parts + gap, lanes, _NUMBERS_INCHES, _NAMES_INCHES),
            report,
        )
        _parts(canvas.add_axes(figure, bottom, parts, _NUMBERS_INCHES, _NAMES_INCHES), report)
        canvas.save(figure, path)


def _summary(report: ErrorReport) -> str:
    """Returns two lines of text: the error of the step, and its two parts if they are known."""
    predicted, measured = (
        format_seconds(seconds) for seconds in (report.predicted_seconds, report.measured_seconds)
    )
    lines = [
        f"The step took {measured}; {predicted} were predicted, an error of"
        f" {signed_percent(report.error)}."
    ]
    if report.engine_error is not None and report.cost_model_error is not None:
        lines.append(
            "Wrong durations of operations contribute"
            f" {signed_percent(report.cost_model_error)}, wrong starts"
            f" {signed_percent(report.engine_error)}. Below zero, the prediction was too fast."
        )
    return "\n".join(lines)


def _kinds(axes: Axes, report: ErrorReport) -> None:
    weights = [100 * kind.of_step for kind in report.kinds]
    colours = [KIND_COLOURS.get(kind.kind, UNKNOWN) for kind in report.kinds]
    axes.barh(range(len(weights)), weights, height=0.66, color=colours, zorder=2)
    _rows(axes, [kind.kind for kind in report.kinds])
    axes.axvline(0, color=canvas.INK, linewidth=0.8, zorder=3)
    reach = 1.15 * max([0.1, *map(abs, weights)])
    axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    canvas.add_heading(axes, "part of the step's error, by kind of operation", "")
    _spread(axes, report.kinds, [kind.error for kind in report.kinds])


def _lanes(axes: Axes, report: ErrorReport) -> None:
    _pairs(
        axes, [(lane.predicted_busy_seconds, lane.measured_busy_seconds) for lane in report.lanes]
    )
    _rows(axes, [lane.lane for lane in report.lanes])
    _seconds(axes)
    canvas.add_heading(axes, "busy time of each lane", "")
    _spread(axes, report.lanes, [lane.busy_error for lane in report.lanes])
    _legend(axes)


def _parts(axes: Axes, report: ErrorReport) -> None:
    _pairs(axes, [(part.predicted_seconds, part.measured_seconds) for part in report.parts])
    _rows(
        axes,
        [
            (
                "compute busy"
                if part.name == "compute"
                else "no lane busy"
                if part.name == "waiting"
                else f"{part.name} alone"
            )
            for part in report.parts
        ],
    )
    _seconds(axes)
    canvas.add_heading(axes, "what the step consists of", "")
    rows = [
        [
            format_seconds(part.predicted_seconds),
            format_seconds(part.measured_seconds),
            signed_percent(part.of_step),
        ]
        for part in report.parts
    ]
    _numbers(axes, {"predicted": 0.22, "measured": 0.42, "difference, of the step": 0.75}, rows)
    _legend(axes)


def _pairs(axes: Axes, times: Sequence[tuple[float, float]]) -> None:
    """Draws one row of two bars for each (predicted, measured) pair of seconds."""
    for side, shift, colour in ((0, -0.2, _PREDICTED), (1, 0.2, _MEASURED)):
        axes.barh(
            [row + shift for row in range(len(times))],
            [pair[side] for pair in times],
            height=0.36,
            color=colour,
            zorder=2,
        )


def _legend(axes: Axes) -> None:
    handles = [
        Patch(facecolor=_PREDICTED, label="predicted"),
        Patch(facecolor=_MEASURED, label="measured"),
    ]
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncol=2, **canvas.SWATCHES
    )


def _seconds(axes: Axes) -> None:
    per_ns, unit = time_unit(1e9 * axes.get_xlim()[1])
    axes.xaxis.set_major_formatter(lambda value, _: f"{1e9 * value * per_ns:g} {unit}")


def _tick(percent: float, _: object = None) -> str:
    """Returns the label of an axis in percent, with a sign except at zero."""
    return f"{percent:+.3g} %" if abs(percent) > 1e-9 else "0 %"


def _spread(
    axes: Axes, errors: Sequence[KindError | LaneErrors], totals: Sequence[float | None]
) -> None:
    """Writes errors to the right of each row: the error of the sum (`totals`), and the median, the
    95th percentile and the worst of the errors of single ops.
    """
    rows = [
        [
            signed_percent(total),
            signed_percent(entry.median_error),
            signed_percent(entry.p95_abs_error).removeprefix("+"),
            signed_percent(entry.worst_error),
        ]
        for entry, total in zip(errors, totals, strict=True)
    ]
    columns = {"error, all": 0.18, "median": 0.36, "95 % below": 0.54, "worst": 0.72}
    _numbers(axes, columns, rows)
    for row, entry in enumerate(errors):
        axes.text(
            1.75,
            row,
            entry.worst_op,
            transform=axes.get_yaxis_transform(),
            va="center",
            color=canvas.MUTED,
            fontsize=8.5,
        )


def _numbers(axes: Axes, columns: dict[str, float], rows: list[list[str]]) -> None:
    """Writes columns of text to the right of the panel. Each column is aligned to the right.

    `columns` maps a column's name to the distance of its right edge from the panel, as a multiple
    of the panel's width.
    """
    canvas.add_column_names(axes, columns)
    for row, cells in enumerate(rows):
        for place, text in zip(columns.values(), cells, strict=True):
            axes.text(
                1 + place,
                row,
                text,
                transform=axes.get_yaxis_transform(),
                ha="right",
                va="center",
                fontsize=8.5,
            )


def _rows(axes: Axes, names: list[str]) -> None:
    """Names the rows from top to bottom, and draws vertical grid lines."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", length=3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.set_axisbelow(True)
    axes.grid(axis="x")
