"""Beyond the paper: the error of every stored prediction, plotted over the measured value."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results
from megatrain.paper_figures.common.table import Drawn, TableRow

BAND, MOST = 0.03, 0.42
"""The target band of errors, and the largest error that is drawn, as shares of the measured value.
A larger one is drawn as an arrow at this error.
"""
_LIMIT = 0.58
"""The error at the edge of the panels. Beyond MOST is room for texts."""
OURS, HELD_OUT, DATASHEET, KIND = (
    "our steps",
    "our steps, held out",
    "our steps, not calibrated",
    "our op kinds",
)
OTHERS, LAYER, DEVICE, HOST = "others' steps, parts", "a layer", "device memory", "host memory"
LOOKS = {
    OURS: ("#009E73", "D"),
    HELD_OUT: ("#7a8f00", "x"),
    DATASHEET: ("#0b5f49", "P"),
    KIND: ("#56B4E9", "."),
    OTHERS: ("#D55E00", "^"),
    LAYER: ("#CC79A7", "v"),
    DEVICE: ("#0072B2", "s"),
    HOST: ("#E69F00", "o"),
}


class MeasuredCase(NamedTuple):
    """A prediction and its measurement, in seconds or GiB."""

    item: str
    """What was measured, and where."""
    kind: str
    """Key of LOOKS."""
    unit: str
    """`s` or `GiB`."""
    predicted: float
    """The predicted value."""
    measured: float
    """The measured value."""
    date: str
    """Day of the measurement."""

    @property
    def error(self) -> float:
        """The error as a share of the measured value."""
        return self.predicted / self.measured - 1


def cases(results: Results) -> list[MeasuredCase]:
    """Returns the cases of stored runs, of every benchmark, of held-out plans, and of the
    validation's predictions for other systems on our H200 machines. A benchmark's host memory is
    left out, because the whole process is measured and only the plan's pools are predicted.
    """
    found = []
    for name, run in results.runs().items():
        comparison, date = run.comparison, run.date
        found += [
            MeasuredCase(
                f"{name}: step",
                OURS,
                "s",
                comparison["predicted_seconds"],
                comparison["measured_seconds"],
                date,
            ),
            *(
                MeasuredCase(
                    f"{name}: {kind['kind']}",
                    KIND,
                    "s",
                    kind["predicted_seconds"],
                    kind["measured_seconds"],
                    date,
                )
                for kind in comparison["kinds"]
            ),
        ]
        if run.plan.prediction and "device_peak_bytes" in run.memory:
            found.append(
                _device(
                    name,
                    run.plan.prediction.device_peak_bytes,
                    run.memory["device_peak_bytes"],
                    date,
                )
            )
    for path, file in {**results.benchmarks(), **results.ablations()}.items():
        prediction, date = file["plan"]["prediction"], file["date"]
        for record in file["systems"]:
            if record["system"] == "ours" and not record["failure"] and prediction:
                kind = OURS if _calibrated(file) else DATASHEET
                found += [
                    MeasuredCase(
                        f"{path}: step",
                        kind,
                        "s",
                        prediction["step_seconds"],
                        record["step_seconds_median"],
                        date,
                    ),
                    _device(
                        path, prediction["device_peak_bytes"], record["device_peak_bytes"], date
                    ),
                ]
    for name, rows in results.heldout_rows().items():
        for row in rows:
            prediction, item = row["plan"]["prediction"], f"{name}/{row['name']}"
            found += [
                MeasuredCase(
                    f"{item}: step",
                    DATASHEET if _from_library(row["plan"]["hardware"]) else HELD_OUT,
                    "s",
                    prediction["step_seconds"],
                    row["step_seconds"],
                    row["date"],
                ),
                _device(
                    item, prediction["device_peak_bytes"], row["device_peak_bytes"], row["date"]
                ),
            ]
    return [
        case for case in [*found, *_of_others(results)] if case.measured > 0 and case.predicted > 0
    ]


def _from_library(hardware: str) -> bool:
    """Returns whether a plan was predicted from the library's rates, not from a calibration."""
    return not hardware.endswith(".toml")


def _device(name: str, predicted: int, measured: int, date: str) -> MeasuredCase:
    return MeasuredCase(
        f"{name}: device peak", DEVICE, "GiB", predicted / 2**30, measured / 2**30, date
    )


def _calibrated(file: dict[str, Any]) -> bool:
    """Returns whether the benchmark's machine was calibrated with layers of its shape."""
    plan, work = file["plan"], file["plan"]["workload"]
    shape = (file["model"], work["batch"], work["sequence"], work["compiled"])
    return (
        plan["hardware"].endswith(".toml")
        and shape == ("qwen2.5-7b", 32, 1024, True)
        and work["loss_chunk"] < work["batch"] * work["sequence"]
    )


def _of_others(results: Results) -> list[MeasuredCase]:
    """Returns the measurements on H200 machines among the published figures, except the paper's."""
    units, found = {"s": OTHERS, "ms": LAYER, "GiB": ""}, []
    for row in results.validation():
        if (
            row["source"].startswith("paper")
            or not row["predicted"]
            or row["input"]
            or not row["setting"].startswith("h200-")
            or row["unit"] not in units
        ):
            continue
        scale, unit = (1e-3, "s") if row["unit"] == "ms" else (1.0, row["unit"])
        kind = units[row["unit"]] or (
            HOST if row["quantity"] in ("host_gib", "rss_gib") else DEVICE
        )
        date = row["source"].rpartition(", ")[2]
        found.append(
            MeasuredCase(
                f"{row['item']}: {row['quantity']}",
                kind,
                unit,
                scale * float(row["predicted"]),
                scale * float(row["published"]),
                date,
            )
        )
    return found


