"""Table 7: contexts of 1K to 512K tokens at 7B, and the rules that can give its TFLOPS."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import BenchmarkRecord, Results
from megatrain.paper_figures.common.table import Drawn, TableRow, rows_of, value_of
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec

PEAK = 989.4
"""Peak of the GH200 in bf16 TFLOPS, dense."""


SYSTEMS = ("megatrain_code", "paper_stated", "paper_schedule", "ours")


class Context(NamedTuple):
    """A measured step of one micro-batch."""

    batch: int
    """Sequences in the micro-batch."""
    sequence: int
    """Tokens in a sequence."""
    seconds: float
    """Median time of the step."""
    device_gib: float
    """Peak of device memory in GiB."""
    date: str
    """Day of the measurement."""

    def seconds_of(self, record: BenchmarkRecord) -> float:
        """Returns the time in seconds, scaled to the tokens of the record's step. N micro-batches
        really take slightly less than N times as long, because they share one update.
        """
        return (
            self.seconds
            * (record.code.batch * record.code.sequence if record.code else 1)
            / (self.batch * self.sequence)
        )


def rules(record: BenchmarkRecord, seconds: float) -> tuple[float, float]:
    """Returns TFLOPS by 6 N T / s and by (6 N + 12 L h S) T / s: N parameters, T tokens in a step
    of s seconds, L layers of width h, and sequences of S tokens. The second rule does not halve
    attention for the causal mask.
    """
    assert record.code is not None
    tokens, model = record.code.batch * record.code.sequence, ModelSpec.load(record.model)
    attention = 12 * model.layers * model.hidden * record.code.sequence
    return (
        6 * record.parameters * tokens / seconds / 1e12,
        (6 * record.parameters + attention) * tokens / seconds / 1e12,
    )


def draw(results: Results) -> Drawn:
    records, date = results.typed("table7", list[BenchmarkRecord])
    steps = [record for record in records if record.quantity == "step_s"]
    reported = {record.item: record for record in records if record.quantity == "tflops"}
    names = [record.item.partition(", ")[2] for record in steps]
    x = list(range(len(steps)))
    figure, (left, right) = style.canvas(style.PAGE, 3.2, ncols=2)
    style.plain(
        left, "step time, the paper's batches", "context (tokens)", "seconds per step (log scale)"
    )
    left.set_yscale("log")
    left.set_ylim(10, 1600)
    for name in SYSTEMS:
        values = [_seconds(record, name) for record in steps]
        style.predicted(left, x, [value for value, _ in values], name)
        for place, (value, fits) in zip(x, values, strict=True):
            if value is not None and not fits:
                left.plot(
                    [place],
                    [value],
                    marker="x",
                    color="black",
                    markersize=5,
                    linestyle="none",
                    zorder=8,
                )
    style.reported(
        left, x, [record.paper or 0 for record in steps], [record.how for record in steps], "o"
    )
    left.set_yticks([10, 30, 100, 300, 1000], ["10", "30", "100", "300", "1,000"])
    _rates(right, x, steps, reported)
    found = measured(results)
    style.measured(
        left,
        x,
        [
            found[name].seconds_of(record) if name in found else math.nan
            for name, record in zip(names, steps, strict=True)
        ],
        "ours",
    )
    labels = [
        f"{name}\n{record.code.batch if record.code else ''}"
        for name, record in zip(names, steps, strict=True)
    ]
    for axes in (left, right):
        axes.set_xticks(x, labels)
        axes.set_xlabel("context (tokens); sequences per step")
        axes.minorticks_off()
    style.legend(
        figure,
        [*style.handles(SYSTEMS, doubtful=True, stars=True), *right.get_legend_handles_labels()[0]],
        4,
    )
    run = ", ".join(f"{context.batch} x {context.sequence:,}" for context in found.values())
    days = sorted({context.date for context in found.values()})
    caption = (
        f"Predictions of {date} from the library's GH200; a black cross exceeds its memory."
        f" Measured {', '.join(days)} on one H200: ours,"
        " accumulation 1,"
        f" {run} tokens per step, scaled to the paper's number of tokens."
    )
    rows = rows_of(records)
    for name, record in zip(names, steps, strict=True):
        if name in found:
            context, item = found[name], f"ours, 7b, {name}, on an H200"
            note = (
                f"measured: {context.seconds:.3f} s for 1 x {context.batch} x {context.sequence}"
                " tokens, accumulation 1"
            )
            rows += [
                TableRow(
                    item=item,
                    quantity="step_s",
                    unit="s",
                    measured=context.seconds_of(record),
                    note=note,
                ),
                TableRow(
                    item=item,
                    quantity="device_gib",
                    unit="GiB",
                    measured=context.device_gib,
                    note=note,
                ),
            ]
    for record in steps:
        for rule, rate in zip(
            ("6N", "6N + 12 L h S"), rules(record, record.paper or 1), strict=True
        ):
            rows.append(
                TableRow(
                    item=f"{record.item}: the paper's seconds by {rule}",
                    quantity="tflops_by_rule",
                    unit="TFLOPS",
                    paper=reported[record.item].paper,
                    sure=reported[record.item].sure,
                    published_code=None,
                    note=f"{rate:.1f} TFLOPS",
                )
            )
    impossible = rules(steps[3], steps[3].paper or 1)[1]
    off = [
        (reported[record.item].paper or 0) / rules(record, record.paper or 1)[0] - 1
        for record in steps[:2]
    ]
    late = [
        (record.code.value if record.code else 0) / (record.paper or 1) - 1 for record in steps[4:]
    ]
    contexts = ", ".join(
        f"{name} {context.batch * context.sequence / context.seconds:,.0f} tokens/s"
        for name, context in found.items()
    )
    ours = {name: record.ours for name, record in zip(names, steps, strict=True) if record.ours}
    room = HardwareSpec.load("gh200-96").device_bytes / 2**30
    longest = [name for name, plan in ours.items() if plan.fits][-1]
    above = next(
        (
            f" ({name} with eager layers needs {plan.device_gib:.1f} GiB, and {room:.1f} GiB are"
            " available)"
            for name, plan in ours.items()
            if not plan.fits
        ),
        "",
    )
    return Drawn(
        figure,
        rows,
        "Table 7: long contexts",
        claim="7B trains with 512K tokens of context on one GH200, at 284 to 407 TFLOPS.",
        finding=(
            "The table follows no single rule: 256K and 512K follow 6N + 12 L h S exactly, 1K is"
            f" {off[0]:.1%} and 8K {off[1]:.1%} above 6N, and 32K and 128K follow neither. By the"
            f" longer rule 128K in 26 s would be {impossible:,.0f} TFLOPS, above the chip's"
            f" {PEAK:g}. A token takes almost the same time from 1K to 32K, which padding that"
            " attention skips would explain. 256K and 512K are predicted"
            f" {late[0]:.1%} and {late[1]:.1%} too slow with an attention rate assumed from an"
            " H200, but by our account neither fits. The paper's 512K, and perhaps its 256K, has a"
            " chunked MLP, which the published code does not have. Ours without token pieces fits"
            f" up to {longest}{above}. With them, `megatrain check` predicts that 512K fits"
            " ([answers](../docs/answers.md)). Measured on an H200, attention is not free:"
            f" {contexts}."
        ),
        caption=caption,
    )


def _seconds(record: BenchmarkRecord, name: str) -> tuple[float | None, bool]:
    if name == "megatrain_code":
        return (record.code.value, record.code.fits) if record.code else (None, True)
    answer = {
        "ours": record.ours,
        "paper_stated": record.paper_stated,
        "paper_schedule": record.paper_schedule,
    }[name]
    if answer is None:
        return None, True
    value = value_of(
        answer, "step_s", record.code.batch * record.code.sequence if record.code else 1
    )
    return value if answer.fits else answer.step_s, answer.fits


def _rates(
    axes: Any, x: list[int], steps: list[BenchmarkRecord], reported: dict[str, BenchmarkRecord]
) -> None:
    """Draws the rates that follow from the paper's seconds, by two rules of counting."""
    style.plain(axes, "the paper's seconds by two rules", "context (tokens)", "TFLOPS")
    found = [rules(record, record.paper or 1) for record in steps]
    axes.plot(
        x,
        [rate for rate, _ in found],
        color="#0072B2",
        marker="s",
        markersize=4,
        linestyle="--",
        label="paper's seconds by 6N",
    )
    axes.plot(
        x,
        [rate for _, rate in found],
        color="#D55E00",
        marker="^",
        markersize=4,
        linestyle=":",
        label="by 6N + 12 L h S",
    )
    axes.axhline(PEAK, color=style.MUTED, linewidth=0.9)
    axes.text(0, PEAK + 15, f"peak of the chip, {PEAK:g}", fontsize=7, color=style.MUTED)
    style.reported(
        axes,
        x,
        [reported[record.item].paper or 0 for record in steps],
        [reported[record.item].sure for record in steps],
        "o",
    )
    axes.set_ylim(0, 1150)


def measured(results: Results) -> dict[str, Context]:
    """Returns context -> our measured step on an H200."""
    files = {
        "1K": results.benchmark("h200-qwen2.5-7b-batches/32x1024.json"),
        "8K": results.benchmark("h200-contexts/c8.json"),
        "32K": results.benchmark("h200-contexts/c32.json"),
        "128K": results.benchmark("h200-contexts/c128.json"),
        "256K": results.benchmark("h200-long-context/l262.json"),
        "512K": results.benchmark("h200-x2-qwen2.5-7b-524288/l512.json"),
    }
    found = {}
    for name, file in files.items():
        system = (
            next(
                (
                    system
                    for system in file["systems"]
                    if system["system"] == "ours" and not system["failure"]
                ),
                None,
            )
            if file
            else None
        )
        if file and system:
            work = file["plan"]["workload"]
            found[name] = Context(
                work["batch"],
                work["sequence"],
                system["step_seconds_median"],
                system["device_peak_bytes"] / 2**30,
                file["date"],
            )
    return found
