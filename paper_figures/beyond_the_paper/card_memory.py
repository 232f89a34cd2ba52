"""Beyond the paper: speed by device memory with a fixed number of tokens per step."""

from __future__ import annotations

from typing import NamedTuple

from megatrain.paper_figures.beyond_the_paper.regimes import Map
from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.common.table import Drawn, TableRow

TOKENS = {
    4096: ("#8a949e", "v", (0, (1, 1.2))),
    32768: ("#E69F00", "s", (0, (5, 2))),
    65536: ("#0072B2", "o", (0, (5, 1.5, 1, 1.5))),
    262144: ("#009E73", "D", "-"),
}
"""Tokens per step -> (colour, marker, line style)."""


class MeasuredStep(NamedTuple):
    """A measured step of ours."""

    tokens: int
    """Tokens per step."""
    device_gib: float
    """Peak of device memory in GiB."""
    tokens_per_s: float
    """Tokens per second."""
    workload: str
    """Micro-batches x sequences x tokens."""
    where: str
    """The benchmark's file."""
    date: str
    """Day of the measurement."""


def measured(results: Results, model: str) -> list[MeasuredStep]:
    """Returns our measured steps of `model` with AdamW, sequences of 1,024 tokens, global clipping
    and one of the TOKENS per step, without fp8 products.
    """
    found = []
    for path, file in results.usual_benchmarks().items():
        work = file["plan"]["workload"]
        tokens = work["batch"] * work["accumulation"] * work["sequence"]
        if (file["model"], work["sequence"], work["clipping"]) != (model, 1024, "global"):
            continue
        for record in file["systems"]:
            if record["system"] == "ours" and not record["failure"] and tokens in TOKENS:
                found.append(
                    MeasuredStep(
                        tokens,
                        record["device_peak_bytes"] / 2**30,
                        tokens / record["step_seconds_median"],
                        f"{work['accumulation']} x {work['batch']} x {work['sequence']}",
                        path,
                        file["date"],
                    )
                )
    return found


def draw(results: Results) -> Drawn:
    data, date = results.typed("regimes", Map)
    figure, axes = style.canvas(style.COLUMN, 3.2)
    style.plain(
        axes, f"{data.model}, H200's other rates", "device memory (GiB)", "tokens per second"
    )
    lines = {
        tokens: sorted(
            (cell for cell in data.cells if cell.tokens == tokens and cell.fits),
            key=lambda cell: cell.device_limit_gib,
        )
        for tokens in TOKENS
    }
    for tokens, (colour, marker, line) in TOKENS.items():
        axes.plot(
            [cell.device_limit_gib for cell in lines[tokens]],
            [cell.tokens_per_s for cell in lines[tokens]],
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=3.5,
            label=f"{tokens // 1024}K tokens per step",
        )
    stars = measured(results, data.model)
    for star in stars:
        axes.plot(
            [star.device_gib],
            [star.tokens_per_s],
            marker="*",
            markersize=9,
            linestyle="none",
            markerfacecolor=TOKENS[star.tokens][0],
            markeredgecolor="black",
            markeredgewidth=0.6,
            zorder=7,
        )
    axes.set_ylim(0, 1.1 * max(star.tokens_per_s for star in stars))
    axes.set_xlim(0, 140)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    entries = [*axes.get_legend_handles_labels()[0], *style.handles((), paper=False, stars=True)]
    style.legend(figure, entries, 2)
    rows = [
        TableRow(
            item=f"{data.model}, {tokens} tokens per step, {cell.device_limit_gib} GiB",
            quantity="tokens_per_s",
            unit="tokens/s",
            workload=f"{cell.accumulation} x {cell.batch} x {cell.sequence}",
            ours=cell.tokens_per_s,
        )
        for tokens, mine in lines.items()
        for cell in mine
    ]
    rows += [
        TableRow(
            item=(
                f"{data.model}, {star.tokens} tokens per step, {star.device_gib:.1f} GiB, measured"
            ),
            quantity="tokens_per_s",
            unit="tokens/s",
            workload=star.workload,
            measured=star.tokens_per_s,
            note=f"compiled layers, {star.where}",
        )
        for star in stars
    ]
    grouped = max((star for star in stars if star.tokens == 65536), key=lambda one: one.date)
    share = {
        tokens: {cell.device_limit_gib: cell.tokens_per_s / mine[-1].tokens_per_s for cell in mine}
        for tokens, mine in lines.items()
    }
    most, few = max(TOKENS), min(TOKENS)
    return Drawn(
        figure,
        rows,
        "Beyond the paper: why a small card suffices",
        claim="None: the paper compares cards with different speeds.",
        finding=(
            f"With {most // 1024}K tokens per step, {lines[most][0].device_limit_gib} GiB of device"
            f" memory give {share[most][lines[most][0].device_limit_gib]:.0%} of the speed of"
            f" {lines[most][-1].device_limit_gib} GiB, and 24 GiB {share[most][24]:.0%}. The reason"
            " is that the micro-batches of a group share each load of a layer. With"
            f" {few // 1024}K tokens, 24 GiB give {share[few][24]:.0%}. With 64K tokens"
            f" ({grouped.workload}) in {grouped.device_gib:.0f} GiB,"
            f" {grouped.tokens_per_s:,.0f} tokens/s were measured."
        ),
        caption=(
            f"Predictions of {date} as in the figure above: 7B, sequences of 1,024, eager, only the"
            f" device memory differs. Measured {min(star.date for star in stars)} to"
            f" {max(star.date for star in stars)} on H200 machines: compiled layers."
        ),
        caption_columns=62,
    )
