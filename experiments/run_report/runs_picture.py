"""Draws several runs in one picture: loss and speed by step, and memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatrain.experiments.run_report.several_runs import NamedRun, RunsCompared
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.plots import canvas

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#66727f")
_LOSS_INCHES, _SPEED_INCHES, _GAP_INCHES, _BOTTOM_INCHES = 3.4, 1.2, 0.75, 0.5


def runs_png(path: Path, compared: RunsCompared, runs: Sequence[NamedRun]) -> None:
    """Writes a PNG with the loss and the speed of each run by step, and its memory.

    Evaluations are points. If losses are averaged, the loss of each step is drawn in a paler
    colour. Raises UserError if `path` cannot be written.
    """
    colours = [colour for _, colour in zip(runs, cycle(_COLOURS), strict=False)]
    memory = 0.34 * len(runs)
    with matplotlib.rc_context(canvas.STYLE):
        base = _BOTTOM_INCHES + memory + _GAP_INCHES
        title = "Runs: " + ", ".join(dict.fromkeys(run.model for run in compared.runs))
        machines = ", ".join(dict.fromkeys(run.machine for run in compared.runs))
        figure = canvas.new_figure(
            base + _SPEED_INCHES + _GAP_INCHES + _LOSS_INCHES + 1.3, title, machines
        )
        upper = canvas.add_axes(
            figure, base + _SPEED_INCHES + _GAP_INCHES, _LOSS_INCHES, 0.35, canvas.LEFT_INCHES
        )
        middle = canvas.add_axes(figure, base, _SPEED_INCHES, 0.35)
        for run, colour in zip(runs, colours, strict=True):
            record, window = run.record, compared.last_steps
            label = run.name
            upper.plot(
                record.steps,
                record.losses,
                color=colour,
                linewidth=0.7 if window > 1 else 1.6,
                alpha=0.35 if window > 1 else 1,
                label=None if window > 1 else label,
            )
            if window > 1:
                means = np.convolve(record.losses, np.full(window, 1 / window), "valid")
                steps = record.steps[window // 2 :][: len(means)]
                upper.plot(steps, means, color=colour, linewidth=1.8, label=label)
            points = [(evaluation.step, evaluation.loss) for evaluation in record.evaluations]
            if points:
                upper.plot(*zip(*points, strict=True), "D", markersize=4.5, color=colour)
            middle.plot(record.steps, record.speeds, color=colour, linewidth=1.2)
        means_text = f"mean of {compared.last_steps} steps" if compared.last_steps > 1 else ""
        points_text = "points are evaluations" if any(r.record.evaluations for r in runs) else ""
        canvas.add_heading(upper, "loss", ", ".join(filter(None, (means_text, points_text))))
        upper.legend(
            loc="lower left", bbox_to_anchor=(0, 1.07), ncol=4, handlelength=1.6, borderaxespad=0
        )
        canvas.add_heading(middle, "tokens/s", "")
        middle.set_ylim(bottom=0)
        middle.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        middle.yaxis.set_major_locator(MaxNLocator(nbins=3))
        middle.set_xlabel("step")
        for axes in (upper, middle):
            canvas.make_plain(axes)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10]))
        middle.set_xlim(upper.get_xlim())
        half = (canvas.WIDTH_PIXELS / canvas.DPI - canvas.LEFT_INCHES) / 2
        for place, left, right in (
            ("device", canvas.LEFT_INCHES, half + 1.0),
            ("host", canvas.LEFT_INCHES + half, 1.0),
        ):
            axes = canvas.add_axes(figure, _BOTTOM_INCHES, memory, right, left)
            sizes = [getattr(run, f"{place}_bytes") for run in compared.runs]
            _memory(axes, f"{place} memory", sizes, colours)
        canvas.save(figure, path)


def _memory(axes: Axes, name: str, sizes: Sequence[int | None], colours: Sequence[str]) -> None:
    """Draws one bar for each run, with its size."""
    axes.barh(range(len(sizes)), [size or 0 for size in sizes], height=0.6, color=colours)
    axes.set_ylim(len(sizes) - 0.5, -0.5)
    axes.set_xlim(0, max([1, *(size or 0 for size in sizes)]))
    axes.axis("off")
    for row, size in enumerate(sizes):
        text = "not measured" if size is None else format_bytes(size)
        axes.annotate(
            text, (size or 0, row), (6, 0), textcoords="offset points", va="center", fontsize=9
        )
    canvas.add_heading(axes, name, "")
