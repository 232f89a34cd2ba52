"""Figure 1: TFLOPS by model size for all systems, on a GH200 and on an H200. The ratio of
MegaTrain to ZeRO-3 at 14B is in its table.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from megatrain.paper_figures.common import curves, style
from megatrain.paper_figures.common.results import BenchmarkRecord, Results
from megatrain.paper_figures.common.table import Drawn, TableRow, rows_of
from megatrain.paper_figures.figure4 import Size
from megatrain.simulator.model.metrics import tflops_6n
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

SYSTEMS = (
    "megatrain_code",
    "paper_stated",
    "paper_schedule",
    "ours",
    "zero3_offload",
    "fsdp2_offload",
    "zero_offload",
)
PANELS = {
    "gh200": "GH200, 427 of 447 GiB of host memory",
    "h200-paper": "H200, 1.5 TB of host memory",
}
PUBLISHED_STARS = {
    "published code 7b": "megatrain_code",
    "ours 14b, compiled": "ours",
    "ours 32b, compiled": "ours",
}
"""Rows of experiments/published/h200.csv that are drawn as stars."""
SIZES = {
    "qwen2.5-7b": 7,
    "qwen2.5-14b": 14,
    "qwen2.5-32b": 32,
    "qwen2.5-72b": 72,
    "gpt-oss-120b": 120,
}
_ALSO_MEASURED = {"qwen2.5-3b": 3, "mistral-large-2407": 123}
"""Models with stars and without predictions."""
_MEASURED = {
    "ours": "ours",
    "zero3": "zero3_offload",
    "fsdp2": "fsdp2_offload",
    "double_buffer": "paper_schedule",
}
_ASIDE = 0.83
"""Stars with another batch or less device memory are drawn left of their model's size, at the size
times this factor.
"""
_LONGEST = 8192
"""Tokens of a sequence above which a step is left out. Table 7 has the long contexts."""
_NEAR = 30
"""TFLOPS between stars whose labels would overlap."""


class Star(NamedTuple):
    """A measured step on an H200, or on an H100 with a state format other than `exact`."""

    system: str
    """Key of the system in `style.LOOKS`."""
    model: str
    """The model's name."""
    tokens: str
    """Sequences x tokens in a sequence, after the number of micro-batches if there are several."""
    tflops: float
    """Speed by the 6N rule."""
    date: str
    """Day of the measurement."""
    limit: str = ""
    """The label of a step with less device memory or other clipping."""
    state: str = "exact"
    """The state format."""
    where: str = ""
    """The run's folder or the benchmark's file."""

    @property
    def size(self) -> float:
        """The nominal number of parameters, in billions."""
        return {**SIZES, **_ALSO_MEASURED}[self.model]


def stars(results: Results) -> list[Star]:
    """Returns the measured steps of every stored run and benchmark of the models that are drawn.
    Ceilings, fp8 products, optimizers other than AdamW and long contexts are left out.
    """
    found = []
    for name, run in results.runs().items():
        work, model = run.plan.workload, run.plan.model
        if work.sequence > _LONGEST:
            continue
        speed = tflops_6n(model, work, run.measured.makespan_ns / 1e9)
        system, tokens = _MEASURED.get(run.plan.policy, "ours"), f"{work.batch} x {work.sequence}"
        found.append(
            Star(
                system,
                model.name,
                tokens,
                speed,
                run.date,
                _limit(run.plan.device_limit_bytes, work.clipping),
                where=name,
            )
        )
    files = {**results.usual_benchmarks(), **results.benchmarks_of_large_models()}
    for path, file in files.items():
        work, device = file["plan"]["workload"], file["arguments"]["device_memory"]
        for record in file["systems"] if work["sequence"] <= _LONGEST else ():
            if record["system"] in _MEASURED and not record["failure"]:
                several = f"{work['accumulation']} x " if work["accumulation"] > 1 else ""
                tokens, limit = (
                    f"{several}{work['batch']} x {work['sequence']}",
                    _limit(device, work["clipping"]),
                )
                found.append(
                    Star(
                        _MEASURED[record["system"]],
                        file["model"],
                        tokens,
                        record["tflops_6n"],
                        file["date"],
                        limit,
                        work.get("state", "exact"),
                        path,
                    )
                )
    return [star for star in found if star.model in SIZES or star.model in _ALSO_MEASURED]


def _limit(device_bytes: int | None, clipping: str) -> str:
    less = f"{device_bytes / 2**30:.0f} GiB" if device_bytes and device_bytes < 100e9 else ""
    return less + (f",\nby {clipping}" if less and clipping != "global" else "")


