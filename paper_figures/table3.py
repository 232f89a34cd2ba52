"""Table 3: correctness. MetaMathQA is not available here. Instead, a small model is fine-tuned by
our runtime under three plans, by plain PyTorch, and with bf16 weights alone. A model of 0.5 B
parameters is fine-tuned on a GPU by our runtime and with bf16 weights alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import msgspec

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.fine_tuning import (
    BF16,
    EXACT,
    FOLDER,
    FineTuning,
    MeanAndRange,
    SeedRun,
    fine_tuning,
)
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.common.table import Drawn, TableRow


class TrainedRow(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one way to train."""

    losses: list[float]
    """Training loss of each step, in nats per byte."""
    evaluations: list[tuple[int, float, float]]
    """(step, held-out loss in nats per byte, share of held-out bytes predicted correctly)."""
    weights_digest: str
    """Digest of the weights after the last step."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/table3.py` stores."""

    parameters: int
    """Number of parameters."""
    batch: int
    """Sequences in a step."""
    sequence: int
    """Bytes in a sequence."""
    steps: int
    """Steps of fine-tuning."""
    rate: float
    """Learning rate of fine-tuning."""
    steps_before: int
    """Steps of the training before, on other text."""
    text: str
    """What the texts are, and their checksum."""
    torch: str
    """PyTorch's version."""
    machine: str
    """Device, architecture and number of threads."""
    runs: dict[str, TrainedRow]
    """Way to train -> its result."""

    @property
    def exact(self) -> list[str]:
        """The ways to train with fp32 masters, plain PyTorch first."""
        return [PLAIN, *(name for name in self.runs if name.startswith("ours"))]

    def same_bits(self) -> bool:
        """Returns whether all ways with fp32 masters have the same losses and weights."""
        return all(
            self.runs[name].losses == self.runs[PLAIN].losses
            and self.runs[name].weights_digest == self.runs[PLAIN].weights_digest
            for name in self.exact
        )


MEAN_OF = 20
"""Steps in a mean of the training loss."""
PLAIN = "plain PyTorch, fp32 masters"
LINES = (
    ("-", "o", "#1f2933", 5.5),
    ("--", "s", "#E69F00", 4.4),
    (":", "D", "#009E73", 3.4),
    ((0, (3, 1, 1, 1)), "^", "#56B4E9", 2.4),
)
PAGE = f"../experiments/results/{FOLDER}/README.md"
"""The page of the runs with the larger model, seen from the page of the figures."""
BF16_LINE = ("-", "x", "#D55E00", 5.0)
LARGE_LINE = ((0, (6, 1.5)), "o", "#0072B2", 3.6)
"""The look of exact state at 0.5 B."""
RATE_LOOKS = (("#D55E00", ""), ("#f4c09a", "//////"))
"""Colour and hatch of the bars of each learning rate."""
RELATIVE: tuple[tuple[str, str, Callable[[SeedRun], float]], ...] = (
    ("fall of\nthe loss", "loss_fall", lambda run: run.fall),
    ("distance\nmoved", "moved", lambda run: run.moved),
    ("weights\nchanged", "changed", lambda run: run.changed),
)
"""(label, quantity in the table, value) of what is compared at 0.5 B."""


def draw(results: Results) -> Drawn:
    job, date = results.typed("table3", Job)
    large = fine_tuning(results)
    figure, (top, bottom) = style.canvas(style.PAGE, 4.9, nrows=2, ncols=3)
    _small(job, top)
    _large(large, bottom)
    handles, labels = top[1].get_legend_handles_labels()
    (of_exact, _), (exact, _) = bottom[0].get_legend_handles_labels()
    figure.legend([*handles, of_exact], [*labels, exact], loc="outside lower center", ncols=3)
    return Drawn(
        figure,
        [*_paper_rows(results), *_small_rows(job), *_large_rows(large)],
        "Table 3: correctness",
        claim=(
            "Exact match on MetaMathQA after fine-tuning is 88.99 % at 7B, 0.08 points above native"
            " training, and 92.52 % at 14B, 0.11 above ZeRO-3 and 0.16 above ZeRO-Infinity, with no"
            " native run."
        ),
        finding=_small_finding(job) + _large_finding(large),
        caption=_caption(job, date, large),
        caption_columns=128,
    )


