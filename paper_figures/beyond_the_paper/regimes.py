"""Beyond the paper: the best plan by tokens per step and device memory."""

from __future__ import annotations

import statistics
from typing import NamedTuple

import msgspec
from matplotlib.patches import Patch, Rectangle

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results, StoredAnswer
from megatrain.paper_figures.common.table import Drawn, TableRow
from megatrain.simulator.base.errors import UserError

_MEASURED = "h200-regimes"
"""The folder of the measured plans."""
HOST = ("host updates some", "host updates most")
REGIMES = {
    "resident": ("resident: nothing streams", "#009E73", ""),
    "nothing streams": ("overlapped, nothing streams", "#66c2a5", "...."),
    "part streams": ("overlapped, part of the state streams", "#fdd49e", "----"),
    "all streams": ("overlapped, all state streams", "#E69F00", "////"),
    HOST[0]: ("overlapped, host updates some layers", "#cfe3f2", ""),
    HOST[1]: ("overlapped, host updates most layers", "#8fc1e3", r"\\\\"),
    "k_buffer": ("k_buffer: optimizer on the host", "#0072B2", "xxxx"),
    "none": ("nothing fits", "#ffffff", ""),
}


class Cell(StoredAnswer, frozen=True, kw_only=True):
    """The best plan at one place of the map."""

    device_limit_gib: int
    """Limit of device memory in GiB."""
    tokens: int
    """Tokens per step."""

    @property
    def kind(self) -> str:
        """Key of REGIMES."""
        return "none" if not self.fits else self.regime or self.policy


class Map(msgspec.Struct, frozen=True, kw_only=True):
    """The data that `experiments/paper_data/regimes.py` stores."""

    model: str
    """A model of the library."""
    machine: str
    """A machine of the library."""
    host_gib: float
    """Host memory in GiB."""
    cells: list[Cell]
    """The cells of the map."""


class MeasuredPlan(NamedTuple):
    """The best plan for a number of tokens and a limit of device memory, measured on a machine
    with fewer cores than the map's, for which it was planned and predicted.
    """

    tokens: int
    """Tokens per step."""
    device_limit_gib: int
    """Limit of device memory in GiB."""
    device_gib: float
    """Measured peak of device memory in GiB."""
    tokens_per_s: float
    """Measured tokens per second."""
    predicted: float
    """Predicted tokens per second."""
    date: str
    """Day of the measurement."""

    @property
    def error(self) -> float:
        """The error of the predicted step time, as a share of the measured one."""
        return self.tokens_per_s / self.predicted - 1


def measured_plans(results: Results) -> list[MeasuredPlan]:
    """Returns the measured plans of the suite `figures` of `megatrain.experiments.heldout`. Raises
    UserError if there are none.
    """
    if not (rows := results.heldout_rows().get(_MEASURED)):
        raise UserError(
            str(results.folder / _MEASURED),
            found="no measured plan",
            allowed="a folder that `python -m megatrain.experiments.heldout` wrote",
            fix="run it with --suite figures and this folder as --out",
        )
    found = []
    for row in rows:
        work, prediction = row["plan"]["workload"], row["plan"]["prediction"]
        tokens = work["batch"] * work["accumulation"] * work["sequence"]
        found.append(
            MeasuredPlan(
                tokens,
                row["plan"]["device_limit_bytes"] // 2**30,
                row["device_peak_bytes"] / 2**30,
                tokens / row["step_seconds"],
                tokens / prediction["step_seconds"],
                row["date"],
            )
        )
    return found