def more_stars(results: Results) -> list[Star]:
    """Returns the steps of `experiments/published/h200.csv` that no result folder has."""
    found = []
    for row in results.validation():
        if row["item"] in PUBLISHED_STARS and row["quantity"] == "step_s":
            work = Workload(batch=32, sequence=1024)
            speed = tflops_6n(ModelSpec.load(row["model"]), work, float(row["published"]))
            system, date = PUBLISHED_STARS[row["item"]], row["source"].rpartition(", ")[2]
            where = "experiments/published/h200.csv"
            found.append(Star(system, row["model"], "32 x 1024", speed, date, where=where))
    return found


def draw(results: Results) -> Drawn:
    records, date = results.typed("figure1", list[BenchmarkRecord])
    sizes, _ = results.typed("figure4", list[Size])
    measured = [*stars(results), *more_stars(results)]
    figure, axes = style.canvas(style.PAGE, 4.1, ncols=2, sharey=True)
    for panel, (setting, title) in zip(axes, PANELS.items(), strict=True):
        mine = [
            record
            for record in records
            if record.setting == setting and record.quantity in ("tflops", "runs")
        ]
        _panel(panel, mine, title)
    _stars(axes[1], measured)
    axes[1].text(
        64, 6, "reported to run, no number", fontsize=7, ha="right", va="bottom", color=style.MUTED
    )
    axes[1].set_ylabel("")
    axes[1].text(
        0.01,
        0.01,
        _host_of_120b(sizes),
        transform=axes[1].transAxes,
        fontsize=7,
        va="bottom",
        color=style.MUTED,
        linespacing=1.1,
    )
    style.legend(figure, style.handles(SYSTEMS, stars=True, crosses=True), 4)
    caption = (
        f"Predictions of {date}: library's GH200 and H200, sequences of 1,024, ours with compiled"
        " layers and others with eager ones, also where measured."
        f" Measured {min(star.date for star in measured)} to {max(star.date for star in measured)}"
        " on H200 machines with 128 to 512 GiB of host memory, 32 x 1,024 tokens unless labelled."
        " Stars left of a size have another"
        " batch or less device memory (by update: how gradients are clipped). Stars of 72B and 123B"
        " have 5.1 and 4.1 bytes of state a parameter, on an H100 with 512 GiB of host memory."
    )
    return _drawn(records, sizes, measured, figure, caption)


def _host_of_120b(sizes: list[Size]) -> str:
    """Returns the host memory of 120B and both readings of 1.5 TB."""
    large = next(size for size in sizes if size.model == "gpt-oss-120b").host_gb
    return (
        "120B needs, of 1,500 or 1,649 GB of host memory:\n"
        f"paper's schedule {large['paper_stated']:,.0f} (12 B),"
        f" {large['paper_schedule']:,.0f} (fp32),\n"
        f"MegaTrain's code {large['code_earlier']:,.0f}, ours {large['ours']:,.0f}"
    )


def _stars(axes: Any, measured: list[Star]) -> None:
    for star in measured:
        aside = _ASIDE if star.limit or star.tokens != "32 x 1024" else 1
        style.measured(axes, [star.size * aside], [star.tflops], star.system)
        if star.state != "exact":
            text = f"{star.size:g}B, H100"
            axes.text(star.size * 1.2, star.tflops + 16, text, fontsize=7, ha="right", va="bottom")
        if star.system != "ours":  # all stars have one marker, and colours look alike in grey
            name = style.LOOKS[star.system].label.partition(" ")[0]
            name = {"MegaTrain's": "code", "paper's,": "paper's"}.get(name, name)
            place = {"FSDP2": "bottom", "code": "top", "paper's": "top"}.get(name, "center")
            axes.text(star.size * 1.12, star.tflops, name, fontsize=7, va=place)
    lows: dict[str, float] = {}
    for star in measured:
        if star.limit:
            lows[star.limit] = min(star.tflops, lows.get(star.limit, star.tflops))
    labels: list[tuple[str, float]] = []
    for limit, low in sorted(lows.items(), key=lambda entry: entry[1]):
        if labels and low - labels[-1][1] < _NEAR:  # one label for stars that overlap
            labels[-1] = (f"{limit};\n{labels[-1][0]}", labels[-1][1])
        else:
            labels.append((limit, low))
    for label, low in labels:
        axes.text(
            7 * _ASIDE * 0.91, low, label, fontsize=7, va="center", ha="right", linespacing=0.95
        )