def _small(job: Job, panels: Any) -> None:
    """Draws the curves of the small model."""
    loss_of_steps, left, right = panels
    for axes, what, unit in (
        (loss_of_steps, f"training loss, mean of {MEAN_OF}", "loss (nats per byte)"),
        (left, "held-out loss", ""),
        (right, "held-out accuracy", "share (%)"),
    ):
        style.plain(axes, f"{_size(job.parameters)}: {what}", "fine-tuning step", unit)
    for name, (line, marker, colour, size_of_marker) in zip(
        (*job.exact, BF16), (*LINES, BF16_LINE), strict=True
    ):
        means = [
            statistics.mean(job.runs[name].losses[start : start + MEAN_OF])
            for start in range(0, job.steps, MEAN_OF)
        ]
        steps, losses, shares = zip(*job.runs[name].evaluations, strict=True)
        middles = [start + MEAN_OF / 2 for start in range(0, job.steps, MEAN_OF)]
        for axes, x, values in (
            (loss_of_steps, middles, means),
            (left, steps, losses),
            (right, steps, [100 * share for share in shares]),
        ):
            axes.plot(
                x,
                values,
                linestyle=line,
                marker=marker,
                color=colour,
                markersize=size_of_marker,
                label=name,
                markerfacecolor="none" if name == PLAIN else colour,
            )


def _large(found: FineTuning, panels: Any) -> None:
    """Draws the held-out loss of the larger model at each learning rate, and what bf16 weights
    alone reach of exact state.
    """
    *curves, bars = panels
    size = _size(found.job.parameters)
    lowest, highest = [], []
    for axes, rate in zip(curves, found.rates, strict=True):
        style.plain(axes, f"{size}, rate {_rate(rate)}: held-out loss", "fine-tuning step", "")
        for way, (line, marker, colour, size_of_marker) in ((EXACT, LARGE_LINE), (BF16, BF16_LINE)):
            losses = found.held_out(way, rate)
            # Bars of the two ways stand side by side.
            shift = 1.5 if way == BF16 else -1.5
            axes.errorbar(
                [step + shift for step in found.steps],
                [loss.mean for loss in losses],
                yerr=_whiskers(losses),
                linestyle=line,
                marker=marker,
                color=colour,
                markersize=size_of_marker,
                elinewidth=0.9,
                capsize=2.2,
                label=f"{size}: ours, exact, all on the GPU" if way == EXACT else way,
            )
            lowest.append(min(loss.least for loss in losses))
            highest.append(max(loss.most for loss in losses))
    for axes in curves:
        axes.set_ylim(min(lowest) - 0.03, max(highest) + 0.03)
        axes.set_xticks(found.steps)
    curves[0].set_ylabel("loss (nats per byte)")
    _relative(found, bars)


def _relative(found: FineTuning, axes: Any) -> None:
    """Draws bars of what bf16 weights alone reach of exact state."""
    style.plain(
        axes, f"{_size(found.job.parameters)}: bf16 weights alone", "", "share of exact (%)"
    )
    width = 0.38
    for number, (rate, (colour, hatch)) in enumerate(zip(found.rates, RATE_LOOKS, strict=True)):
        shares = [
            MeanAndRange(*(100 * part for part in found.relative(rate, value)))
            for _, _, value in RELATIVE
        ]
        places = [place + (number - 0.5) * width for place in range(len(shares))]
        axes.bar(
            places,
            [share.mean for share in shares],
            width,
            yerr=_whiskers(shares),
            color=colour,
            edgecolor=style.INK,
            linewidth=0.5,
            hatch=hatch,
            error_kw={"elinewidth": 0.9, "capsize": 2.2, "ecolor": style.INK},
            label=f"rate {_rate(rate)}",
        )
        for place, share in zip(places, shares, strict=True):
            axes.text(place, share.most + 2, f"{share.mean:.1f}", ha="center", fontsize=7)
    axes.axhline(100, color=LARGE_LINE[2], linewidth=1.2)
    axes.set_ylim(0, 112)
    axes.set_yticks([0, 25, 50, 75, 100])
    axes.set_xticks(range(len(RELATIVE)), [label for label, *_ in RELATIVE])
    axes.legend(loc="upper right", bbox_to_anchor=(1.0, 0.9))


def _whiskers(spreads: list[MeanAndRange]) -> list[list[float]]:
    """Returns the distances of the least and of the largest values from the means."""
    return [
        [spread.mean - spread.least for spread in spreads],
        [spread.most - spread.mean for spread in spreads],
    ]


def _size(parameters: int) -> str:
    """Returns a number of parameters such as `0.1 M` or `0.5 B`."""
    return f"{parameters / 1e9:.1f} B" if parameters >= 1e8 else f"{parameters / 1e6:.1f} M"


def _rate(rate: float) -> str:
    """Returns a learning rate such as `1e-5`."""
    return f"{rate:.0e}".replace("e-0", "e-")


def _paper_rows(results: Results) -> list[TableRow]:
    facts = results.facts()["table3"]
    return [
        TableRow(
            item=item,
            quantity="exact_match",
            unit="%",
            paper=value,
            sure=facts["sure"],
            note="MetaMathQA; not reproduced",
        )
        for item, value in facts["percent"].items()
    ]


