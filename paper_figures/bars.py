"""Bars: told values, hatched, beside predicted ones, in groups; what does not fit or was not told is said in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from megatrain.paper_figures.style import HATCHES, INK, LOOKS, MUTED

Bar = tuple[str, float | None, str, float | None, bool]
"""system; told; how sure (`none`: the paper says nothing of it); predicted; whether it can be predicted at all"""


class Group(NamedTuple):
    """Bars side by side over one label."""

    label: str
    bars: list[Bar]


def bars(axes: Axes, groups: Sequence[Group]) -> None:
    """Told: hatched, hollow within a dotted line where doubtful. Predicted: plain. A cross where told or predicted not to fit, a dash without a policy."""
    x, ticks = 0.0, []
    top = max(value for group in groups for _, told, _, predicted, _ in group.bars for value in (told, predicted) if value is not None)
    for group in groups:
        start = x
        for system, told, sure, predicted, predictable in group.bars:
            colour = LOOKS[system].colour
            if sure != "none":
                if told is None:
                    axes.text(x, 0.01 * top, "×", ha="center", va="bottom", fontsize=8, color="black")
                else:
                    axes.bar(
                        x,
                        told,
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
                    axes.text(x, 0.01 * top, "×", ha="center", va="bottom", fontsize=8, color=colour)
                else:
                    axes.bar(x, predicted, 0.9, facecolor=colour, hatch=HATCHES.get(system, ""), edgecolor=INK, linewidth=0.4)
                    axes.text(x, predicted + 0.01 * top, f"{predicted:.0f}", ha="center", va="bottom", fontsize=7, color=MUTED, rotation=90)
                x += 1
        ticks.append(((start + x - 1) / 2, group.label))
        x += 1.2
    axes.set_xticks([place for place, _ in ticks], [label for _, label in ticks])
    axes.set_ylim(0, 1.16 * top)
    axes.tick_params(axis="x", length=0)
