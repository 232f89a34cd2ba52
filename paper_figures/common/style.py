"""Sizes, fonts and marks of every figure, for a page with two columns. Colour-blind readers can
tell the colours apart (Okabe and Ito's palette). The figures are also readable in grey, because
systems have different markers and lines.

In figures with points, the paper's values are black: filled if they are certain, hollow if they are
doubtful, grey if an assumption was chosen by them, and with an arrow if they are lower bounds. In
figures with bars, the paper's values are hatched. Predictions have their system's colour.
Measurements are stars. A plan that does not fit is a cross in the band below zero.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from megatrain.simulator.base.files import write_bytes

COLUMN, PAGE = 3.3, 6.9
"""Widths in inches of one column and of both."""
INK, MUTED, GRID = "#1f2933", "#5b6670", "#d9dee3"
RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "text.color": INK,
    "axes.titlesize": 8.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 7.5,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.7,
    "axes.edgecolor": MUTED,
    "axes.axisbelow": True,
    "xtick.labelsize": 7.0,
    "xtick.color": INK,
    "ytick.labelsize": 7.0,
    "ytick.color": INK,
    "legend.fontsize": 7.0,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.2,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.2,
    "lines.markersize": 4.5,
    "hatch.linewidth": 0.5,
    "pdf.fonttype": 42,
    "savefig.dpi": 220,
    "figure.dpi": 110,
    "figure.constrained_layout.use": True,
}


PLATE: Any = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
"""The background of text that stands on a bar."""


INPUT, BOUND = "input", "bound"
"""Values of `sure` in `reported`: a value by which an assumption was chosen, and a lower bound."""


class Look(NamedTuple):
    """How one system is drawn."""

    label: str
    """Its name in legends."""
    colour: str
    """Its colour, such as `#0072B2`."""
    marker: str
    """Matplotlib's marker."""
    line: Any
    """Matplotlib's line style."""


LOOKS = {
    "paper_stated": Look("paper's schedule, 12 B", "#E69F00", "s", (0, (5, 2))),
    "paper_schedule": Look("paper's, fp32 master", "#7a5200", "p", (0, (2, 1))),
    "code": Look("MegaTrain's code 80d3012", "#0072B2", "o", "-"),
    "ours": Look("ours, best plan", "#009E73", "D", "-"),
    "zero3_offload": Look("ZeRO-3 offload", "#D55E00", "^", (0, (1, 1.2))),
    "fsdp2_offload": Look("FSDP2 offload", "#CC79A7", "v", (0, (5, 1.5, 1, 1.5))),
    "zero_offload": Look("ZeRO-Offload", "#56B4E9", "P", (0, (3, 1))),
    "gemini": Look("Gemini", "#8a949e", "X", "-"),
}
LOOKS["megatrain_code"] = LOOKS["code"]
HATCHES = {"ours": "\\\\\\", "zero3_offload": "---", "paper_schedule": "xxxx"}
"""Hatches of bars that look alike in grey."""


def canvas(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    """Returns a figure of `width` x `height` inches and its axes. `grid` has the arguments of
    `Figure.subplots`. Call it within `matplotlib.rc_context(RC)`.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**grid)


def plain(axes: Axes, title: str, x: str, y: str) -> None:
    """Gives axes a title, labels and horizontal grid lines."""
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y")
    axes.tick_params(length=2.5)


def reported(
    axes: Axes, x: Sequence[float], y: Sequence[float], sure: Sequence[str], marker: str
) -> None:
    """Draws points of the paper. A certainty of `?` makes a point hollow, INPUT makes it grey, and
    BOUND adds an arrow upwards.
    """
    for place, value, how in zip(x, y, sure, strict=True):
        axes.plot(
            [place],
            [value],
            marker=marker,
            color="black",
            markerfacecolor={"?": "none", INPUT: "#b8c0c8"}.get(how, "black"),
            markersize=5,
            linestyle="none",
            zorder=6,
        )
        if how == BOUND:
            axes.annotate(
                "",
                (place, value + 0.1 * axes.get_ylim()[1]),
                (place, value),
                arrowprops={"arrowstyle": "->", "color": "black", "linewidth": 1.0},
                zorder=6,
            )


def predicted(
    axes: Axes, x: Sequence[float], y: Sequence[float | None], system: str, **more: Any
) -> None:
    """Draws a line of predictions with the system's look. None breaks the line."""
    look = LOOKS[system]
    values = [float("nan") if value is None else value for value in y]
    axes.plot(
        x,
        values,
        color=look.colour,
        marker=look.marker,
        linestyle=look.line,
        markersize=3.2,
        zorder=3,
        **more,
    )


def measured(axes: Axes, x: Sequence[float], y: Sequence[float], system: str) -> None:
    """Draws measured points as stars in the system's colour."""
    axes.plot(
        x,
        y,
        marker="*",
        markersize=9,
        linestyle="none",
        markerfacecolor=LOOKS[system].colour,
        markeredgecolor="black",
        markeredgewidth=0.6,
        zorder=7,
    )


def no_room(axes: Axes, x: Sequence[float], row: int, rows: int, colour: str) -> None:
    """Draws crosses in row `row` of a band below zero, for plans that do not fit. The band has
    `rows` rows, the same number in all calls for one axes.
    """
    low, high = axes.get_ylim()
    if low >= 0:
        low = -0.055 * rows * high
        axes.set_ylim(low, high)
        axes.axhspan(low, 0, color="#f0f2f4", zorder=0, linewidth=0)
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= high])
    axes.plot(
        x,
        [low * (row + 0.5) / rows] * len(x),
        marker="x",
        markersize=4,
        linestyle="none",
        color=colour,
        zorder=5,
        markeredgewidth=1.2,
    )


