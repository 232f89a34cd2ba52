"""Draws a sweep's plans by device memory and time, with one marker for each policy and a line
through the Pareto front. Writes PNG and PDF whose bytes depend only on the rows.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from megatrain.experiments.sweep.front import front
from megatrain.experiments.sweep.store import SweepRow
from megatrain.simulator.base.files import write_bytes
from megatrain.simulator.plots.canvas import DPI, INK, MUTED, STYLE

# The palette of Okabe and Ito, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#D55E00", "#8a949e")
# One more than colours, so that 56 policies look different.
_MARKS = ("o", "D", "s", "^", "v", "P", "X", "<")
_MANY = 400  # with more rows, points are smaller and paler
_METADATA: dict[str, dict[str, None]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Producer": None, "Creator": None},
}


def draw(rows: Sequence[SweepRow], stem: Path, title: str, made: str) -> list[Path]:
    """Writes `STEM.png` and `STEM.pdf` of the timed rows. `made` says how and when the sweep was
    made. If the rows differ in tokens per step, time is for a million tokens.
    """
    timed, best = [row for row in rows if row.timed], front(rows)
    one_step = len({row.workload.step_tokens for row in timed}) == 1
    scale = timed[0].workload.step_tokens if one_step else 1e6

    def points(chosen: Sequence[SweepRow]) -> tuple[list[float], list[float]]:
        return [row.device_peak_bytes / 2**30 for row in chosen], [
            row.seconds_per_token * scale for row in chosen
        ]

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 5.0), layout="constrained", dpi=DPI)
        axes = figure.subplots()
        few = len(timed) <= _MANY
        policies = sorted({row.policy for row in timed})
        # Not strict, because the cycles are endless.
        for policy, colour, mark in zip(policies, cycle(_COLOURS), cycle(_MARKS)):
            x, y = points([row for row in timed if row.policy == policy])
            axes.plot(
                x,
                y,
                linestyle="none",
                marker=mark,
                color=colour,
                markersize=5 if few else 3,
                alpha=0.85 if few else 0.35,
                markeredgewidth=0,
                label=policy,
                rasterized=not few,
            )
        x, y = points(best)
        axes.step(x, y, where="post", color=INK, linewidth=1.1, label="Pareto front", zorder=4)
        for row in best:
            place = policies.index(row.policy)
            px, py = points([row])
            axes.plot(
                px,
                py,
                marker=_MARKS[place % len(_MARKS)],
                color=_COLOURS[place % len(_COLOURS)],
                markeredgecolor=INK,
                markeredgewidth=1.0,
                markersize=6.5,
                zorder=5,
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}")
        axes.tick_params(axis="y", which="both", labelsize=8)
        axes.grid(which="both", axis="y")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlim(left=0)
        axes.set_xlabel("device memory (GiB)")
        axes.set_ylabel("seconds per step" if one_step else "seconds for a million tokens")
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK)
        axes.set_title(made, loc="left", fontsize=8.5, color=MUTED)
        entries, names = axes.get_legend_handles_labels()
        for entry in figure.legend(
            entries, names, loc="outside lower center", ncols=min(len(names), 5)
        ).legend_handles:
            if entry is not None:
                entry.set_alpha(1)
        return [_save(figure, stem, kind) for kind in ("png", "pdf")]


def _save(figure: Figure, stem: Path, kind: str) -> Path:
    data, path = io.BytesIO(), stem.with_suffix(f".{kind}")
    figure.savefig(data, format=kind, metadata=_METADATA[kind])
    write_bytes(path, data.getvalue())
    return path
