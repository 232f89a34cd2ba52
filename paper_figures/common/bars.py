"""Groups of bars: hatched bars of the paper's values next to plain bars of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from megatrain.paper_figures.common.style import HATCHES, INK, LOOKS, MUTED

Bar = tuple[str, float | None, str, float | None, bool]
"""(system, the paper's value, its certainty, predicted value, whether a policy can predict it). A
certainty of `none` means that the paper has no value.
"""


class BarGroup(NamedTuple):
    """Bars next to each other over one label."""

    label: str
    """The label below the bars."""
    bars: list[Bar]
    """The bars from left to right."""


def bars(axes: Axes, groups: Sequence[BarGroup]) -> None:
    """Draws the groups. The paper's values are hatched, or hollow with a dotted edge if they are
    doubtful. Predictions are filled. A cross stands for a value that is missing because the plan
    does not fit, in the paper or in the prediction.
    """
    x, ticks = 0.0, []
    top = max(
        value
        for group in groups
        for _, reported, _, predicted, _ in group.bars
        for value in (reported, predicted)
        if value is not None
    )
    for group in groups:
        start = x
        for system, reported, sure, predicted, predictable in group.bars:
            colour = LOOKS[system].colour
            if sure != "none":
                if reported is None:
                    axes.text(
                        x, 0.01 * top, "×", ha="center", va="bottom", fontsize=8, color="black"
                    )
                else:
                    axes.bar(
                        x,
                        reported,
                        0.9,
                        facecolor="white",
                        edgecolor=colour,
                        hatch="" if sure == "?" else "//////",
                        linewidth=0.8,
                        linestyle=":" if sure == "?" else "-",
                    )
                x += 1
            if predictable:
                if predicted is None:
                    axes.text(
                        x, 0.01 * top, "×", ha="center", va="bottom", fontsize=8, color=colour
                    )
                else:
                    axes.bar(
                        x,
                        predicted,
                        0.9,
                        facecolor=colour,
                        hatch=HATCHES.get(system, ""),
                        edgecolor=INK,
                        linewidth=0.4,
                    )
                    axes.text(
                        x,
                        predicted + 0.01 * top,
                        f"{predicted:.0f}",
                        ha="center",
                        va="bottom",
                        fontsize=7,
                        color=MUTED,
                        rotation=90,
                    )
                x += 1
        ticks.append(((start + x - 1) / 2, group.label))
        x += 1.2
    axes.set_xticks([place for place, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(0, 1.16 * top)
    axes.tick_params(axis="x", length=0)
