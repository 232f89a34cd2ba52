"""Beyond the paper: speed by device memory with a fixed number of tokens per step."""

from __future__ import annotations

from megatrain.paper_figures import style
from megatrain.paper_figures.regimes import Map
from megatrain.paper_figures.results import Results
from megatrain.paper_figures.table import Drawn, TableRow

TOKENS = {
    4096: ("#8a949e", "v", (0, (1, 1.2))),
    16384: ("#E69F00", "s", (0, (5, 2))),
    65536: ("#0072B2", "o", (0, (5, 1.5, 1, 1.5))),
    262144: ("#009E73", "D", "-"),
}


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
    axes.set_ylim(0, 1.1 * max(cell.tokens_per_s for mine in lines.values() for cell in mine))
    axes.set_xlim(0, 140)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    style.legend(figure, axes.get_legend_handles_labels()[0], 2)
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
            f" {lines[most][-1].device_limit_gib} GiB, and 24 GiB {share[most][24]:.0%}: the"
            " micro-batches of a group share each load of a layer. With"
            f" {few // 1024}K tokens, 24 GiB give {share[few][24]:.0%}."
        ),
        made=(
            f"Predictions of {date} as in the figure above: 7B, sequences of 1,024, only the device"
            " memory differs; nothing was measured."
        ),
        footer_columns=62,
    )
