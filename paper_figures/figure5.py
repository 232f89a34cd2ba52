"""Figure 5: TFLOPS, host memory and device memory by depth, 28 to 180 layers of 7B's width on a
GH200.
"""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.paper_figures.common import curves, style
from megatrain.paper_figures.common.results import BenchmarkRecord, Results
from megatrain.paper_figures.common.table import Drawn, TableRow, rows_of
from megatrain.simulator.hardware.machine import HardwareSpec

SYSTEMS = (
    "megatrain_code",
    "paper_stated",
    "paper_schedule",
    "ours",
    "zero3_offload",
    "fsdp2_offload",
)
GH200_GIB = HardwareSpec.load("gh200-96").host_bytes / 2**30
DEVICE = {
    "code": "megatrain_code",
    "paper_stated": "paper_stated",
    "zero3_offload": "zero3_offload",
    "fsdp2_offload": "fsdp2_offload",
}
"""Name in the stored data -> system."""
MEASURED = {layers: f"h200-x2-depth/d{layers}.json" for layers in (28, 84, 132)}
"""Layers -> our benchmark of the paper's schedule with `bf16-sr` state."""
REPORTED_GB = 3.83
"""The device memory that the paper states as allocated at every depth, in GB; one reader."""


class DevicePeak(msgspec.Struct, frozen=True, kw_only=True):
    """Peaks of device memory at one depth."""

    layers: int
    """Decoder layers."""
    batch: int
    """Sequences in a step."""
    sequence: int
    """Tokens in a sequence."""
    gib: dict[str, float]
    """Name in the stored data, as in DEVICE -> peak in GiB."""


