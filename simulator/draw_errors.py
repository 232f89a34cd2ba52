"""Picture of an error report: what each op kind weighs in the step's error beside how far its durations are off, and what the step is made of."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatrain.simulator import canvas
from megatrain.simulator.draw import KIND_COLOURS, UNKNOWN
from megatrain.simulator.error_report import ErrorReport
from megatrain.simulator.error_table import signed_percent
from megatrain.simulator.units import format_seconds

_PREDICTED, _MEASURED = "#9cc4e6", "#1f5f9e"
_ROW_INCHES, _NAMES_INCHES, _NUMBERS_INCHES = 0.27, 1.6, 4.3


def errors_png(path: Path, report: ErrorReport, title: str) -> None:
    """Above, a row a kind: a bar for what it weighs in the step, and its error in numbers. Below, the parts of the step, predicted and measured."""
    kinds, parts = _ROW_INCHES * len(report.kinds), 2.0 * _ROW_INCHES * len(report.parts)
    told = [f"end to end {100 * report.error:+.2f} %"]
    if report.engine_error is not None and report.cost_model_error is not None:
        told += [f"engine {100 * report.engine_error:+.2f} %", f"cost model {100 * report.cost_model_error:+.2f} %"]
    top, gap, bottom = 1.05, 0.85, 0.5
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(top + kinds + gap + parts + bottom, title, ", ".join(told))
        _kinds(canvas.add_axes(figure, bottom + parts + gap, kinds, _NUMBERS_INCHES, _NAMES_INCHES), report)
        _parts(canvas.add_axes(figure, bottom, parts, _NUMBERS_INCHES, _NAMES_INCHES), report)
        canvas.save(figure, path)


def _kinds(axes: Axes, report: ErrorReport) -> None:
    weights = [100 * kind.of_step for kind in report.kinds]
    colours = [KIND_COLOURS.get(kind.kind, UNKNOWN) for kind in report.kinds]
    axes.barh(range(len(weights)), weights, height=0.66, color=colours, zorder=2)
    _rows(axes, [kind.kind for kind in report.kinds])
    axes.axvline(0, color=canvas.INK, linewidth=0.8, zorder=3)
    reach = 1.15 * max([0.1, *map(abs, weights)])
    axes.set_xlim(-reach, reach)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: signed_percent(value / 100)))
    canvas.add_heading(axes, "what a kind weighs in the step", "")
    found = [
        [*(signed_percent(error) for error in (kind.error, kind.median_error)), signed_percent(kind.p95_abs_error).removeprefix("+"), signed_percent(kind.worst_error)]
        for kind in report.kinds
    ]  # fmt: skip
    _numbers(axes, {"total": 0.18, "median": 0.33, "P95 |error|": 0.49, "worst": 0.63}, found)
    for row, kind in enumerate(report.kinds):
        axes.text(1.66, row, kind.worst_op, transform=axes.get_yaxis_transform(), va="center", color=canvas.MUTED, fontsize=8.5)


def _parts(axes: Axes, report: ErrorReport) -> None:
    for shift, colour, times in (
        (-0.2, _PREDICTED, [part.predicted_seconds for part in report.parts]), (0.2, _MEASURED, [part.measured_seconds for part in report.parts]),
    ):  # fmt: skip
        axes.barh([row + shift for row in range(len(times))], times, height=0.36, color=colour, zorder=2)
    _rows(axes, ["compute busy" if part.name == "compute" else "no lane busy" if part.name == "waiting" else f"{part.name}, exposed" for part in report.parts])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} s"))
    canvas.add_heading(axes, "what the step is made of", "")
    found = [[format_seconds(part.predicted_seconds), format_seconds(part.measured_seconds), signed_percent(part.of_step)] for part in report.parts]
    _numbers(axes, {"predicted": 0.22, "measured": 0.42, "difference, of the step": 0.75}, found)
    handles = [Patch(facecolor=_PREDICTED, label="predicted"), Patch(facecolor=_MEASURED, label="measured")]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncol=2, **canvas.SWATCHES)


def _numbers(axes: Axes, columns: dict[str, float], rows: list[list[str]]) -> None:
    """Columns of text beside the panel, right-aligned at so many of its widths beyond its right edge."""
    for name, place in columns.items():
        axes.annotate(name, (1 + place, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", ha="right", color=canvas.MUTED, fontsize=8.5)
    for row, cells in enumerate(rows):
        for place, text in zip(columns.values(), cells, strict=True):
            axes.text(1 + place, row, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=8.5)


def _rows(axes: Axes, names: list[str]) -> None:
    """Named from above, on a grid of values."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, pad=8)
    axes.tick_params(axis="x", length=3)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.set_axisbelow(True)
    axes.grid(axis="x")
