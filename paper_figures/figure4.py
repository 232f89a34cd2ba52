"""Figure 4: host memory by model size: the paper's values, and the accounts of the published code,
ours, and other systems.
"""

from __future__ import annotations

import msgspec

from megatrain.paper_figures import style
from megatrain.paper_figures.results import Results
from megatrain.paper_figures.table import Drawn, TableRow

LINES = {
    "code": ("megatrain_code", "published code, all pools"),
    "paper_schedule": ("paper_schedule", "paper's schedule, fp32 master"),
    "ours": ("ours", "ours, all state on the host"),
    "zero3_offload": ("zero3_offload", ""),
    "fsdp2_offload": ("fsdp2_offload", ""),
    "zero_offload": ("zero_offload", ""),
}
LIMITS = {"128 GiB": 128 * 2**30 / 1e9, "512 GiB": 512 * 2**30 / 1e9, "1.5 TB": 1536 * 2**30 / 1e9}
BYTES_REPORTED = 12


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The host memory of one model in GB."""

    model: str
    """The model's name."""
    parameters: int
    """Number of parameters."""
    host_gb: dict[str, float]
    """Schedule -> all host pools."""
    ours_state_gb: float
    """Weights, gradients and optimizer state of ours."""
    code_state_gb: float
    """Weights, gradients and optimizer state of the published code."""
    paper: float | None
    """The paper's value, or None."""
    sure: str
    """Certainty of the paper's value."""


def draw(results: Results) -> Drawn:
    sizes, date = results.typed("figure4", list[Size])
    x = [size.parameters / 1e9 for size in sizes]
    figure, axes = style.canvas(style.PAGE, 3.7)
    style.plain(
        axes,
        "host memory of one step on 1 x 1024 tokens",
        "parameters (billions, log scale)",
        "host memory (GB, log scale)",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot(
        x,
        [BYTES_REPORTED * value for value in x],
        color="black",
        linewidth=0.9,
        linestyle="--",
        label="the paper's account: 12 bytes per parameter",
    )
    for name, (system, label) in LINES.items():
        style.predicted(
            axes,
            x,
            [size.host_gb[name] for size in sizes],
            system,
            label=label or style.LOOKS[system].label,
        )
    reported = [size for size in sizes if size.paper is not None]
    style.reported(
        axes,
        [size.parameters / 1e9 for size in reported],
        [size.paper or 0 for size in reported],
        [size.sure for size in reported],
        "o",
    )
    axes.plot(
        [],
        [],
        color="black",
        marker="o",
        linestyle="none",
        label="the paper's value: 12 x the nominal size",
    )
    axes.set_xlim(0.42, 210)
    for label, limit in LIMITS.items():
        axes.axhline(limit, color=style.MUTED, linewidth=0.8, linestyle=":")
        axes.text(0.44, limit * 1.04, label, fontsize=7, color=style.MUTED)
    ticks = [0.5, 1.5, 3, 7.6, 14.8, 32.8, 72.7, 116.8]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    return Drawn(
        figure,
        _rows(sizes),
        "Figure 4: host memory",
        claim=(
            "Training needs 12 bytes of host memory per parameter, 84 GB at 7B to 1,440 GB at 120B:"
            " bf16 weights and gradients, and fp32 moments."
        ),
        finding=_finding(sizes),
        made=(
            f"Accounts of {date} with every pool of the schedules. Decimal GB. Dotted lines are the"
            " memory of real machines; no limit is applied."
        ),
    )


def _rows(sizes: list[Size]) -> list[TableRow]:
    rows = []
    for size in sizes:
        rows += [
            TableRow(
                item=f"{size.model}: state",
                quantity="state_gb",
                unit="GB",
                paper=size.paper,
                sure=size.sure,
                published_code=size.code_state_gb,
                ours=size.ours_state_gb,
                note="weights, gradients and moments alone",
            ),
            TableRow(
                item=f"{size.model}: all of the host",
                quantity="host_gb",
                unit="GB",
                paper_schedule=size.host_gb["paper_schedule"],
                published_code=size.host_gb["code"],
                ours=size.host_gb["ours"],
            ),
            *(
                TableRow(
                    item=f"{name}, {size.model}: all of the host",
                    quantity="host_gb",
                    unit="GB",
                    published_code=size.host_gb[name],
                )
                for name in ("zero3_offload", "fsdp2_offload", "zero_offload")
            ),
        ]
    return rows


def _finding(sizes: list[Size]) -> str:
    by_name = {size.model: size for size in sizes}
    seven, last = by_name["qwen2.5-7b"], by_name["gpt-oss-120b"]
    each = {name: seven.host_gb[name] * 1e9 / seven.parameters for name in seven.host_gb}
    return (
        "7B has 7.6 billion parameters, so 12 bytes per parameter are"
        f" {BYTES_REPORTED * seven.parameters / 1e9:.0f} GB. Ours takes {each['ours']:.1f} bytes"
        " with all pools, two of them for the low half of an fp32 master. The published code has"
        f" no master, but takes {each['code']:.1f} bytes, because it keeps each layer twice and 14"
        " staging buffers of the largest layer's size. ZeRO-3 takes"
        f" {each['zero3_offload']:.1f} bytes and FSDP2 {each['fsdp2_offload']:.1f}. At 120B a layer"
        " of experts has 3.2 billion parameters, so staging buffers cost most there:"
        f" {last.host_gb['code']:,.0f} GB for the code and {last.host_gb['ours']:,.0f} GB for ours."
    )
