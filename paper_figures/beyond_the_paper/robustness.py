"""Robust or fragile: which conclusions of the page hold when an input changes."""

from __future__ import annotations

import msgspec

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.common.table import Drawn, TableRow

HOLDS, BROKEN, UNTRIED = "#cfe3f2", "#D55E00", "#ffffff"


class StoredConclusion(msgspec.Struct, frozen=True, kw_only=True):
    """A statement of the page."""

    name: str
    """The statement."""
    unit: str
    """The unit of its number: `%`, `x` (a ratio) or `GB` (memory to spare)."""


class Tried(msgspec.Struct, frozen=True, kw_only=True):
    """The conclusions under one perturbation, in the order of `Robustness.conclusions`. None means
    that a conclusion was not tried with it.
    """

    name: str
    """The perturbation."""
    values: list[float | None]
    """The number of each conclusion."""
    holds: list[bool | None]
    """Whether each conclusion holds."""


class Robustness(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/robustness.py` stores."""

    conclusions: list[StoredConclusion]
    """All conclusions."""
    perturbations: list[Tried]
    """All perturbations. The first one changes nothing."""


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """A conclusion over all perturbations."""

    name: str
    """The statement."""
    value: str
    """Its number as predicted, with the unit."""
    least: str
    """The least number of all perturbations."""
    most: str
    """The largest number of all perturbations."""
    tried: int
    """The number of perturbations with which it was tried."""
    broken_by: list[str]
    """The perturbations with which it does not hold."""

    @property
    def verdict(self) -> str:
        """Returns `robust` if no perturbation breaks it, and `fragile` otherwise."""
        return "fragile" if self.broken_by else "robust"


def judged(data: Robustness) -> list[Judged]:
    """Returns each conclusion with its verdict."""
    first, *others = data.perturbations
    found = []
    for index, conclusion in enumerate(data.conclusions):
        values = [
            value for tried in data.perturbations if (value := tried.values[index]) is not None
        ]
        named = [tried for tried in others if tried.holds[index] is not None]
        found.append(
            Judged(
                name=conclusion.name,
                value=_text(first.values[index] or 0, conclusion.unit),
                least=_text(min(values), conclusion.unit),
                most=_text(max(values), conclusion.unit),
                tried=len(named),
                broken_by=[tried.name for tried in named if not tried.holds[index]],
            )
        )
    return found


def _text(value: float, unit: str) -> str:
    if unit == "%":
        return f"{value:+.0f} %"
    return f"{value:.2f}" if unit == "x" else f"{value:+,.0f} GB spare"


def table(results: Results) -> str:
    """Returns the conclusions as a table in Markdown."""
    data, _ = results.typed("robustness", Robustness)
    lines = [
        "| conclusion | predicted | least to most | verdict | broken by |",
        "|---|---|---|---|---|",
    ]
    for entry in judged(data):
        lines.append(
            f"| {entry.name} | {entry.value} | {entry.least} to {entry.most} | {entry.verdict},"
            f" holds in {entry.tried - len(entry.broken_by)} of {entry.tried} |"
            f" {'; '.join(entry.broken_by)} |"
        )
    return "\n".join(lines)


def draw(results: Results) -> Drawn:
    data, date = results.typed("robustness", Robustness)
    conclusions = judged(data)
    figure, axes = style.canvas(style.PAGE, 5.6)
    others = data.perturbations[1:]
    for row, conclusion in enumerate(conclusions):
        for column, tried in enumerate(others):
            holds = tried.holds[row]
            colour = UNTRIED if holds is None else HOLDS if holds else BROKEN
            axes.barh(row, 1, 1, column - 0.5, color=colour, edgecolor="white", linewidth=0.8)
            if holds is False:
                axes.plot([column], [row], marker="x", color="white", markersize=4)
        axes.text(
            len(others) - 0.3,
            row,
            conclusion.verdict,
            fontsize=7,
            va="center",
            fontweight="bold" if conclusion.broken_by else "normal",
        )
    axes.set_ylim(len(conclusions) - 0.5, -0.5)
    axes.set_xlim(-0.5, len(others) + 2.6)
    axes.set_yticks(
        range(len(conclusions)), [conclusion.name for conclusion in conclusions], fontsize=7
    )
    axes.set_xticks(range(len(others)), [tried.name for tried in others], rotation=90, fontsize=7)
    axes.tick_params(length=0)
    axes.set_title("does it hold? (dark, x: no; white: not tried)")
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    rows = [
        TableRow(
            item=conclusion.name,
            quantity=f"with {tried.name}",
            unit=stored.unit,
            published_code=tried.values[index],
            note={True: "holds", False: "does not hold", None: "not tried"}[tried.holds[index]],
        )
        for index, (conclusion, stored) in enumerate(
            zip(conclusions, data.conclusions, strict=True)
        )
        for tried in data.perturbations
    ]
    robust = [conclusion for conclusion in conclusions if not conclusion.broken_by]
    return Drawn(
        figure,
        rows,
        "Robust or fragile",
        claim="None: the paper varies no input.",
        finding=(
            f"{len(robust)} of {len(conclusions)} conclusions hold under all of the"
            f" {len(others)} perturbations. The table above names what breaks the others. Two"
            " depend on the speed of DeepSpeed's CPU Adam on an Arm processor, which nobody"
            " reported: whether ZeRO-3 or MegaTrain is faster on a GH200 with filled batches, and"
            " which unequal batches give 1.84. Whether the code holds 120B in 1.5 TB depends on the"
            " meaning of 1.5 TB and on the version of the code."
        ),
        caption=(
            f"Predictions of {date}, one input changed at a time: a rate of every machine, a rate"
            " of the GH200, or an assumption of experiments/published/settings.toml."
        ),
    )
