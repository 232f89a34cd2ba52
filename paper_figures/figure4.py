"""Figure 4: host memory by model size: the paper's values, and the accounts of the published code,
ours, and other systems.
"""

from __future__ import annotations

import msgspec

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.common.table import Drawn, TableRow

LINES = {
    "paper_stated": ("paper_stated", ""),
    "paper_schedule": ("paper_schedule", ""),
    "code_earlier": ("megatrain_code", ""),
    "ours": ("ours", "ours, all state on the host"),
    "zero3_offload": ("zero3_offload", ""),
    "fsdp2_offload": ("fsdp2_offload", ""),
    "zero_offload": ("zero_offload", ""),
}
"""Schedule in the stored data -> (key of its look, its label, or "" for the look's own label)."""
LATER = "MegaTrain's code 919520f"
"""The published code with a pinned copy of every layer."""
LIMITS = {
    "128 GiB": 128 * 2**30 / 1e9,
    "512 GiB": 512 * 2**30 / 1e9,
    "1,500 GB": 1500.0,
    "1,649 GB": 1536 * 2**30 / 1e9,
}
BYTES_REPORTED = 12
MOST = 32


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """The host memory of one model in GB."""

    model: str
    """The model's name."""
    parameters: int
    """Number of parameters."""
    host_gb: dict[str, float]
    """Schedule -> size of all host pools in GB."""
    ours_state_gb: float
    """Weights, gradients and optimizer state of ours, in GB."""
    code_state_gb: float
    """Weights, gradients and optimizer state of the published code, in GB."""
    paper: float | None
    """The paper's value in GB, or None."""
    sure: str
    """Certainty of the paper's value: `++`, `+` or `?`."""

    def each(self, name: str) -> float:
        """Returns the host memory of a schedule in bytes per parameter."""
        return 1e9 * self.host_gb[name] / self.parameters


def draw(results: Results) -> Drawn:
    sizes, date = results.typed("figure4", list[Size])
    x = [size.parameters / 1e9 for size in sizes]
    figure, axes = style.canvas(style.PAGE, 3.7)
    style.plain(
        axes,
        "host memory of one step on 1 x 1,024 tokens",
        "parameters (billions, log scale)",
        "host memory (bytes per parameter)",
    )
    axes.set_xscale("log")
    axes.set_ylim(0, MOST)
    axes.set_xlim(0.42, 165)
    axes.axhline(
        BYTES_REPORTED,
        color="black",
        linewidth=0.9,
        linestyle="--",
        label="the paper's account: 12 bytes",
    )
    for name, (system, label) in LINES.items():
        style.predicted(
            axes,
            x,
            [size.each(name) for size in sizes],
            system,
            label=label or style.LOOKS[system].label,
        )
    axes.plot(
        x,
        [size.each("code") for size in sizes],
        color=style.LOOKS["code"].colour,
        marker="o",
        markerfacecolor="white",
        markersize=3.2,
        linestyle=(0, (3, 1.5)),
        label=LATER,
    )
    reported = [size for size in sizes if size.paper is not None]
    style.reported(
        axes,
        [size.parameters / 1e9 for size in reported],
        [1e9 * (size.paper or 0) / size.parameters for size in reported],
        [style.INPUT] * len(reported),
        "o",
    )
    axes.plot(
        [],
        [],
        color="black",
        marker="o",
        markerfacecolor="#b8c0c8",
        linestyle="none",
        label="the paper's value:\n12 x the nominal size",
    )
    for label, limit in LIMITS.items():
        beyond = [limit / y for y in range(1, MOST + 1)]
        axes.plot(beyond, range(1, MOST + 1), color=style.MUTED, linewidth=0.8, linestyle=":")
        if label != "1,649 GB":
            named = "1,500 and\n1,649 GB" if label == "1,500 GB" else label
            axes.text(
                0.94 * limit / 31, 31.5, named, fontsize=7, color=style.MUTED, ha="right", va="top"
            )
    ticks = [0.5, 1.5, 3, 7.6, 14.8, 32.8, 72.7, 116.8]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
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
        caption=(
            f"Memory accounts of {date} with every pool of the schedules, without a memory limit."
            " Left of a dotted line, a system fits into that host memory; 1.5 TB means 1,500 or"
            " 1,649 GB."
        ),
    )


def _rows(sizes: list[Size]) -> list[TableRow]:
    """Returns the rows of the figure's CSV file."""
    rows = []
    for size in sizes:
        rows += [
            TableRow(
                item=f"{size.model}: state",
                quantity="state_gb",
                unit="GB",
                paper=size.paper,
                sure=size.sure,
                mark="input" if size.paper else "",
                published_code=size.code_state_gb,
                ours=size.ours_state_gb,
                note="weights, gradients and moments alone; the paper's is 12 x the nominal size",
            ),
            TableRow(
                item=f"{size.model}: all of the host",
                quantity="host_gb",
                unit="GB",
                workload="1 x 1024",
                paper_stated=size.host_gb["paper_stated"],
                paper_schedule=size.host_gb["paper_schedule"],
                published_code=size.host_gb["code_earlier"],
                ours=size.host_gb["ours"],
            ),
            *(
                TableRow(
                    item=f"{label}, {size.model}: all of the host",
                    quantity="host_gb",
                    unit="GB",
                    workload="1 x 1024",
                    published_code=size.host_gb[name],
                )
                for name, label in (
                    ("code", LATER),
                    ("zero3_offload", "zero3_offload"),
                    ("fsdp2_offload", "fsdp2_offload"),
                    ("zero_offload", "zero_offload"),
                )
            ),
        ]
    return rows


def _finding(sizes: list[Size]) -> str:
    by_name = {size.model: size for size in sizes}
    seven, last = by_name["qwen2.5-7b"], by_name["gpt-oss-120b"]
    peers = [size.each("zero3_offload") for size in sizes if size.parameters > 7e9]
    return (
        "The paper's numbers are 12 bytes times the nominal size. 7B has 7.6 billion parameters,"
        f" for which 12 bytes are {BYTES_REPORTED * seven.parameters / 1e9:.0f} GB. With all pools,"
        f" the paper's schedule takes {seven.each('paper_stated'):.1f} bytes per parameter at 7B,"
        f" and ours {seven.each('ours'):.1f} with an fp32 master. MegaTrain's code takes"
        f" {seven.each('code_earlier'):.1f} (80d3012) or {seven.each('code'):.1f} (919520f), and"
        f" ZeRO-3 {seven.each('zero3_offload'):.1f}. The paper claims superlinear growth for"
        f" ZeRO-3, but from 7B to 120B it takes {min(peers):.0f} to {max(peers):.0f} bytes per"
        f" parameter. At 120B the code takes {last.host_gb['code_earlier']:,.0f} GB or"
        f" {last.host_gb['code']:,.0f} GB, and ours {last.host_gb['ours']:,.0f} GB. The paper's"
        f" schedule takes {last.host_gb['paper_stated']:,.0f} GB"
        f" ({last.host_gb['paper_schedule']:,.0f} GB with an fp32 master)."
    )
