"""Draws the loss of a run over its steps, with learning rate, gradient norm and speed below it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megatrain.simulator.plots import canvas

_STEP, _SMOOTH, _EVALUATION = "#9cc4e6", "#1f5f9e", "#d0601a"
_LOSS_INCHES, _PANEL_INCHES, _GAP_INCHES, _BOTTOM_INCHES = 3.4, 0.85, 0.46, 0.62


def loss_png(
    path: Path,
    steps: Sequence[int],
    losses: Sequence[float],
    rates: Sequence[float],
    norms: Sequence[float | None],
    tokens_per_second: Sequence[float],
    title: str,
    subtitle: str = "",
    evaluations: Sequence[tuple[int, float]] = (),
    window: int = 0,
) -> None:
    """Draws the loss of a run over its steps, and below it learning rate, gradient norm and speed.

    Args:
        path: The PNG file to write.
        steps: Number of each step.
        losses: Loss of each step.
        rates: Learning rate of each step.
        norms: Gradient norm of each step. If all are None, the panel is left out.
        tokens_per_second: Tokens per second of each step.
        title: Title of the picture.
        subtitle: Text below the title.
        evaluations: Step and loss of each evaluation, drawn as points.
        window: Number of steps of the running mean of the loss. 0 draws no running mean.

    Raises ValueError if there are no steps or if the sequences differ in length, and UserError if
    `path` cannot be written.
    """
    columns = [losses, rates, norms, tokens_per_second]
    if not steps or {len(steps)} != {len(column) for column in columns}:
        raise ValueError(
            f"{path.name}: {len(steps)} steps, {len(losses)} losses, {len(rates)} rates,"
            f" {len(norms)} norms, {len(tokens_per_second)} speeds; there must be as many of each,"
            " and at least one"
        )
    marker = "o" if len(steps) < 30 else ""
    known = [(step, norm) for step, norm in zip(steps, norms, strict=True) if norm is not None]
    text = f"highest {_rate(max(rates))}, last {_rate(rates[-1])}"
    lower = [("learning rate", steps, rates, _rate, "#7b3f98", text)]
    if known:
        values = [norm for _, norm in known]
        text = f"median {statistics.median(values):.3g}, largest {max(values):.3g}"
        lower.append(
            ("gradient norm", [step for step, _ in known], values, "{:.3g}".format, "#66727f", text)
        )
    speed = f"median {statistics.median(tokens_per_second):,.1f}"
    lower.append(("tokens/s", steps, tokens_per_second, "{:,.6g}".format, "#2e9e6b", speed))
    with matplotlib.rc_context(canvas.STYLE):
        base = _BOTTOM_INCHES + len(lower) * (_PANEL_INCHES + _GAP_INCHES)
        top = 1.02 if subtitle else 0.76
        figure = canvas.new_figure(base + _LOSS_INCHES + top, title, subtitle)
        upper = canvas.add_axes(figure, base, _LOSS_INCHES, 0.35)
        _loss(upper, steps, losses, evaluations, window, marker)
        panels = [upper]
        for number, (name, x, y, form, colour, text) in enumerate(reversed(lower)):
            base = _BOTTOM_INCHES + number * (_PANEL_INCHES + _GAP_INCHES)
            axes = canvas.add_axes(figure, base, _PANEL_INCHES, 0.35)
            axes.plot(x, y, marker=marker, markersize=3, color=colour, linewidth=1.2)
            axes.set_ylim(0, 1.2 * max(y) or 1)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _, form=form: form(value)))
            axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
            canvas.add_heading(axes, name, text)
            panels.insert(1, axes)
        margin = 0.02 * (steps[-1] - steps[0]) or 1
        for axes in panels:
            canvas.make_plain(axes)
            axes.set_xlim(steps[0] - margin, steps[-1] + margin)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10]))
            axes.tick_params(axis="x", labelbottom=axes is panels[-1])
        panels[-1].set_xlabel("step")
        canvas.save(figure, path)


def _loss(
    axes: Axes,
    steps: Sequence[int],
    losses: Sequence[float],
    evaluations: Sequence[tuple[int, float]],
    window: int,
    marker: str,
) -> None:
    """Draws the loss of each step, its running mean and the evaluations, with a legend."""
    axes.plot(
        steps,
        losses,
        marker=marker,
        markersize=4,
        color=_STEP if window else _SMOOTH,
        linewidth=0.8 if window else 1.6,
        label="each step",
    )
    if window:
        means = np.convolve(losses, np.full(window, 1 / window), "valid")
        axes.plot(
            steps[window // 2 :][: len(means)],
            means,
            color=_SMOOTH,
            linewidth=1.8,
            label=f"mean of {window} steps",
        )
    text = f"last {losses[-1]:.4f}"
    if window:
        text += f", mean of the last {window} steps {statistics.fmean(losses[-window:]):.4f}"
    if evaluations:
        axes.plot(
            *zip(*evaluations, strict=True),
            marker="D",
            markersize=4.5,
            color=_EVALUATION,
            linewidth=1.0,
            label="evaluation",
        )
        text += f", evaluation {evaluations[-1][1]:.4f}"
    canvas.add_heading(axes, "loss", text)
    if len(axes.lines) > 1:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(0.05, 1.0),
            ncol=3,
            handlelength=1.6,
            columnspacing=1.6,
            borderaxespad=0.1,
        )


def _rate(value: float) -> str:
    return f"{value:.3g}".replace("e-0", "e-")
