"""Beyond the paper: time and energy for 1 B tokens by model size and machine."""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results, StoredAnswer
from megatrain.paper_figures.common.table import Drawn, TableRow

LOOKS = {
    "rtx3090": ("RTX 3090", "#8a949e", "v", (0, (1, 1.2))),
    "rtx4090": ("RTX 4090", "#E69F00", "s", (0, (5, 2))),
    "gh200-96": ("GH200", "#0072B2", "o", (0, (5, 1.5, 1, 1.5))),
    "h200": ("H200", "#009E73", "D", "-"),
}
SIZES = {3.09: "3", 7.62: "7", 14.8: "14", 32.8: "32", 72.7: "72", 116.8: "120"}


class TimePoint(msgspec.Struct, frozen=True, kw_only=True):
    """One model on one machine."""

    machine: str
    """A machine of the library."""
    host: str
    """Host memory, such as `256GiB`."""
    watts: float | None
    """Board power, or None if the library does not have it."""
    uncertainty: float
    """Relative uncertainty of speeds by the machine's file."""
    model: str
    """A model of the library."""
    parameters: int
    """Number of parameters."""
    hours: float
    """Hours for all tokens."""
    kwh: float | None
    """Board power times the hours, in kWh."""
    ours: StoredAnswer
    """The prediction for our best plan."""


class TimeData(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/times.py` stores."""

    tokens: int
    """Tokens to train on."""
    points: list[TimePoint]
    """A point for each machine and model."""


def draw(results: Results) -> Drawn:
    data, date = results.typed("times", TimeData)
    figure, (time, energy) = style.canvas(style.PAGE, 3.3, ncols=2)
    style.plain(
        time,
        "time for 1 B tokens on one GPU",
        "billions of parameters (log scale)",
        "days (log scale)",
    )
    style.plain(
        energy,
        "energy of the GPU for 1 B tokens",
        "billions of parameters (log scale)",
        "kWh (log scale)",
    )
    for machine, (label, colour, marker, line) in LOOKS.items():
        mine = [point for point in data.points if point.machine == machine and point.ours.fits]
        x = [point.parameters / 1e9 for point in mine]
        look: Any = {
            "color": colour,
            "marker": marker,
            "linestyle": line,
            "markersize": 4,
            "label": f"{label}, {mine[0].host.replace('GiB', ' GiB')} of host memory",
        }
        time.plot(x, [point.hours / 24 for point in mine], **look)
        energy.plot(x, [point.kwh or float("nan") for point in mine], **look)
        for point, place in zip(mine, x, strict=True):
            if machine == "h200":
                time.text(
                    place,
                    0.72 * point.hours / 24,
                    f"{point.hours / 24:.2g}",
                    fontsize=7,
                    ha="center",
                    va="top",
                )
    for axes in (time, energy):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(list(SIZES), list(SIZES.values()))
        axes.minorticks_off()
    time.set_ylim(0.2, 60)
    time.set_yticks([0.3, 1, 3, 10, 30], ["0.3", "1", "3", "10", "30"])
    energy.set_yticks([3, 10, 30, 100, 300], ["3", "10", "30", "100", "300"])
    style.legend(figure, time.get_legend_handles_labels()[0], 2)
    rows = []
    for point in data.points:
        fits = point.ours.fits
        note = (
            f"host {point.host}, {point.ours.accumulation} x {point.ours.batch} x"
            f" {point.ours.sequence} tokens, {point.ours.policy}; within"
            f" {point.uncertainty:.0%} by the machine's file"
        )
        for quantity, unit, value in (
            ("time", "machine-hours", point.hours),
            ("energy", "kWh", point.kwh),
            ("tokens_per_s", "tokens/s", point.ours.tokens_per_s),
        ):
            rows.append(
                TableRow(
                    item=f"{point.model} on {point.machine}, 1 B tokens",
                    quantity=quantity,
                    unit=unit,
                    ours=value if fits else None,
                    does_not_fit="" if fits else "ours",
                    note=note,
                )
            )
    found = {(point.machine, point.model): point for point in data.points}
    seven, large = found["h200", "qwen2.5-7b"], found["h200", "gpt-oss-120b"]
    small = found["rtx4090", "qwen2.5-7b"]
    fourteen = found["rtx4090", "qwen2.5-14b"]
    return Drawn(
        figure,
        rows,
        "Beyond the paper: how long, and how much energy",
        claim="None: the paper has no time to train and no energy.",
        finding=(
            f"1 B tokens of 7B take {seven.hours / 24:.1f} days ({seven.hours:.0f} hours) on an"
            f" H200 and {small.hours / 24:.1f} days ({small.hours:.0f} hours) on an RTX 4090, with"
            f" {seven.kwh or 0:.0f} and {small.kwh or 0:.0f} kWh of GPU energy. 14B takes"
            f" {fourteen.hours / 24:.1f} days on the RTX 4090 with 256 GiB of host memory. 120B"
            f" takes {large.hours / 24:.1f} days on one H200 with 1,649 GB. At 120B larger steps"
            " are faster, because all experts cross the link ([answers](../docs/answers.md))."
        ),
        caption=(
            f"Predictions of {date}: ours, best plan, 32 x 1,024 tokens per step, eager layers,"
            " exact state, library's machines; nothing was measured. Energy is board power times"
            " time, without the host. A line ends where a model does not fit."
        ),
    )
