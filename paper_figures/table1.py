"""Table 1: the memory hierarchy, from the hardware library and from the paper."""

from __future__ import annotations

from typing import Any

from megatrain.paper_figures import style
from megatrain.paper_figures.results import Results
from megatrain.paper_figures.table import Drawn, TableRow
from megatrain.simulator.hardware.machine import HardwareSpec

MACHINES = ("gh200-96", "h200", "a100-80-pcie", "a6000", "rtx3090", "rtx4090", "b200")
HEADINGS = (
    "machine",
    "device\nGB",
    "device\nGB/s",
    "link",
    "up, down\nGB/s",
    "both ways\nGB/s each",
    "host\nGB",
    "host\nGB/s",
)
_WIDTHS = (0.13, 0.11, 0.11, 0.15, 0.12, 0.12, 0.12, 0.14)


def draw(results: Results) -> Drawn:
    facts = results.facts()["table1"]
    machines = {name: HardwareSpec.load(name) for name in MACHINES}
    cells = [_cells(hardware) for hardware in machines.values()]
    figure, axes = style.canvas(style.PAGE, 2.6)
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
    prices = facts["dollars_per_gb"]
    text = "; ".join(
        f"{kind} {least:g}" + ("" if least == most else f" to {most:g}")
        for kind, (least, most) in prices.items()
    )
    axes.text(
        0.5,
        -0.02,
        f"the paper's prices in dollars per GB: {text}",
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
            "HBM costs about $20 per GB and DDR5 $5 to 12. HBM is 8 (GH200) to 24 (H200) times as"
            " fast as host memory."
        ),
        finding=(
            f"The paper reports datasheet rates. A process reaches {hbm.ours:,.0f} of"
            f" {hbm.paper:,.0f} GB/s of the GH200's HBM. It reaches {link.measured:.0f} of"
            f" {link.paper:g} GB/s of an H200's PCIe in both directions together, as measured. The"
            " library plans with the rates that are reached. Prices are from the paper alone."
        ),
        made=(
            "Rates that one process reaches, from simulator/library/hardware, with their sources;"
            " the H200's were measured 2026-11-21."
        ),
    )


def _cells(hardware: HardwareSpec) -> list[str]:
    both = (
        hardware.duplex_fraction * hardware.h2d_gb_per_s,
        hardware.duplex_fraction * hardware.d2h_gb_per_s,
    )
    rate = (
        f"{hardware.host_memory.gb_per_s:,.0f}"
        if hardware.host_memory
        else f"{hardware.host_gb_per_s:,.0f} (sums)"
    )
    return [
        hardware.name,
        f"{hardware.device_bytes / 1e9:.0f}",
        f"{hardware.device_gb_per_s:,.0f}",
        hardware.link,
        f"{hardware.h2d_gb_per_s:g}, {hardware.d2h_gb_per_s:g}",
        f"{both[0]:.0f}, {both[1]:.0f}",
        f"{hardware.host_bytes / 1e9:.0f}",
        rate,
    ]


def _rows(machines: dict[str, HardwareSpec], facts: dict[str, Any]) -> list[TableRow]:
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
        size = machines[name].device_bytes if what == "HBM" else machines[name].host_bytes
        rows.append(
            TableRow(
                item=item,
                quantity="capacity",
                unit="GB",
                paper=value,
                sure=facts["sure"],
                ours=size / 1e9,
                note="ours: what a process can use, by the library",
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
