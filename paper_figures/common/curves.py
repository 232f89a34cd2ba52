"""Curves of speed over a size: the predictions of each system, and the paper's values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from matplotlib.axes import Axes

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import BenchmarkRecord
from megatrain.paper_figures.common.table import value_of

Place = Callable[[BenchmarkRecord], float]
"""Returns the place of a record on the horizontal axis."""


def predictions(
    axes: Axes,
    systems: Sequence[str],
    records: Iterable[BenchmarkRecord],
    x_of: Place,
    share_of: Callable[[BenchmarkRecord], float] = lambda _: 1.0,
) -> None:
    """Draws a line of TFLOPS for each system, with a cross where its plan does not fit. A record's
    speed is multiplied by `share_of` of the record.
    """
    for row, name in enumerate(systems):
        system = name if name.endswith("_offload") else "megatrain_code"
        points: dict[float, float | None] = {}
        crosses: list[float] = []
        for record in records:
            drawn_here = record.quantity in ("tflops", "runs")
            if not drawn_here or record.system != system or record.code is None:
                continue
            answer = {
                "ours": record.ours,
                "paper_stated": record.paper_stated,
                "paper_schedule": record.paper_schedule,
            }.get(name)
            fits = answer.fits if answer else record.code.fits
            value = value_of(answer, "tflops", 1) if answer else record.code.value
            drawn = fits and value is not None and record.quantity == "tflops"
            points[x_of(record)] = value * share_of(record) if drawn and value else None
            crosses += [] if fits else [x_of(record)]
        style.predicted(axes, sorted(points), [points[x] for x in sorted(points)], name)
        style.no_room(axes, crosses, row, len(systems), style.LOOKS[name].colour)


def batch_ticks(
    axes: Axes, labels: dict[float, str], records: Iterable[BenchmarkRecord], x_of: Place
) -> str:
    """Writes the label and the sequences per step of each system below each tick. `labels` maps
    places on the axis to labels. Returns the names of these lines, for the axis' label.
    """
    found: dict[str, dict[float, str]] = {}
    for record in records:
        if record.code and record.quantity in ("tflops", "runs"):
            found.setdefault(record.system, {})[x_of(record)] = str(record.code.batch)
    named = [name for name in ("megatrain_code", "zero3_offload", "fsdp2_offload") if name in found]
    axes.set_xticks(
        list(labels),
        [
            "\n".join([label, *(found[name].get(x, "-") for name in named)])
            for x, label in labels.items()
        ],
    )
    axes.minorticks_off()
    short = {
        "megatrain_code": "MegaTrain's code, ours",
        "zero3_offload": "ZeRO-3",
        "fsdp2_offload": "FSDP2",
    }
    return "sequences per step:\n" + "; ".join(short[name] for name in named)


def papers_values(
    axes: Axes,
    systems: Sequence[str],
    records: Iterable[BenchmarkRecord],
    x_of: Place,
    cross_of: Place,
) -> None:
    """Draws the paper's values. If the paper says that a model runs and gives no speed, a stroke is
    drawn at the bottom. If it says that the model does not run, a black cross is drawn at
    `cross_of`.
    """
    for record in records:
        if record.quantity == "tflops" and record.paper is not None:
            marker = style.LOOKS[record.system].marker
            style.reported(axes, [x_of(record)], [record.paper], [record.how], marker)
        elif record.quantity == "runs" and record.paper == 0:
            row = systems.index(record.system)
            style.no_room(axes, [cross_of(record)], row, len(systems), "black")
        elif record.quantity == "runs":
            style.reported(axes, [x_of(record)], [5], ["++"], "|")