def _small_rows(job: Job) -> list[TableRow]:
    rows = []
    for name in (*job.exact, BF16):
        step, loss, share = job.runs[name].evaluations[-1]
        where = f"step {step}; weights {job.runs[name].weights_digest}"
        last = statistics.mean(job.runs[name].losses[-MEAN_OF:])
        for quantity, unit, value, note in (
            ("training_loss", "nats per byte", last, f"mean of the last {MEAN_OF} steps"),
            ("held_out_loss", "nats per byte", loss, where),
            ("held_out_right", "%", 100 * share, where),
        ):
            rows.append(
                TableRow(
                    item=f"substitute, {name}",
                    quantity=quantity,
                    unit=unit,
                    measured=value,
                    note=note,
                )
            )
    return rows


def _large_rows(found: FineTuning) -> list[TableRow]:
    """Returns the means over seeds, with the ranges as notes."""
    job, rows = found.job, []

    def add(item: str, quantity: str, unit: str, value: MeanAndRange, note: str = "") -> None:
        rows.append(
            TableRow(
                item=f"{job.model}, {item}",
                quantity=quantity,
                unit=unit,
                workload=f"{job.batch} x {job.sequence}",
                measured=value.mean,
                note=f"{note}{value.least:.6g} to {value.most:.6g}, {len(found.seeds)} seeds",
            )
        )

    for rate in found.rates:
        for way in (EXACT, BF16):
            item = f"rate {_rate(rate)}, {way}"
            for step, loss in zip(found.steps, found.held_out(way, rate), strict=True):
                add(item, "held_out_loss", "nats per byte", loss, f"step {step}: ")
            last = f"step {found.steps[-1]}: "
            right = found.spread(way, rate, lambda run: 100 * run.evaluations[-1][2])
            add(item, "held_out_right", "%", right, last)
            for _, quantity, value in RELATIVE:
                unit = "nats per byte" if quantity == "loss_fall" else "share"
                add(item, quantity, unit, found.spread(way, rate, value), last)
        for _, quantity, value in RELATIVE:
            share = found.relative(rate, value)
            add(f"rate {_rate(rate)}, {BF16} / {EXACT}", quantity, "share", share)
    return rows


def _small_finding(job: Job) -> str:
    (_, before, share_before), *_, (_, after, share) = job.runs[PLAIN].evaluations
    _, lost, lost_share = job.runs[BF16].evaluations[-1]
    bits = "the same bits in every loss and weight" if job.same_bits() else "DIFFERENT results"
    return (
        "This was not reproduced, because neither data nor models are available here. Instead, a"
        f" model of {_size(job.parameters)} parameters was trained on Python code and fine-tuned on"
        f" English text ({job.text}), which checks only the arithmetic. Ours under three plans and"
        f" plain PyTorch with fp32 masters give {bits} (held-out loss from {before:.3f} to"
        f" {after:.3f}, bytes predicted correctly from {share_before:.1%} to {share:.1%}). The"
        " paper's title says full precision, but the published code has bf16 weights. With bf16"
        f" weights alone, the loss falls by only {(before - lost) / (before - after):.0%} of that"
        f" ({lost:.3f}, {lost_share:.1%}) at the rate of {_rate(job.rate)}, because most updates"
        " are smaller than half the distance between two bf16 values."
    )


def _large_finding(found: FineTuning) -> str:
    first, *others = (
        (
            _rate(rate),
            found.relative(rate, lambda run: run.fall),
            found.spread(BF16, rate, lambda run: run.changed).mean,
        )
        for rate in found.rates
    )
    rate, share, changed = first
    text = (
        f" At {_size(found.job.parameters)} parameters on an H200, at the rate of {rate}, the"
        f" held-out loss with bf16 weights alone falls by {_range(share)} of its fall with exact"
        f" state ([{len(found.seeds)} seeds]({PAGE})), and {changed:.1%} of the weights change."
    )
    for rate, share, changed in others:
        text += f" At {rate}, it is {_range(share)}, and {changed:.1%} of the weights change."
    if found.exact_is_always_lower():
        text += " In each evaluation of each seed, exact state has the lower loss."
    return text


def _range(share: MeanAndRange) -> str:
    return f"{share.least:.1%} to {share.most:.1%}"


def _caption(job: Job, date: str, found: FineTuning) -> str:
    large = found.job
    return (
        f"Top: {_size(job.parameters)} parameters, {job.batch} x {job.sequence} bytes per step,"
        f" rate {_rate(job.rate)}, one seed; {job.machine}, torch {job.torch}, {date}. Bottom:"
        f" {large.model}'s shape, first trained for {large.steps_before} steps on code,"
        f" {large.batch} x {large.sequence} bytes per step, mean and range of"
        f" {len(found.seeds)} seeds; {large.machine['device']}, torch {large.machine['torch']},"
        f" {large.date}."
    )
