"""Figure 4: host memory against model size: what is told, what the published code takes, ours, and others."""

from __future__ import annotations

import msgspec

from megatrain.paper_figures import style
from megatrain.paper_figures.results import Results
from megatrain.paper_figures.table import Drawn, Row

LINES = {
    "code": ("megatrain_code", "published code, all pools"), "paper_schedule": ("paper_schedule", "paper's schedule, exact master"), "ours": ("ours", "ours, all state on the host"),
    "zero3_offload": ("zero3_offload", ""), "fsdp2_offload": ("fsdp2_offload", ""), "zero_offload": ("zero_offload", ""),
}  # fmt: skip
LIMITS = {"128 GiB": 128 * 2**30 / 1e9, "512 GiB": 512 * 2**30 / 1e9, "1.5 TB": 1536 * 2**30 / 1e9}
BYTES_TOLD = 12


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """One model."""

    model: str
    parameters: int
    host_gb: dict[str, float]
    ours_state_gb: float
    code_state_gb: float
    paper: float | None
    sure: str


def draw(results: Results) -> Drawn:
    sizes, date = results.typed("figure4", list[Size])
    x = [size.parameters / 1e9 for size in sizes]
    figure, axes = style.canvas(style.PAGE, 3.7)
    style.plain(axes, "host memory of one step on 1 x 1024 tokens", "parameters (billions, log scale)", "host memory (GB, log scale)")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.plot(x, [BYTES_TOLD * value for value in x], color="black", linewidth=0.9, linestyle="--", label="12 bytes a parameter, the paper's account")
    for name, (system, label) in LINES.items():
        style.predicted(axes, x, [size.host_gb[name] for size in sizes], system, label=label or style.LOOKS[system].label)
    told = [size for size in sizes if size.paper is not None]
    style.told(axes, [size.parameters / 1e9 for size in told], [size.paper or 0 for size in told], [size.sure for size in told], "o")
    axes.plot([], [], color="black", marker="o", linestyle="none", label="told by the paper: 12 x the nominal size")
    axes.set_xlim(0.42, 210)
    for label, limit in LIMITS.items():
        axes.axhline(limit, color=style.MUTED, linewidth=0.8, linestyle=":")
        axes.text(0.44, limit * 1.04, label, fontsize=7, color=style.MUTED)
    ticks = [0.5, 1.5, 3, 7.6, 14.8, 32.8, 72.7, 116.8]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([10, 100, 1000], ["10", "100", "1,000"])
    axes.minorticks_off()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center")
    made = f"Accounts of {date}, every pool of the schedules; no machine plays a part. Decimal GB; limits are of real machines."
    style.footer(figure, made)
    return Drawn(
        figure, _rows(sizes), "Figure 4: host memory",
        claim="Training needs 12 bytes a parameter in host memory, 84 GB at 7B to 1,440 GB at 120B: bf16 weights and gradients, fp32 moments.",
        finding=_finding(sizes), made=made,
    )  # fmt: skip


def _rows(sizes: list[Size]) -> list[Row]:
    rows = []
    for size in sizes:
        rows.append(
            Row(
                item=f"{size.model}: state", quantity="state_gb", unit="GB", paper=size.paper, sure=size.sure, published_code=size.code_state_gb,
                ours=size.ours_state_gb, note="weights, gradients and moments alone",
            )
        )  # fmt: skip
        rows.append(
            Row(
                item=f"{size.model}: all of the host", quantity="host_gb", unit="GB", paper_schedule=size.host_gb["paper_schedule"],
                published_code=size.host_gb["code"], ours=size.host_gb["ours"],
            )
        )  # fmt: skip
        rows += [
            Row(item=f"{name}, {size.model}: all of the host", quantity="host_gb", unit="GB", published_code=size.host_gb[name])
            for name in ("zero3_offload", "fsdp2_offload", "zero_offload")
        ]  # fmt: skip
    return rows


def _finding(sizes: list[Size]) -> str:
    by_name = {size.model: size for size in sizes}
    seven, last = by_name["qwen2.5-7b"], by_name["gpt-oss-120b"]
    each = {name: seven.host_gb[name] * 1e9 / seven.parameters for name in seven.host_gb}
    return (
        f"7B has 7.6 billion parameters, so 12 bytes each are {BYTES_TOLD * seven.parameters / 1e9:.0f} GB; ours takes {each['ours']:.1f} bytes with all pools, two more for the low half of a true fp32 master; the published code, which has no master, really takes {each['code']:.1f}, "
        f"since it keeps each layer twice and 14 slabs of the largest; ZeRO-3 takes {each['zero3_offload']:.1f} and FSDP2 {each['fsdp2_offload']:.1f}. "
        f"At 120B a layer of experts has 3.2 billion parameters, so slabs cost most there: {last.host_gb['code']:,.0f} GB for the code, {last.host_gb['ours']:,.0f} for ours."
    )
