"""Beyond the paper: memory by model size and state format."""

from __future__ import annotations

import msgspec

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.common.table import Drawn, TableRow

LOOKS = {
    "exact": ("#009E73", "D", "-"),
    "master24": ("#0072B2", "o", (0, (5, 2))),
    "bf16-sr": ("#E69F00", "s", (0, (1, 1.2))),
}
LIMITS = {"128 GiB": 128 * 2**30 / 1e9, "512 GiB": 512 * 2**30 / 1e9, "1.5 TB": 1500.0}


class FormatSize(msgspec.Struct, frozen=True, kw_only=True):
    """One model in one state format."""

    model: str
    """A model of the library."""
    parameters: int
    """Number of parameters."""
    state: str
    """The state format."""
    what: str
    """A description of the format."""
    host_gb: float
    """All host pools with all state on the host, in GB."""
    device_gb: float
    """Peak of device memory with all state on the host, in GB."""


def draw(results: Results) -> Drawn:
    sizes, date = results.typed("formats", list[FormatSize])
    figure, axes = style.canvas(style.COLUMN, 3.3)
    style.plain(
        axes, "ours, all state on the host", "billions of parameters (log scale)", "GB (log scale)"
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    for state, (colour, marker, line) in LOOKS.items():
        mine = [size for size in sizes if size.state == state]
        axes.plot(
            [size.parameters / 1e9 for size in mine],
            [size.host_gb for size in mine],
            color=colour,
            marker=marker,
            linestyle=line,
            markersize=3.5,
            label=f"host, {state}",
        )
    exact = [size for size in sizes if size.state == "exact"]
    axes.plot(
        [size.parameters / 1e9 for size in exact],
        [size.device_gb for size in exact],
        color=style.MUTED,
        marker="x",
        linestyle="-",
        markersize=3.5,
        label="device, at least",
    )
    for label, limit in LIMITS.items():
        axes.axhline(limit, color=style.MUTED, linewidth=0.8, linestyle=":")
        axes.text(0.46, limit * 1.05, label, fontsize=7, color=style.MUTED)
    ticks = [0.5, 1.5, 3, 7.6, 14.8, 32.8, 72.7, 116.8]
    axes.set_xticks(ticks, ["0.5", "1.5", "3", "7", "14", "32", "72", "120"])
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1,000"])
    axes.minorticks_off()
    style.legend(figure, axes.get_legend_handles_labels()[0], 2)
    rows = [
        TableRow(
            item=f"{size.model}, {size.state}: {place}",
            quantity=f"{place}_gb",
            unit="GB",
            workload="1 x 1024",
            ours=value,
            note=f"{size.what}; {1e9 * value / size.parameters:.2f} bytes per parameter",
        )
        for size in sizes
        for place, value in (("host", size.host_gb), ("device", size.device_gb))
    ]
    found = {(size.model, size.state): size for size in sizes}
    names = list(LOOKS)
    large = [found["gpt-oss-120b", state].host_gb for state in names]
    each = [
        1e9 * found["qwen2.5-32b", state].host_gb / found["qwen2.5-32b", state].parameters
        for state in names
    ]
    holds = {
        state: max(
            (size for size in sizes if size.state == state and size.host_gb <= LIMITS["512 GiB"]),
            key=lambda size: size.parameters,
        ).model
        for state in names
    }
    return Drawn(
        figure,
        rows,
        "Beyond the paper: state formats",
        claim="None: the paper has one format, bf16 weights and fp32 moments.",
        finding=(
            f"At 32B ours takes {each[0]:.1f} bytes of host memory per parameter with exact state."
            f" It takes {each[1]:.1f} with 24-bit masters and {each[2]:.1f} with bf16 weights and"
            " stochastic rounding, both with 8-bit moments. So 120B takes"
            f" {large[0]:,.0f}, {large[1]:,.0f} or {large[2]:,.0f} GB. In the same order, the"
            f" largest models that fit into 512 GiB are {holds['exact']}, {holds['master24']} and"
            f" {holds['bf16-sr']}. Only `exact` has the arithmetic of plain AdamW."
        ),
        caption=(
            f"Memory accounts of {date}: every pool of a step on 1 x 1,024 tokens, without a limit;"
            " nothing was measured."
        ),
        caption_columns=62,
    )