def handles(
    systems: Sequence[str],
    *,
    paper: bool = True,
    doubtful: bool = False,
    inputs: bool = False,
    stars: bool = False,
    crosses: bool = False,
) -> list[Line2D]:
    """Returns legend entries of systems and, if True, of the paper's values (`paper`), its doubtful
    values, its values that are inputs, stars and crosses.
    """
    entries = [
        Line2D(
            [],
            [],
            color=LOOKS[name].colour,
            marker=LOOKS[name].marker,
            linestyle=LOOKS[name].line,
            markersize=3.2,
            label=LOOKS[name].label,
        )
        for name in systems
    ]
    entries += [
        Line2D(
            [], [], color="black", marker="o", markerfacecolor=face, linestyle="none", label=label
        )
        for wanted, face, label in (
            (paper, "black", "the paper's value"),
            (doubtful, "none", "the paper's, doubtful"),
            (inputs, "#b8c0c8", "the paper's, an input here"),
        )
        if wanted
    ]
    if stars:
        entries.append(
            Line2D(
                [],
                [],
                color="none",
                marker="*",
                markersize=8,
                markerfacecolor="white",
                markeredgecolor="black",
                label="measured",
            )
        )
    if crosses:
        entries.append(
            Line2D(
                [],
                [],
                color=INK,
                marker="x",
                linestyle="none",
                markersize=4,
                label="does not fit (black: paper)",
            )
        )
    return entries


def legend(figure: Figure, entries: Sequence[Any], columns: int) -> None:
    """Adds a legend below the figure."""
    figure.legend(handles=list(entries), loc="outside lower center", ncols=columns)


def caption(figure: Figure, text: str) -> None:
    """Writes machines and dates above the figure, so they are part of the picture."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=7, color=MUTED, fontweight="normal")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes `NAME.png` and `NAME.pdf` into `folder` and returns their paths. The same figure
    always gives the same bytes.
    """
    paths = []
    with matplotlib.rc_context(RC):
        for kind, metadata in (
            ("png", {"Software": None}),
            ("pdf", {"CreationDate": None, "Producer": None, "Creator": None}),
        ):
            picture = io.BytesIO()
            if kind == "pdf":
                FigureCanvasPdf(figure).print_pdf(picture, metadata=metadata)
            else:
                figure.savefig(picture, format=kind, metadata=metadata)
            write_bytes(path := folder / f"{name}.{kind}", picture.getvalue())
            paths.append(path)
    return paths


def bar_handles(systems: Sequence[str], *, doubtful: bool = False) -> list[Patch]:
    """Returns legend entries of `bars`. `doubtful` says whether the paper has doubtful values."""
    label = "the paper's (dotted: doubtful)" if doubtful else "the paper's value"
    entries = [
        Patch(
            facecolor=LOOKS[name].colour,
            hatch=HATCHES.get(name, ""),
            edgecolor=INK,
            linewidth=0.4,
            label=LOOKS[name].label,
        )
        for name in systems
    ]
    return [
        *entries,
        Patch(facecolor="white", edgecolor=INK, hatch="//////", label=label),
        Patch(facecolor="none", edgecolor="none", label="×  does not fit"),
    ]
