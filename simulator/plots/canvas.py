"""Provides the common style of all pictures: size, fonts, colours, title and headings.

Pictures are PNG files. A file is either written completely or not at all.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatrain.simulator.base.files import write_bytes

WIDTH_PIXELS, DPI = 1600, 150
"""Width of every picture, and its pixels per inch."""
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "text.color": "#1f2933",
    "axes.labelcolor": "#52606d",
    "axes.edgecolor": "#9aa5b1",
    "axes.linewidth": 0.8,
    "xtick.color": "#52606d",
    "ytick.color": "#1f2933",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 9.0,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "grid.color": "#d9dee3",
    "grid.linewidth": 0.6,
}
"""matplotlib's settings for every picture."""
SWATCHES: Any = {"handlelength": 1.1, "handleheight": 1.0, "borderaxespad": 0}
"""Arguments of legends whose entries are small squares of a colour."""
INK, MUTED, ALARM, ROW = "#1f2933", "#66727f", "#b3261e", "#f3f5f7"
"""Colours of text, of less important text, of errors, and of the background of a row."""
LEFT_INCHES = 0.95
"""Distance of a panel from the left edge of the picture, in inches. The names of the panel's rows
are in this space."""


def new_figure(height_inches: float, title: str, subtitle: str) -> Figure:
    """Returns a figure that has only a title and a subtitle, at the top left.

    Their distance from the top edge does not depend on the height of the figure.
    """
    figure = Figure(figsize=(WIDTH_PIXELS / DPI, height_inches), dpi=DPI)
    for text, down, size, weight, colour in (
        (title, 0.14, 13, "bold", INK),
        (subtitle, 0.42, 9.5, "normal", MUTED),
    ):
        figure.text(
            0.14 / (WIDTH_PIXELS / DPI),
            1 - down / height_inches,
            text,
            ha="left",
            va="top",
            fontsize=size,
            fontweight=weight,
            color=colour,
        )
    return figure


def add_axes(
    figure: Figure, base: float, height: float, right: float, left: float = LEFT_INCHES
) -> Axes:
    """Adds axes to the figure and returns them.

    All arguments are in inches. `height` is the height of the axes, `base` is their distance from
    the lower edge, and `left` and `right` are their distances from the left and the right edge.
    """
    width, total = WIDTH_PIXELS / DPI, figure.get_figheight()
    return figure.add_axes((left / width, base / total, 1 - (left + right) / width, height / total))


def add_heading(axes: Axes, name: str, text: str, colour: str = INK) -> None:
    """Adds a heading above a panel: `name` in bold at the left, and `text` at the right."""
    axes.annotate(
        name,
        (0, 1),
        (0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        va="baseline",
        ha="left",
        fontsize=10.5,
        fontweight="bold",
    )
    axes.annotate(
        text,
        (1, 1),
        (0, 7),
        xycoords="axes fraction",
        textcoords="offset points",
        va="baseline",
        ha="right",
        fontsize=10,
        color=colour,
    )


def add_column_names(axes: Axes, columns: Mapping[str, float]) -> None:
    """Adds the names of text columns to the right of a panel. Each name is aligned to the right.

    `columns` maps a name to the distance of the column's right edge from the panel, as a multiple
    of the panel's width.
    """
    for name, place in columns.items():
        axes.annotate(
            name,
            (1 + place, 1),
            (0, 7),
            xycoords="axes fraction",
            textcoords="offset points",
            ha="right",
            color=MUTED,
            fontsize=8.5,
        )


def make_plain(axes: Axes) -> None:
    """Gives the axes two spines, and horizontal grid lines behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="y")
    axes.tick_params(length=3)


def save(figure: Figure, path: Path) -> None:
    """Writes the figure as PNG. Equal figures give equal bytes.

    Raises UserError if `path` cannot be written.
    """
    write_bytes(path, file_bytes(figure, format="png", dpi=DPI, metadata={"Software": None}))


def file_bytes(figure: Figure, **options: Any) -> bytes:
    """Returns the bytes of the figure's file. `options` are those of `Figure.savefig`.

    Letters that the font lacks are no warning, because names of models and folders may have them.
    """
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
        figure.savefig(picture, **options)
    return picture.getvalue()