def draw(results: Results) -> Drawn:
    data, date = results.typed("regimes", Map)
    places = {(cell.tokens, cell.device_limit_gib) for cell in data.cells}
    plans = {
        place: plan
        for plan in measured_plans(results)
        if (place := (plan.tokens, plan.device_limit_gib)) in places
    }
    columns, lines = (
        sorted({cell.tokens for cell in data.cells}),
        sorted({cell.device_limit_gib for cell in data.cells}),
    )
    best = max(cell.tokens_per_s for cell in data.cells if cell.fits)
    figure, axes = style.canvas(style.PAGE, 4.3)
    for cell in data.cells:
        x, y = columns.index(cell.tokens), lines.index(cell.device_limit_gib)
        _, colour, hatch = REGIMES.get(cell.kind, (cell.kind, "#CC79A7", "++"))
        axes.add_patch(
            Rectangle(
                (x - 0.5, y - 0.5),
                1,
                1,
                facecolor=colour,
                edgecolor="white",
                linewidth=0.8,
                hatch=hatch,
            )
        )
        if cell.fits:
            plan = plans.get((cell.tokens, cell.device_limit_gib))
            error = f" ({plan.error:+.0%})" if plan else ""
            axes.text(
                x,
                y,
                f"{100 * cell.tokens_per_s / best:.0f}{error}",
                ha="center",
                va="center",
                fontsize=7,
                bbox=style.PLATE,
            )
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(lines) - 0.5)
    axes.set_xticks(range(len(columns)), [f"{tokens // 1024}K" for tokens in columns])
    axes.set_yticks(range(len(lines)), [str(gib) for gib in lines])
    axes.set_xlabel("tokens per step (sequences of 1,024)")
    axes.set_ylabel("device memory (GiB)")
    axes.set_title(
        f"best plan for {data.model} on an H200, and its speed (% of the best, {best:,.0f}"
        " tokens/s)"
    )
    axes.tick_params(length=0)
    kinds = {cell.kind for cell in data.cells}
    named = [
        (label, colour, hatch) for kind, (label, colour, hatch) in REGIMES.items() if kind in kinds
    ]
    style.legend(
        figure,
        [
            Patch(facecolor=colour, hatch=hatch, edgecolor=style.MUTED, linewidth=0.5, label=label)
            for label, colour, hatch in named
        ],
        3,
    )
    rows = [
        TableRow(
            item=f"{data.model}, {cell.tokens} tokens, {cell.device_limit_gib} GiB",
            quantity="tokens_per_s",
            unit="tokens/s",
            ours=cell.tokens_per_s if cell.fits else None,
            does_not_fit="" if cell.fits else "ours",
            note=(
                f"{REGIMES.get(cell.kind, (cell.kind,))[0]}; {cell.accumulation} x {cell.batch}"
                " sequences"
            ),
        )
        for cell in data.cells
    ]
    rows += [
        TableRow(
            item=(
                f"{data.model}, {plan.tokens} tokens, {plan.device_limit_gib} GiB, measured with 16"
                " cores"
            ),
            quantity="tokens_per_s",
            unit="tokens/s",
            ours=plan.predicted,
            measured=plan.tokens_per_s,
            note="planned and predicted for 16 cores and 116 GiB of host memory",
        )
        for plan in plans.values()
    ]
    errors = sorted((plan.error for plan in plans.values()), key=abs)
    many = {
        cell.device_limit_gib: cell.tokens_per_s
        for cell in data.cells
        if cell.tokens == columns[-1] and cell.fits
    }
    few = [cell for cell in data.cells if cell.tokens == columns[2] and cell.fits]
    slow, fast = (
        min(few, key=lambda cell: cell.device_limit_gib),
        max(few, key=lambda cell: cell.tokens_per_s),
    )
    fitting = [cell for cell in data.cells if cell.fits]
    by_host = sum(cell.kind in HOST for cell in fitting)
    return Drawn(
        figure,
        rows,
        "Beyond the paper: regimes",
        claim="None: the paper has one schedule for every machine.",
        finding=(
            f"With many tokens per step, memory hardly matters: at {columns[-1] // 1024}K, 24 GiB"
            f" reach {many[24] / max(many.values()):.0%} of the speed of {lines[-1]} GiB. With few"
            " tokens it decides the speed: at"
            f" {columns[2] // 1024}K, {fast.device_limit_gib} GiB are"
            f" {fast.tokens_per_s / slow.tokens_per_s:.1f} times as fast as"
            f" {slow.device_limit_gib}. With more tokens, not all activations can be saved, so the"
            f" best speed falls a little. In {by_host} of the {len(fitting)} cells that fit, the"
            " host updates layers that are not resident. Their optimizer state does not cross the"
            f" link. {len(errors)} cells were measured on one H200 with 16 cores, with plans and"
            f" predictions for it. The median error of their step times is"
            f" {statistics.median(map(abs, errors)):.1%}, the largest {errors[-1]:+.1%}."
        ),
        caption=(
            f"Predictions of {date}: the library's H200 (64 cores), {data.host_gib:.0f} GiB of host"
            " memory, eager layers. In brackets: error of the predicted step time where the cell's"
            " plan for 16 cores was measured,"
            f" {' and '.join(sorted({plan.date for plan in plans.values()}))}."
        ),
    )
