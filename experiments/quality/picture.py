"""Draws the held-out loss of variants over the steps, and its difference from `exact`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from megatrain.experiments.quality.summary import Spread, VariantSummary
from megatrain.simulator.plots import canvas

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8a949e")
_STYLES = ("o-", "s--", "^:")
"""Markers and lines. When all colours are used, variants take the next style."""
_TITLES = {"training": "Trained from random weights", "fine-tune": "Fine-tuned"}
_LOSS_INCHES, _DIFFERENCE_INCHES, _GAP_INCHES, _BOTTOM_INCHES = 2.2, 2.6, 0.55, 0.62
_BETWEEN_INCHES, _TOP_INCHES = 0.95, 1.0


def quality_png(path: Path, summaries: Sequence[VariantSummary], subtitle: str) -> None:
    """Writes a PNG with two panels for each part. The upper panel has the held-out loss of each
    variant. The lower one has the mean differences from `exact`, with bars of one standard error.

    Raises UserError if `path` cannot be written.
    """
    parts = [part for part in _TITLES if any(summary.part == part for summary in summaries)]
    variants = list(dict.fromkeys(summary.variant for summary in summaries))
    one = _LOSS_INCHES + _DIFFERENCE_INCHES + _GAP_INCHES + _BETWEEN_INCHES
    with matplotlib.rc_context(canvas.STYLE):
        figure = canvas.new_figure(
            _BOTTOM_INCHES + len(parts) * one + _TOP_INCHES - _BETWEEN_INCHES,
            "Loss on held-out text",
            subtitle,
        )
        for place, part in enumerate(reversed(parts)):
            base = _BOTTOM_INCHES + place * one
            chosen = [summary for summary in summaries if summary.part == part and summary.curve]
            lower = canvas.add_axes(figure, base, _DIFFERENCE_INCHES, 0.35)
            upper = canvas.add_axes(
                figure, base + _DIFFERENCE_INCHES + _GAP_INCHES, _LOSS_INCHES, 0.35
            )
            several = any(len(summary.seeds) > 1 for summary in chosen)
            runs = "mean over seeds" if several else "one seed"
            bars = ", bars of one standard error" if several else ""
            canvas.add_heading(upper, _TITLES[part], runs)
            canvas.add_heading(lower, "minus exact", runs + bars)
            lower.axhline(0, color=canvas.MUTED, linewidth=1)
            for summary in chosen:
                again, colour = divmod(variants.index(summary.variant), len(_COLOURS))
                style = _STYLES[again % len(_STYLES)]
                _line(upper, summary.curve, summary.variant, _COLOURS[colour], style, bars=False)
                _line(
                    lower, summary.differences, summary.variant, _COLOURS[colour], style, bars=True
                )
            for axes in (upper, lower):
                canvas.make_plain(axes)
                axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
                axes.ticklabel_format(axis="y", style="plain", useOffset=False)
            upper.tick_params(axis="x", labelbottom=False)
            lower.set_xlim(upper.get_xlim())
            lower.set_xlabel("step")
            if upper.lines:
                upper.legend(loc="upper right", ncol=4)
        canvas.save(figure, path)


def _line(
    axes: Axes,
    points: Sequence[tuple[int, Spread]],
    name: str,
    colour: str,
    style: str,
    *,
    bars: bool,
) -> None:
    if points:
        axes.errorbar(
            [step for step, _ in points],
            [spread.mean for _, spread in points],
            yerr=[spread.error or 0.0 for _, spread in points] if bars else None,
            color=colour,
            fmt=style,
            markersize=3,
            linewidth=1.3,
            capsize=2.5,
            label=name,
        )
