"""Figure 1: TFLOPS by model size for all systems, on a GH200 and on an H200."""

from __future__ import annotations

from typing import Any, NamedTuple

from megatrain.paper_figures import curves, style
from megatrain.paper_figures.results import BenchmarkRecord, Results
from megatrain.paper_figures.table import Drawn, TableRow, rows_of
from megatrain.simulator.model.metrics import tflops_6n

SYSTEMS = (
    "megatrain_code",
    "paper_schedule",
    "ours",
    "zero3_offload",
    "fsdp2_offload",
    "zero_offload",
)
PANELS = {"gh200": "GH200, 447 GiB of host memory", "h200-paper": "H200, 1.5 TB of host memory"}
SIZES = {
    "qwen2.5-7b": 7,
    "qwen2.5-14b": 14,
    "qwen2.5-32b": 32,
    "qwen2.5-72b": 72,
    "gpt-oss-120b": 120,
}
_MEASURED = {
    "ours": "ours",
    "zero3": "zero3_offload",
    "fsdp2": "fsdp2_offload",
    "double_buffer": "paper_schedule",
}
_ASIDE = 0.83
"""The factor by which stars stand left of their model's size if they had less device memory or one
long sequence.
"""


class Star(NamedTuple):
    """A measured step on an H200."""

    system: str
    """Key of the system in `style.LOOKS`."""
    model: str
    """The model's name."""
    tokens: str
    """Sequences x tokens of each."""
    tflops: float
    """Speed by the 6N rule."""
    date: str
    """Day of the measurement."""
    limit: str = ""
    """How the step differed from the others: less device memory, other clipping
    or a long context.
    """
    where: str = ""
    """The run's folder or the benchmark's file."""

    @property
    def size(self) -> float:
        return 3 if self.model == "qwen2.5-3b" else SIZES[self.model]


def stars(results: Results) -> list[Star]:
    """Returns the measured steps of every stored run and benchmark of these model sizes. Ceilings
    are left out.
    """
    found = []
    for name, run in results.runs().items():
        work, model = run.plan.workload, run.plan.model
        speed = tflops_6n(model, work, run.measured.makespan_ns / 1e9)
        system, tokens = _MEASURED.get(run.plan.policy, "ours"), f"{work.batch} x {work.sequence}"
        found.append(
            Star(
                system,
                model.name,
                tokens,
                speed,
                run.date,
                _limit(work.sequence, run.plan.device_limit_bytes, work.clipping),
                name,
            )
        )
    for path, file in results.benchmarks().items():
        work, device = file["plan"]["workload"], file["arguments"]["device_memory"]
        for record in file["systems"]:
            if record["system"] in _MEASURED and not record["failure"]:
                tokens, limit = (
                    f"{work['batch']} x {work['sequence']}",
                    _limit(work["sequence"], device, work["clipping"]),
                )
                found.append(
                    Star(
                        _MEASURED[record["system"]],
                        file["model"],
                        tokens,
                        record["tflops_6n"],
                        file["date"],
                        limit,
                        path,
                    )
                )
    return [star for star in found if star.model in SIZES or star.model == "qwen2.5-3b"]


def _limit(sequence: int, device_bytes: int | None, clipping: str) -> str:
    if sequence > 8192:
        return f"{sequence // 1024}K\ncontext"
    less = f"{device_bytes / 2**30:.0f} GiB" if device_bytes and device_bytes < 100e9 else ""
    return less + (f",\nby {clipping}" if less and clipping != "global" else "")


def draw(results: Results) -> Drawn:
    records, date = results.typed("figure1", list[BenchmarkRecord])
    measured = stars(results)
    figure, axes = style.canvas(style.PAGE, 3.5, ncols=2, sharey=True)
    for panel, (setting, title) in zip(axes, PANELS.items(), strict=True):
        _panel(
            panel,
            [
                record
                for record in records
                if record.setting == setting and record.quantity in ("tflops", "runs")
            ],
            title,
        )
    _stars(axes[1], measured)
    axes[1].text(
        64, 6, "reported to run, no number", fontsize=7, ha="right", va="bottom", color=style.MUTED
    )
    axes[1].set_ylabel("")
    style.legend(figure, style.handles(SYSTEMS, stars=True, crosses=True), 4)
    made = (
        f"Predictions of {date}: library's GH200, H200, eager layers. Measured"
        f" {' and '.join(sorted({star.date for star in measured}))} on an H200 with 128 or 256 GiB"
        " of host memory: compiled layers. Left of 7B: less device memory (by update: how gradients"
        " are clipped), or one long sequence."
    )
    return _drawn(records, measured, figure, made)


