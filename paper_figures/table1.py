"""Table 1: the memory hierarchy, from the hardware library and from the paper."""

from __future__ import annotations

from typing import Any

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.common.table import Drawn, TableRow
from megatrain.simulator.hardware.machine import HardwareSpec

MACHINES = ("gh200-96", "h200", "a100-80-pcie", "a6000", "rtx3090", "rtx4090", "b200")
HEADINGS = (
    "machine",
    "device GiB\n(paper: GB)",
    "device GB/s\n(paper)",
    "link",
    "up, down\nGB/s",
    "both ways\nGB/s (paper)",
    "host GiB\n(paper: GB)",
    "host GB/s\n(paper)",
)
_WIDTHS = (0.13, 0.12, 0.14, 0.13, 0.13, 0.14, 0.13, 0.13)


def draw(results: Results) -> Drawn:
    facts = results.facts()["table1"]
    machines = {name: HardwareSpec.load(name) for name in MACHINES}
    cells = [_cells(hardware, facts) for hardware in machines.values()]
    figure, axes = style.canvas(style.PAGE, 3.1)
    axes.set_axis_off()
    drawn = axes.table([list(HEADINGS), *cells], loc="center", cellLoc="right", colWidths=_WIDTHS)
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(7)
    drawn.scale(1, 1.35)
    for (row, column), cell in drawn.get_celld().items():
        cell.set_linewidth(0.4)
        cell.set_edgecolor(style.GRID)
        if row == 0:
            cell.set_height(cell.get_height() * 1.5)
            cell.set_text_props(fontweight="bold")
        if column in (0, 3):
            cell.set_text_props(ha="left")
    prices, tiers = facts["dollars_per_gb"], facts["tiers"]
    text = "; ".join(
        f"{kind} {least:g}" + ("" if least == most else f" to {most:g}")
        for kind, (least, most) in prices.items()
    )
    axes.text(
        0.5,
        -0.1,
        f"the paper's prices in dollars per GB: {text}\nits other tiers: SRAM"
        f" {tiers['SRAM']['capacity']} at {tiers['SRAM']['bandwidth']}, NVMe"
        f" {tiers['NVMe']['capacity']} at {tiers['NVMe']['bandwidth']} for"
        f" {tiers['NVMe']['dollars']} dollars per GB (doubtful)\nB200 and RTX 4090 are not in the"
        " paper; 1.5 TB is 1,500 or 1,649 GB (1,536 GiB)",
        transform=axes.transAxes,
        ha="center",
        fontsize=7,
    )
    rows = _rows(machines, facts)
    found = {row.item: row for row in rows if row.quantity == "bandwidth"}
    hbm, link = found["gh200-96: HBM"], found["h200: link, both ways"]
    return Drawn(
        figure,
        rows,
        "Table 1: the memory hierarchy",
        claim=(
            "HBM costs about $20 per GB and DDR5 $5 to 12, and host memory is slower and larger by"
            " an order of magnitude."
        ),
        finding=(
            "The paper reports datasheet rates. By these, HBM is 8 (GH200) to 24 (H200) times as"
            f" fast as host memory. A process reaches {hbm.ours:,.0f} of {hbm.paper:,.0f} GB/s of"
            f" the GH200's HBM. On an H200, {link.measured:.0f} of {link.paper:g} GB/s of PCIe were"
            " measured, both directions together. The library has such rates. Prices are from the"
            " paper alone."
        ),
        caption=(
            "Rates that one process reaches, from simulator/library/hardware, which names their"
            " sources; the H200's were measured on 2026-11-21."
        ),
    )


def _cells(hardware: HardwareSpec, facts: dict[str, Any]) -> list[str]:
    both = hardware.duplex_fraction * (hardware.h2d_gb_per_s + hardware.d2h_gb_per_s)

    def papers(section: str, what: str) -> str:
        value = facts[section].get(f"{hardware.name}: {what}")
        return "" if value is None else f" ({value:,.0f})"

    rate = (
        f"{hardware.host_memory.gb_per_s:,.0f}"
        if hardware.host_memory
        else f"{hardware.host_gb_per_s:,.0f} (sums)"
    )
    return [
        hardware.name,
        f"{hardware.device_bytes / 2**30:.0f}" + papers("capacity_gb", "HBM"),
        f"{hardware.device_gb_per_s:,.0f}" + papers("bandwidth_gb_per_s", "HBM"),
        hardware.link,
        f"{hardware.h2d_gb_per_s:g}, {hardware.d2h_gb_per_s:g}"
        + papers("bandwidth_gb_per_s", "link, one way"),
        f"{both:.0f}" + papers("bandwidth_gb_per_s", "link, both ways"),
        f"{hardware.host_bytes / 2**30:,.0f}" + papers("capacity_gb", "host"),
        rate + papers("bandwidth_gb_per_s", "host"),
    ]


def _rows(machines: dict[str, HardwareSpec], facts: dict[str, Any]) -> list[TableRow]:
    """Returns the rows of the table's CSV file."""
    rows = []
    for item, value in facts["bandwidth_gb_per_s"].items():
        name, _, what = item.partition(": ")
        hardware = machines[name]
        duplex = hardware.duplex_fraction * (hardware.h2d_gb_per_s + hardware.d2h_gb_per_s)
        host = hardware.host_memory.gb_per_s if hardware.host_memory else None
        reached = {
            "HBM": hardware.device_gb_per_s,
            "host": host,
            "link, both ways": duplex,
            "link, one way": hardware.h2d_gb_per_s,
        }[what]
        # The library's rates of the H200 were measured by this project.
        here = reached if name == "h200" else None
        doubtful = "?" if item == "h200: link, both ways" else facts["sure"]
        rows.append(
            TableRow(
                item=item,
                quantity="bandwidth",
                unit="GB/s",
                paper=value,
                sure=doubtful,
                ours=reached,
                measured=here,
                note="ours: the library's rate",
            )
        )
    for item, value in facts["capacity_gb"].items():
        name, _, what = item.partition(": ")
        size: int | None = (
            machines[name].device_bytes if what == "HBM" else machines[name].host_bytes
        )
        if (name, what) == ("h200", "host"):  # our H200 has another host
            size = None
        rows.append(
            TableRow(
                item=item,
                quantity="capacity",
                unit="GB",
                paper=value,
                sure=facts["sure"],
                ours=None if size is None else size / 1e9,
                note=(
                    "another machine than ours; 1,500 or 1,649 GB"
                    if size is None
                    else "ours: what a process can use, by the library"
                ),
            )
        )
    for tier, known in facts["tiers"].items():
        rows.append(
            TableRow(
                item=tier,
                quantity="tier",
                unit="",
                sure=known["sure"],
                note=f"the paper: {known['capacity']}, {known['bandwidth']}",
            )
        )
    for kind, prices in facts["dollars_per_gb"].items():
        rows += [
            TableRow(
                item=f"{kind}, {which}",
                quantity="price",
                unit="dollars per GB",
                paper=price,
                sure=facts["sure"],
            )
            for which, price in zip(("least", "most"), prices, strict=True)
        ]
    return rows
