"""Draws a sweep's plans by device memory and time, with one marker for each policy and a line
through the Pareto front. The bytes of the PNG and the PDF depend only on the rows.

Markers of later policies are smaller, so plans at the same place can all be seen. If there is room,
points are labelled with settings that differ between the plans, such as the batch.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import cycle
from pathlib import Path
from typing import Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.legend import Legend
from matplotlib.transforms import Bbox

from megatrain.experiments.sweep.front import LEAST_GAIN, front
from megatrain.experiments.sweep.store import SweepRow
from megatrain.experiments.sweep.table import settings
from megatrain.simulator.base.files import write_bytes
from megatrain.simulator.base.names import short_paths
from megatrain.simulator.plots.canvas import DPI, INK, MUTED, STYLE, file_bytes

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#8a949e")
# There is one more mark than colours, so 56 policies look different.
_MARKS = ("o", "D", "s", "^", "v", "P", "X", "<")
_MANY = 400  # with more rows, points are smaller and paler
_PLACES: tuple[tuple[tuple[int, int], Literal["left", "right"]], ...] = (
    ((8, 5), "left"),
    ((-8, 5), "right"),
    ((-8, -14), "right"),
    ((8, -14), "left"),
)
"""Places of a label: its shift from the point in typographic points, and its horizontal alignment.
"""
_LABELLED = 30  # with more rows, only points of the front are labelled
_CLOSE_PIXELS = 50
_LABEL_KEYS = 3  # most settings in a label
_LABEL_ROOM = 0.08  # height of a label and its distance from its point, as a share of all points'
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


def draw(rows: Sequence[SweepRow], stem: Path, title: str, caption: str) -> list[Path]:
    """Writes `STEM.png` and `STEM.pdf` of the timed rows, and returns the paths. `caption` says how
    and when the sweep was made. If the rows differ in tokens per step, the time is that of a
    million tokens. The Pareto front is that of the table: each of its plans is faster than the one
    before by more than `LEAST_GAIN`.
    """
    timed, best = [row for row in rows if row.timed], front(rows, LEAST_GAIN)
    one_step = len({row.workload.step_tokens for row in timed}) == 1
    scale = timed[0].workload.step_tokens if one_step else 1e6

    def points(chosen: Sequence[SweepRow]) -> tuple[list[float], list[float]]:
        return [row.device_peak_bytes / 2**30 for row in chosen], [
            row.seconds_per_token * scale for row in chosen
        ]

    with matplotlib.rc_context(STYLE):
        figure = Figure(
            figsize=(8.0, 5.0), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08), dpi=DPI
        )
        axes = figure.subplots()
        few = len(timed) <= _MANY
        policies = _names_of({row.policy for row in timed})
        x, y = points(best)
        label = f"Pareto front, each plan at least {LEAST_GAIN:.0%} faster"
        axes.step(x, y, where="post", color=INK, linewidth=1.1, label=label, zorder=2)
        # Not strict, because the cycles are endless.
        for place, ((policy, name), colour, mark) in enumerate(
            zip(policies.items(), cycle(_COLOURS), cycle(_MARKS))
        ):
            size = 5 * 1.6 ** max(min(len(policies), 3) - 1 - place, 0) if few else 3
            x, y = points([row for row in timed if row.policy == policy])
            axes.plot(
                x,
                y,
                linestyle="none",
                marker=mark,
                color=colour,
                markersize=size,
                alpha=1 if few else 0.35,
                markeredgewidth=0.6 if few else 0,
                markeredgecolor="white",
                label=name,
                rasterized=not few,
                zorder=3 + 0.1 * place,
            )
            x, y = points([row for row in best if row.policy == policy])
            axes.plot(
                x,
                y,
                linestyle="none",
                marker=mark,
                color=colour,
                markeredgecolor=INK,
                markeredgewidth=1.0,
                markersize=size if few else 6.5,
                zorder=3.05 + 0.1 * place,
            )
        timed_at = list(zip(*points(timed), strict=True))
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:,g}")
        axes.tick_params(axis="y", which="both", labelsize=8)
        axes.grid(which="both", axis="y")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(0, 1.1 * max(points(timed)[0]))
        least, most = min(points(timed)[1]), max(points(timed)[1])
        # Room for a label below the fastest.
        axes.set_ylim(bottom=least * min(0.87, (least / most) ** _LABEL_ROOM))
        axes.set_xlabel("device memory (GiB)")
        axes.set_ylabel("seconds per step" if one_step else "seconds for a million tokens")
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=22)
        axes.annotate(
            caption,
            (0, 1),
            (0, 8),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=8.5,
            color=MUTED,
        )
        for entry in _legend(figure, axes).legend_handles:
            if entry is not None:
                entry.set_alpha(1)
        # The fastest plans come first, because there may be no room for all labels.
        shown = [*reversed(best), *(timed if len(timed) <= _LABELLED else ())]
        _label(axes, list(zip(*points(shown), _labels(shown, timed), strict=True)), timed_at)
        return [_save(figure, stem, kind) for kind in ("png", "pdf")]


def _names_of(policies: Set[str]) -> dict[str, str]:
    """Returns policy -> its name in the legend, sorted by policy. The name of a file is the
    shortest end of its path.
    """
    files = sorted(policy for policy in policies if policy.endswith(".py"))
    short = dict(zip(files, short_paths(files), strict=True))
    return {policy: short.get(policy, policy) for policy in sorted(policies)}


def _legend(figure: Figure, axes: Axes) -> Legend:
    """Adds a legend with the most columns, of at most five, for which the figure is wide enough.
    The layout of the figure is final then.
    """
    entries, names = axes.get_legend_handles_labels()
    for columns in range(min(len(names), 5), 0, -1):
        legend = figure.legend(entries, names, loc="outside lower center", ncols=columns)
        figure.draw_without_rendering()
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    return legend


def _label(
    axes: Axes, labels: Sequence[tuple[float, float, str]], points: Sequence[tuple[float, float]]
) -> None:
    """Writes labels (x, y, text) next to their points, in their order.

    A label is left out if it would cover another label or a point at each of its places. It is also
    left out if its point is close to another point with a label, because it would be unclear to
    which point it belongs.

    The layout of the figure must be final.
    """
    taken: list[Bbox] = []
    marks = [Bbox.from_extents(*at, *at).padded(4) for at in axes.transData.transform(points)]
    bounds, named = axes.get_window_extent(), list[Bbox]()
    left, right, bottom = bounds.x0 - 10, bounds.x1 + 10, bounds.y0  # below, it covers the axis
    for x, y, text in dict.fromkeys(labels):
        at = axes.transData.transform((x, y))
        around = Bbox.from_extents(*at, *at).padded(_CLOSE_PIXELS)
        if any(around.overlaps(other) for other in named):
            continue
        for shift, side in _PLACES:
            note = axes.annotate(
                text,
                (x, y),
                shift,
                textcoords="offset points",
                ha=side,
                fontsize=8,
                color=MUTED,
                zorder=5,
            )
            note.set_in_layout(False)
            box = note.get_window_extent()
            free = not any(box.overlaps(other) for other in (*taken, *marks))
            if free and left <= box.x0 and box.x1 <= right and bottom <= box.y0:
                taken.append(box)
                named.append(Bbox.from_extents(*at, *at))
                break
            note.remove()


def _labels(rows: Sequence[SweepRow], timed: Sequence[SweepRow]) -> list[str]:
    """Returns a short text for each of `rows`: at most three settings in which the `timed` plans
    differ.

    The workload and the limits come before knobs. Placements are too long for a label.
    """
    every = [settings(row) for row in timed]
    differing = [
        key
        for key in every[0]
        if not key.startswith("placement.") and len({texts[key] for texts in every}) > 1
    ]
    knobs = set(timed[0].knobs.__struct_fields__)
    chosen = sorted(differing, key=lambda key: key in knobs)[:_LABEL_KEYS]
    return [
        ", ".join(f"{key.replace('_', ' ')} {settings(row)[key]}" for key in chosen) for row in rows
    ]


def _save(figure: Figure, stem: Path, kind: str) -> Path:
    path = stem.with_suffix(f".{kind}")
    write_bytes(path, file_bytes(figure, format=kind, metadata=_METADATA[kind]))
    return path