class Figure5Data(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/figure5.py` stores."""

    rows: list[BenchmarkRecord]
    """The paper's rows."""
    device: list[DevicePeak]
    """Predicted peaks, by ascending depth."""


def draw(results: Results) -> Drawn:
    data, date = results.typed("figure5", Figure5Data)
    records = data.rows
    figure, (speed, host, device) = style.canvas(style.PAGE, 3.9, ncols=3, width_ratios=(1.5, 1, 1))
    style.plain(speed, "speed", "", "TFLOPS (6N)")
    speed.set_ylim(0, 460)
    layers = sorted({record.layers for record in records})
    labels = {float(count): str(count) for count in layers}
    lines = curves.batch_ticks(speed, labels, records, lambda record: record.layers)
    speed.set_xlabel(f"decoder layers; {lines}")
    curves.predictions(speed, SYSTEMS, records, lambda record: record.layers)
    curves.papers_values(
        speed, SYSTEMS, records, lambda record: record.layers, lambda record: record.layers - 4
    )
    _host(host, records)
    style.plain(device, "device, 32 x 1,024", "decoder layers", "peak of the device (GiB)")
    for name, system in DEVICE.items():
        peaks = [peak.gib[name] for peak in data.device]
        style.predicted(device, [peak.layers for peak in data.device], peaks, system)
    runs = {layers: _own_run(results, path) for layers, path in MEASURED.items()}
    ran = [run["device_peak_bytes"] / 2**30 for run in runs.values()]
    style.measured(device, list(runs), ran, "paper_schedule")
    device.axhline(REPORTED_GB * 1e9 / 2**30, color="black", linewidth=0.9, linestyle="--")
    device.text(178, 6, "the paper: 3.83 GB\nallocated", fontsize=7, va="bottom", ha="right")
    device.set_ylim(0, 130)
    for axes in (host, device):
        axes.set_xticks([28, 56, 84, 132, 180])
    entries = style.handles(SYSTEMS, doubtful=True, inputs=True, stars=True, crosses=True)
    style.legend(figure, entries, 4)
    return _drawn(data, runs, figure, date)


def _own_run(results: Results, path: str) -> dict[str, Any]:
    """Returns the record of our runtime in a benchmark."""
    systems = results.benchmark(path)["systems"]
    return next(system for system in systems if system["system"] == "ours")


def _host(axes: Any, records: list[BenchmarkRecord]) -> None:
    style.plain(axes, "host", "decoder layers", "host memory (GiB)")
    found = sorted(
        (record for record in records if record.quantity == "rss_gib"),
        key=lambda record: record.layers,
    )
    x = [record.layers for record in found]
    values = [record.code.value if record.code else None for record in found]
    style.predicted(axes, x, values, "megatrain_code")
    for name in ("paper_stated", "ours"):
        peaks = [getattr(record, name).host_gib for record in found]
        style.predicted(axes, x, peaks, name)
    reported = [record.paper for record in found if record.paper is not None]
    style.reported(axes, x, reported, [record.how for record in found], "o")
    axes.axhline(GH200_GIB, color=style.MUTED, linewidth=0.8, linestyle=":")
    axes.text(29, GH200_GIB + 8, "usable on the GH200", fontsize=7, color=style.MUTED)
    axes.text(
        180,
        20,
        "code, paper: resident\nwithout gradients;\nothers: peaks",
        fontsize=7,
        color=style.MUTED,
        ha="right",
    )
    axes.set_ylim(0, 640)


def _drawn(data: Figure5Data, runs: dict[int, dict[str, Any]], figure: Any, date: str) -> Drawn:
    """Returns the figure with its rows and texts. `runs` has layers -> our runtime's record."""
    records = data.rows
    rows = rows_of(records)
    for record in records:
        if record.quantity == "rss_gib" and record.ours and record.paper_stated:
            rows.append(
                TableRow(
                    item=f"{record.item}: peak of the host",
                    quantity="host_gib",
                    unit="GiB",
                    paper_stated=record.paper_stated.host_gib,
                    paper_schedule=(
                        record.paper_schedule.host_gib if record.paper_schedule else None
                    ),
                    ours=record.ours.host_gib,
                )
            )
    for peak in data.device:
        for name, gib in peak.gib.items():
            rows.append(
                TableRow(
                    item=f"{name}, {peak.layers} layers: peak of the device",
                    quantity="device_gib",
                    unit="GiB",
                    workload=f"{peak.batch} x {peak.sequence}",
                    paper_stated=gib if name == "paper_stated" else None,
                    published_code=gib if name != "paper_stated" else None,
                )
            )
    for layers, run in runs.items():
        for place in ("device", "host"):
            rows.append(
                TableRow(
                    item=f"measured, {layers} layers: peak of the {place}",
                    quantity=f"{place}_gib",
                    unit="GiB",
                    machine="h200",
                    workload="32 x 1024",
                    measured=run[f"{place}_peak_bytes"] / 2**30,
                    note="bf16-sr state",
                )
            )
    found = {(row.item, row.quantity): row for row in rows}
    first, last = found["MegaTrain 28 layers", "tflops"], found["MegaTrain 132 layers", "tflops"]
    lost = [
        1 - (row / start)
        for row, start in ((last.paper, first.paper), (last.published_code, first.published_code))
        if row and start
    ]
    implied = {record.item: record.implied for record in records if record.implied}
    fsdp, zero3 = implied["FSDP 56 layers"], implied["ZeRO-3 84 layers"]
    others = [found.batch for found in implied.values() if found not in (fsdp, zero3)]
    shallow, deep = data.device[0].gib, data.device[-1].gib
    few, many = runs[min(runs)], runs[max(runs)]
    peaks = [run["device_peak_bytes"] / 2**30 for run in (few, many)]
    slower = 1 - many["tflops_6n"] / few["tflops_6n"]
    return Drawn(
        figure,
        rows,
        "Figure 5: depth",
        claim=(
            "MegaTrain loses little speed from 28 to 180 layers with device memory that does not"
            " depend on depth, while ZeRO-3 and FSDP collapse at 56 to 84 layers and then run out"
            " of memory."
        ),
        finding=(
            f"From 28 to 132 layers the code loses {lost[1]:.0%} in the prediction and"
            f" {lost[0]:.0%} in the paper. The device's peak at 32 x 1,024 tokens grows from"
            f" {shallow['code']:.1f} to {deep['code']:.1f} GiB, because every fourth layer's input"
            f" stays on it. Executed on an H200, 28 to 132 layers took {peaks[0]:.1f} to"
            f" {peaks[1]:.1f} GiB and lost {slower:.0%} of the speed. Small batches explain the"
            f" collapse to 43 TFLOPS: {fsdp.batch} for FSDP2 at 56 layers ({fsdp.value:.0f} TFLOPS)"
            f" and {zero3.batch} for ZeRO-3 at 84 ({zero3.value:.0f}). The other speeds imply"
            f" batches of {min(others)} to {max(others)}. By our account, ZeRO-3 at 84 layers and"
            " MegaTrain at 180 exceed the host's memory. So these runs swapped or stored less (bf16"
            " moments would fit)."
        ),
        caption=(
            f"Predictions of {date} from the library's GH200, sequences of 1,024 tokens, the"
            " largest batches that fit (28 layers: 158 as in Table 7). Stars: measured with 32 x"
            " 1,024 tokens on an H200, bf16-sr state."
        ),
    )