def _panel(axes: Any, records: list[BenchmarkRecord], title: str) -> None:
    style.plain(axes, title, "", "TFLOPS (6N; at 120B active)")
    axes.set_xscale("log")
    axes.set_xlim(2.6, 165)
    axes.set_ylim(0, 660)
    speeds = [record for record in records if record.quantity == "tflops"]
    labels = {3.0: "3", **{float(size): str(size) for size in SIZES.values()}}
    lines = curves.batch_ticks(axes, labels, records, _size)
    axes.set_xlabel(f"billions of parameters (log scale); {lines}")
    curves.predictions(
        axes, SYSTEMS, speeds, _size, lambda record: record.active_parameters / record.parameters
    )
    curves.papers_values(axes, SYSTEMS, records, _size, lambda record: 0.9 * _size(record))


def _size(record: BenchmarkRecord) -> float:
    return SIZES[record.model]


def _by_active(row: TableRow, record: BenchmarkRecord) -> TableRow:
    """Returns the row of a model with experts with TFLOPS of active parameters, as drawn."""
    share = record.active_parameters / record.parameters
    if share == 1 or row.quantity != "tflops":
        return row
    names = ("paper_stated", "paper_schedule", "published_code", "ours")
    values = {name: getattr(row, name) for name in names}
    return msgspec.structs.replace(
        row,
        **{name: None if value is None else share * value for name, value in values.items()},
        note="; ".join(filter(None, (row.note, "6 x active parameters"))),
    )


def _drawn(
    records: list[BenchmarkRecord],
    sizes: list[Size],
    measured: list[Star],
    figure: Any,
    caption: str,
) -> Drawn:
    """Returns the figure with its rows and texts."""
    rows = [_by_active(row, record) for row, record in zip(rows_of(records), records, strict=True)]
    found = {row.item: row for row in rows if row.quantity == "tflops"}
    seven, fourteen, zero3 = found["MegaTrain 7b"], found["MegaTrain 14b"], found["ZeRO-3 14b"]
    rows.append(
        TableRow(
            item="MegaTrain 14b / ZeRO-3 14b",
            quantity="ratio",
            unit="times",
            paper=1.84,
            sure="++",
            published_code=(fourteen.published_code or 0) / (zero3.published_code or 1),
            note=f"{fourteen.workload} against {zero3.workload} tokens; see the figure `ratio`",
        )
    )
    large = next(size for size in sizes if size.model == "gpt-oss-120b").host_gb
    rows.append(
        TableRow(
            item="gpt-oss-120b: host memory, of 1,500 or 1,649 GB",
            quantity="host_gb",
            unit="GB",
            paper_stated=large["paper_stated"],
            paper_schedule=large["paper_schedule"],
            published_code=large["code_earlier"],
            ours=large["ours"],
        )
    )
    for star in measured:
        limit = star.limit.replace("\n", " ")
        item = (
            f"{star.system} {star.model} on our {'H200' if star.state == 'exact' else 'H100'},"
            f" {star.tokens}{', ' if limit else ''}{limit}"
        )
        rows.append(
            TableRow(
                item=item,
                quantity="tflops",
                unit="TFLOPS",
                workload=star.tokens,
                measured=star.tflops,
                note=f"measured, {star.where}",
            )
        )
    return Drawn(
        figure,
        rows,
        "Figure 1: speed against size",
        claim=(
            f"MegaTrain reaches {seven.paper:g} TFLOPS at 7B and {fourteen.paper:g} at 14B on a"
            f" GH200, 1.84 times ZeRO-3's {zero3.paper:g}, and alone runs 32B there and 72B and"
            " 120B on an H200 with 1.5 TB."
        ),
        finding=(
            "With the batches of Tables 7 and 4, MegaTrain's code is predicted at"
            f" {seven.published_code:.0f} and {fourteen.published_code:.0f} TFLOPS. ZeRO-3 is"
            f" predicted at {zero3.published_code:.0f} with a batch that fills the device. The next"
            " figure has the ratio. With the paper's 12 bytes per parameter, 120B takes"
            f" {large['paper_stated']:,.0f} GB, which fits whether 1.5 TB means 1,500 or 1,649 GB."
            f" The code takes {large['code_earlier']:,.0f} GB and fits only into 1,649 GB, which we"
            " assume because of this claim. Our line has compiled layers and exact state on the"
            " H200. Our stars at 72B and 123B have compressed state on an H100."
        ),
        caption=caption,
        caption_columns=122,
    )
