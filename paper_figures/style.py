"""Style: sizes, fonts and marks of every figure. For a two-column page; safe for colour-blind readers (Okabe and Ito's colours), and readable in grey,
because systems also differ in marker and line.

What a paper tells is black, filled where it is sure and hollow where it is doubtful. What we predict has its system's colour. What we measured is a star.
What does not fit is a cross in the band below the axis's zero.
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

from megatrain.simulator.files import write_bytes

COLUMN, PAGE = 3.3, 6.9
"""inches: one column, and both"""
INK, MUTED, GRID = "#1f2933", "#5b6670", "#d9dee3"
RC: Any = {
    "font.family": "DejaVu Sans", "font.size": 7.5, "axes.titlesize": 8.0, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.labelsize": 7.5,
    "xtick.labelsize": 7.0, "ytick.labelsize": 7.0, "legend.fontsize": 7.0, "legend.frameon": False, "legend.handlelength": 2.4, "legend.columnspacing": 1.2,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7, "axes.edgecolor": MUTED, "text.color": INK, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.axisbelow": True, "grid.color": GRID, "grid.linewidth": 0.5, "lines.linewidth": 1.2, "lines.markersize": 4.5,
    "pdf.fonttype": 42, "savefig.dpi": 220, "figure.dpi": 110, "hatch.linewidth": 0.5, "figure.constrained_layout.use": True,
}  # fmt: skip


PLATE: Any = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}
"""behind text that stands on a bar"""


class Look(NamedTuple):
    """How one system is drawn."""

    label: str
    colour: str
    marker: str
    line: Any


LOOKS = {
    "paper_schedule": Look("paper's schedule", "#E69F00", "s", (0, (5, 2))), "code": Look("MegaTrain's code", "#0072B2", "o", "-"),
    "ours": Look("ours, best plan", "#009E73", "D", "-"), "zero3_offload": Look("ZeRO-3 offload", "#D55E00", "^", (0, (1, 1.2))),
    "fsdp2_offload": Look("FSDP2 offload", "#CC79A7", "v", (0, (5, 1.5, 1, 1.5))), "zero_offload": Look("ZeRO-Offload", "#56B4E9", "P", (0, (3, 1))),
    "gemini": Look("Gemini", "#8a949e", "X", "-"),
}  # fmt: skip
LOOKS["megatrain_code"] = LOOKS["code"]
HATCHES = {"ours": "\\\\\\", "zero3_offload": "---"}
"""of bars that are alike in grey"""


def canvas(width: float, height: float, **grid: Any) -> tuple[Figure, Any]:
    """A figure and its axes; `grid` as in `Figure.subplots`. Call within `matplotlib.rc_context(RC)`."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(**grid)


def plain(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y")
    axes.tick_params(length=2.5)


def told(axes: Axes, x: Sequence[float], y: Sequence[float], sure: Sequence[str], marker: str) -> None:
    """Points of the paper; `?` hollow."""
    for place, value, how in zip(x, y, sure, strict=True):
        axes.plot([place], [value], marker=marker, color="black", markerfacecolor="none" if how == "?" else "black", markersize=5, linestyle="none", zorder=6)


def predicted(axes: Axes, x: Sequence[float], y: Sequence[float | None], system: str, **more: Any) -> None:
    """A line of predictions in the system's look; None breaks it."""
    look = LOOKS[system]
    values = [float("nan") if value is None else value for value in y]
    axes.plot(x, values, color=look.colour, marker=look.marker, linestyle=look.line, markersize=3.2, zorder=3, **more)


def measured(axes: Axes, x: Sequence[float], y: Sequence[float], system: str) -> None:
    axes.plot(x, y, marker="*", markersize=9, linestyle="none", markerfacecolor=LOOKS[system].colour, markeredgecolor="black", markeredgewidth=0.6, zorder=7)


def no_room(axes: Axes, x: Sequence[float], row: int, rows: int, colour: str) -> None:
    """Crosses in row `row` of a band below zero, for what does not fit. All of one axes's calls name the same `rows`."""
    low, high = axes.get_ylim()
    if low >= 0:
        low = -0.055 * rows * high
        axes.set_ylim(low, high)
        axes.axhspan(low, 0, color="#f0f2f4", zorder=0, linewidth=0)
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= high])
    axes.plot(x, [low * (row + 0.5) / rows] * len(x), marker="x", markersize=4, linestyle="none", color=colour, zorder=5, markeredgewidth=1.2)


def handles(systems: Sequence[str], *, paper: bool = True, stars: bool = False, crosses: bool = False) -> list[Line2D]:
    """Legend entries."""
    made = [
        Line2D([], [], color=LOOKS[name].colour, marker=LOOKS[name].marker, linestyle=LOOKS[name].line, markersize=3.2, label=LOOKS[name].label)
        for name in systems
    ]
    if paper:
        made.append(Line2D([], [], color="black", marker="o", linestyle="none", label="told by the paper"))
        made.append(Line2D([], [], color="black", marker="o", markerfacecolor="none", linestyle="none", label="told, doubtful"))
    if stars:
        made.append(Line2D([], [], color="none", marker="*", markersize=8, markerfacecolor="white", markeredgecolor="black", label="measured"))
    if crosses:
        made.append(Line2D([], [], color=INK, marker="x", linestyle="none", markersize=4, label="does not fit (black: told)"))
    return made


def legend(figure: Figure, entries: Sequence[Any], columns: int) -> None:
    figure.legend(handles=list(entries), loc="outside lower center", ncols=columns)


def footer(figure: Figure, text: str) -> None:
    """Machine and date, so that the picture says them wherever it goes."""
    figure.suptitle(text, x=0.01, ha="left", fontsize=7, color=MUTED, fontweight="normal")


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """`NAME.png` and `NAME.pdf` in `folder`, the same bytes every time."""
    paths = []
    with matplotlib.rc_context(RC):
        for kind, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None, "Producer": None, "Creator": None})):
            picture = io.BytesIO()
            if kind == "pdf":
                FigureCanvasPdf(figure).print_pdf(picture, metadata=metadata)
            else:
                figure.savefig(picture, format=kind, metadata=metadata)
            write_bytes(path := folder / f"{name}.{kind}", picture.getvalue())
            paths.append(path)
    return paths


def bar_handles(systems: Sequence[str]) -> list[Patch]:
    """Legend entries of `bars`."""
    made = [Patch(facecolor=LOOKS[name].colour, hatch=HATCHES.get(name, ""), edgecolor=INK, linewidth=0.4, label=LOOKS[name].label) for name in systems]
    return [
        *made,
        Patch(facecolor="white", edgecolor=INK, hatch="//////", label="told (hollow, dotted: doubtful)"),
        Patch(facecolor="none", edgecolor="none", label="×  does not fit"),
    ]
