"""Figure 6: TFLOPS by width, 28 layers on a GH200, and how the curve depends on the width x1.0,
which the paper does not report.
"""

from __future__ import annotations

import statistics
from typing import Any

import msgspec

from megatrain.paper_figures.common import curves, style
from megatrain.paper_figures.common.results import BenchmarkRecord, Results
from megatrain.paper_figures.common.table import Drawn, TableRow, rows_of

SYSTEMS = (
    "megatrain_code",
    "paper_stated",
    "paper_schedule",
    "ours",
    "zero3_offload",
    "fsdp2_offload",
)


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the paper, predicted with one width x1.0."""

    base: int
    """The width x1.0."""
    item: str
    """The row's name."""
    factor: float
    """The row's width as a multiple of `base`."""
    system: str
    """The policy that ran."""
    quantity: str
    """`tflops` or `runs`."""
    paper: float
    """The paper's value."""
    predicted: float
    """The predicted value."""
    fits: bool
    """Whether the prediction fits into memory."""
    batch: int
    """Sequences in a micro-batch."""
    parameters: int
    """Number of parameters."""


class Figure6Data(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/figure6.py` stores."""

    rows: list[BenchmarkRecord]
    """The paper's rows, predicted with the assumed width x1.0."""
    bases: list[Base]
    """MegaTrain's and the baselines' rows, predicted with each width x1.0 that was tried."""


def errors(bases: list[Base]) -> dict[int, tuple[float, int, int]]:
    """Returns width x1.0 -> (mean absolute deviation of all of MegaTrain's speeds as a share,
    number of rows whose fit is predicted correctly, number of rows). For a plan that does not fit,
    the speed with enough memory is taken, so every width is judged by the same rows.
    """
    found = {}
    for base in sorted({entry.base for entry in bases}):
        mine = [entry for entry in bases if entry.base == base]
        speeds = [
            abs(entry.predicted / entry.paper - 1)
            for entry in mine
            if entry.system == "megatrain_code" and entry.quantity == "tflops"
        ]
        found[base] = (
            statistics.fmean(speeds),
            sum(entry.fits == bool(entry.paper) for entry in mine),
            len(mine),
        )
    return found


def draw(results: Results) -> Drawn:
    data, date = results.typed("figure6", Figure6Data)
    figure, (left, right) = style.canvas(
        style.PAGE, 3.9, ncols=2, sharey=True, width_ratios=(1, 1.25)
    )
    style.plain(left, "width x1.0 = 1,792 (half of 7B's)", "", "TFLOPS (6N)")
    left.set_ylim(0, 540)
    labels = {factor: f"{factor:g}" for factor in sorted({row.factor for row in data.rows})}
    lines = curves.batch_ticks(left, labels, data.rows, lambda record: record.factor)
    left.set_xlabel(f"width factor; {lines}")
    curves.predictions(left, SYSTEMS, data.rows, lambda record: record.factor)
    curves.papers_values(
        left, SYSTEMS, data.rows, lambda record: record.factor, lambda record: record.factor - 0.12
    )
    _bases(right, data)
    style.legend(figure, style.handles(SYSTEMS, crosses=True), 4)
    caption = (
        f"Predictions of {date} from the library's GH200, sequences of 1,024 tokens, batches that"
        " fill the device (the paper does not state its batches); nothing was measured. Right: a"
        " cross is a plan that does not fit, at its speed with enough memory."
    )
    return _drawn(data, figure, caption)


def _bases(axes: Any, data: Figure6Data) -> None:
    """Draws the published code's speed by width, one line for each base width."""
    style.plain(axes, "MegaTrain's code for other widths x1.0", "width factor", "")
    spread, widths = errors(data.bases), sorted({entry.base for entry in data.bases})
    shades = ["#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#08519c", "#08306b", "#041b3d"]
    for index, base in enumerate(widths):
        mine = sorted(
            (
                entry
                for entry in data.bases
                if entry.base == base and entry.system == "megatrain_code"
            ),
            key=lambda entry: entry.factor,
        )
        label = f"{base:,}: {spread[base][0]:.0%}, {spread[base][1]} of {spread[base][2]}"
        beyond = [entry for entry in mine if not entry.fits]
        axes.plot(
            [entry.factor for entry in beyond],
            [entry.predicted for entry in beyond],
            linestyle="none",
            marker="x",
            markersize=7,
            color=shades[index % len(shades)],
        )
        axes.plot(
            [entry.factor for entry in mine],
            [entry.predicted for entry in mine],
            color=shades[index % len(shades)],
            marker="osDv^P*"[index % 7],
            markersize=3.2,
            label=label,
        )
    reported = [
        entry
        for entry in data.bases
        if entry.base == widths[0] and entry.system == "megatrain_code"
    ]
    style.reported(
        axes,
        [entry.factor for entry in reported],
        [entry.paper for entry in reported],
        ["+"] * len(reported),
        "o",
    )
    axes.set_xlabel("width factor")
    axes.legend(
        title="x1.0: mean deviation\nof 5 speeds; fit right",
        title_fontsize=7,
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        handlelength=1.6,
        labelspacing=0.3,
    )


def _drawn(data: Figure6Data, figure: Any, caption: str) -> Drawn:
    """Returns the figure with its rows and texts."""
    rows = rows_of(data.rows)
    rows += [
        TableRow(
            item=f"{entry.item}, x1.0 = {entry.base}",
            quantity=entry.quantity,
            unit="TFLOPS" if entry.quantity == "tflops" else "",
            paper=entry.paper,
            sure="+",
            workload=f"{entry.batch} x 1024",
            published_code=entry.predicted,
            does_not_fit="" if entry.fits else "published_code",
        )
        for entry in data.bases
    ]
    spread = errors(data.bases)
    most = max(right for _, right, _ in spread.values())
    best = [base for base in spread if spread[base][1] == most]
    named = " and ".join(f"{base:,}" for base in best)
    near = min(spread, key=lambda base: spread[base][0])
    return Drawn(
        figure,
        rows,
        "Figure 6: width",
        claim=(
            "MegaTrain falls from 406 TFLOPS at width x1.0 to 100 at x5.0, where the baselines are"
            " out of memory; at x1.0 and x3.0 the baselines are as fast or faster."
        ),
        finding=(
            f"The paper does not report the base width, so {len(spread)} were tried. Which rows fit"
            f" is predicted best with {named} ({most} of {spread[best[0]][2]} rows;"
            f" {spread[1792][1]} with 1,792, which is assumed here). Over all five speeds, the mean"
            f" deviation is {spread[best[-1]][0]:.0%} for {best[-1]:,}, {spread[1792][0]:.0%} for"
            f" 1,792 and {spread[near][0]:.0%} for {near:,}. Only the curve of {near:,} falls as"
            " the paper's does, because its layers leave room for fewer and fewer sequences. By our"
            " account its models exceed the host's memory from x3.0 on. At x1.0 it would be the 7B"
            " of Figure 5, which has 284 TFLOPS and not 406. The baselines' speeds imply batches of"
            " 3 to 11 from x3.0 on. Their 455 and 501 at x1.0 exceed the prediction for any batch."
        ),
        caption=caption,
    )