def draw(results: Results) -> Drawn:
    found = cases(results)
    figure, panels = style.canvas(style.PAGE, 3.4, ncols=3, sharey=True, width_ratios=(1.9, 1.2, 1))
    apart = {
        "time": [case for case in found if case.unit == "s"],
        DEVICE: [case for case in found if case.kind == DEVICE],
        HOST: [case for case in found if case.kind == HOST],
    }
    for axes, (title, mine) in zip(panels, apart.items(), strict=True):
        _panel(axes, mine, mine[0].unit, title)
    for axes in panels[1:]:
        axes.set_ylabel("")
    used = [kind for kind in LOOKS if any(case.kind == kind for case in found)]
    entries: list[Any] = [
        Line2D(
            [],
            [],
            linestyle="none",
            marker=LOOKS[kind][1],
            color=LOOKS[kind][0],
            markersize=4,
            label=kind,
        )
        for kind in used
    ]
    entries.append(
        Line2D(
            [],
            [],
            linestyle="none",
            marker="^",
            color=style.INK,
            markerfacecolor="none",
            markersize=4,
            label=f"outside {MOST:.0%}",
        )
    )
    style.legend(figure, [*entries, Patch(facecolor="#d5dbe1", label="within 3 %")], 4)
    dates = f"{min(case.date for case in found)} to {max(case.date for case in found)}"
    rows = [
        TableRow(
            item=case.item,
            quantity=case.kind,
            unit=case.unit,
            ours=case.predicted,
            measured=case.measured,
            note=f"{case.error:+.1%}",
        )
        for case in found
    ]
    errors = {kind: [abs(case.error) for case in found if case.kind == kind] for kind in used}
    inside = sum(abs(case.error) <= BAND for case in found)
    text = ", ".join(f"{kind} {statistics.median(values):.1%}" for kind, values in errors.items())
    hard = [case for case in found if case.kind != DEVICE]
    inside_hard = sum(abs(case.error) <= BAND for case in hard)
    worst = max((case for case in found if case.kind == DEVICE), key=lambda case: abs(case.error))
    return Drawn(
        figure,
        rows,
        "Beyond the paper: predicted against measured",
        claim="None: the paper predicts nothing.",
        finding=(
            f"{inside} of {len(found)} cases are within 3 %. Device peaks are mostly exact; without"
            f" them, {inside_hard} of {len(hard)} are. The median errors are: {text}. Our"
            f" calibrated steps are within {max(errors[OURS]):.1%}. Steps held out of the"
            f" calibration are within {max(errors.get(HELD_OUT, [0])):.1%} (each on one H200), and"
            " steps that were not calibrated within"
            f" {max(errors.get(DATASHEET, [0])):.1%}; for most of these the simulator changed"
            " afterwards ([accuracy](../docs/accuracy.md)). Kinds of ops that take little time and"
            " share the GPU with a layer's compute (update, norm) have the largest errors. The"
            " largest error of a device peak is in"
            f" {Path(worst.item.partition(':')[0]).stem} ({worst.error:+.0%})."
        ),
        caption=(
            f"{len(found)} cases, all measured on H200 machines from {dates}; predictions as"
            " stored. Hollow marks lie beyond the panel, which states their errors. Workloads are"
            " in the runs' folders."
        ),
    )


def _panel(axes: Any, found: list[MeasuredCase], unit: str, title: str) -> None:
    """Draws the errors of cases with the same unit."""
    style.plain(
        axes, title, f"measured ({unit}, log scale)", "predicted - measured (% of measured)"
    )
    axes.set_xscale("log")
    axes.set_ylim(-100 * _LIMIT, 100 * _LIMIT)  # the texts are beyond all marks
    axes.axhspan(-100 * BAND, 100 * BAND, color="#d5dbe1", linewidth=0, zorder=1)
    axes.axhline(0, color=style.MUTED, linewidth=0.7)
    for case in found:
        colour, marker = LOOKS[case.kind]
        far = abs(case.error) > MOST
        up = case.error > 0
        axes.plot(
            [case.measured],
            [100 * MOST * (1 if up else -1) if far else 100 * case.error],
            color=colour,
            linestyle="none",
            markersize=4,
            alpha=0.85,
            marker=("^" if up else "v") if far else marker,
            markerfacecolor="none" if far else colour,
            zorder=4,
        )
    for sign, place, align in ((1, 0.99, "top"), (-1, 0.01, "bottom")):
        far_off: dict[str, list[str]] = {}
        for case in sorted(found, key=lambda case: case.measured):
            if sign * case.error > MOST:
                where, _, what = case.item.rpartition(": ")
                name = (
                    f"{what}, {Path(where).stem}" if case.kind == DEVICE else what.replace("_", " ")
                )
                far_off.setdefault(name, []).append(f"{case.error:+.0%}")
        text = textwrap.fill(
            "; ".join(f"{name} {', '.join(errors)}" for name, errors in far_off.items()),
            50 if unit == "s" else 26,
        )
        axes.text(
            0.01, place, text, fontsize=7, transform=axes.transAxes, va=align, color=style.MUTED
        )
    if unit == "GiB":
        axes.set_xticks([10, 20, 50, 100, 200], ["10", "20", "50", "100", "200"])
        axes.minorticks_off()