def _stars(axes: Any, measured: list[Star]) -> None:
    for star in measured:
        style.measured(
            axes, [star.size * (_ASIDE if star.limit else 1)], [star.tflops], star.system
        )
        if star.system != "ours":  # markers are equal, and colours look alike in grey
            name = style.LOOKS[star.system].label.removesuffix(" offload").replace(" ", "\n")
            axes.text(
                star.size * 1.12,
                star.tflops,
                name,
                fontsize=7,
                va="bottom" if star.size == 3 else "top",
                linespacing=0.95,
            )
    for limit in sorted({star.limit for star in measured if star.limit}):
        low = min(star.tflops for star in measured if star.limit == limit)
        axes.text(
            7 * _ASIDE * 0.91, low, limit, fontsize=7, va="center", ha="right", linespacing=0.95
        )


def _panel(axes: Any, records: list[BenchmarkRecord], title: str) -> None:
    style.plain(
        axes, title, "model size (billions of parameters, log scale)", "TFLOPS (6N; at 120B active)"
    )
    axes.set_xscale("log")
    axes.set_xlim(2.6, 165)
    axes.set_ylim(0, 620)
    axes.set_xticks([3, *SIZES.values()], ["3", *(f"{size}" for size in SIZES.values())])
    axes.minorticks_off()
    speeds = [record for record in records if record.quantity == "tflops"]
    curves.predictions(
        axes, SYSTEMS, speeds, _size, lambda record: record.active_parameters / record.parameters
    )
    curves.papers_values(axes, SYSTEMS, records, _size, lambda record: 0.9 * _size(record))


def _size(record: BenchmarkRecord) -> float:
    return SIZES[record.model]


def _drawn(records: list[BenchmarkRecord], measured: list[Star], figure: Any, made: str) -> Drawn:
    rows = rows_of(records)
    for star in measured:
        limit = star.limit.replace("\n", " ")
        item = (
            f"{star.system} {star.model} on our H200, {star.tokens}{', ' if limit else ''}{limit}"
        )
        rows.append(
            TableRow(
                item=item,
                quantity="tflops",
                unit="TFLOPS",
                measured=star.tflops,
                note=f"measured, {star.where}",
            )
        )
    found = {row.item: row for row in rows if row.quantity == "tflops"}
    seven, fourteen, zero3 = found["MegaTrain 7b"], found["MegaTrain 14b"], found["ZeRO-3 14b"]
    best = {
        name: max(
            star.tflops
            for star in measured
            if star.system == name and (star.model, star.tokens) == ("qwen2.5-7b", "32 x 1024")
        )
        for name in _MEASURED.values()
        if name != "paper_schedule"
    }
    larger = max(star.tflops for star in measured if star.model == "qwen2.5-14b")
    return Drawn(
        figure,
        rows,
        "Figure 1: speed against size",
        claim=(
            f"MegaTrain reaches {seven.paper:g} TFLOPS at 7B and {fourteen.paper:g} at 14B on a"
            f" GH200, 1.84 times ZeRO-3's {zero3.paper:g}. Only MegaTrain runs 32B there, and 72B"
            " and 120B on an H200."
        ),
        finding=(
            f"The published code is predicted at {seven.published_code:.0f} and"
            f" {fourteen.published_code:.0f} TFLOPS. Its three forward passes per layer keep it"
            f" well below the paper's schedule ({fourteen.paper_schedule:.0f} at 14B) and ours"
            f" ({fourteen.ours:.0f}). ZeRO-3 with a batch that fills the device is predicted at"
            f" {zero3.published_code:.0f}, far above the paper's value, for which no batch is"
            " reported. Measured on our H200 at 7B and 32 x 1024 tokens, ours reaches"
            f" {best['ours']:.0f} (with compiled layers, whose gain is not in the library's costs),"
            f" ZeRO-3 {best['zero3_offload']:.0f} and FSDP2 {best['fsdp2_offload']:.0f}. Ours"
            f" reaches {larger:.0f} at 14B."
        ),
        made=made,
        footer_columns=122,
    )
