"""Figure 2: the architecture, drawn from the code's folders and a measured step's lanes."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from megatrain.paper_figures.common import style
from megatrain.paper_figures.common.results import Results, StoredRun
from megatrain.paper_figures.common.table import Drawn, TableRow
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule import LANES

ROOT = Path(__file__).parents[1]
RUN = "h200-qwen2.5-7b-24GiB"
BOXES: dict[str, tuple[float, float, float, str, tuple[str, ...]]] = {
    "model, workload": (0.0, 0.62, 0.2, "simulator", ("model",)),
    "machine": (0.0, 0.16, 0.2, "simulator", ("hardware", "library")),
    "plan": (0.26, 0.39, 0.2, "simulator", ("planner",)),
    "schedule": (0.52, 0.39, 0.2, "simulator", ("schedule", "policies")),
    "predicted timeline": (0.78, 0.78, 0.22, "simulator", ("engine", "costs", "memory")),
    "measured timeline": (0.78, 0.0, 0.22, "runtime", ("execution", "layers")),
    "error report": (0.78, 0.39, 0.22, "simulator", ("compare",)),
    "calibration": (0.26, 0.0, 0.2, "runtime", ("calibration",)),
}
"""Box -> (left, bottom, width, folder, files or folders in it). Sizes are shares of the axes."""
ARROWS = (
    ("model, workload", "plan"),
    ("machine", "plan"),
    ("plan", "schedule"),
    ("schedule", "predicted timeline"),
    ("schedule", "measured timeline"),
    ("predicted timeline", "error report"),
    ("measured timeline", "error report"),
    ("calibration", "machine"),
)
_HEIGHT = 0.22
_TINTS = {"simulator": "#e3f0fa", "runtime": "#e5f4ec"}


def draw(results: Results) -> Drawn:
    run = results.run(RUN)
    figure, (left, right) = style.canvas(style.PAGE, 4.6, nrows=2, height_ratios=(1.35, 1))
    _boxes(left)
    kinds = _lanes(right, run)
    rows = [
        TableRow(item=f"{lane}: {kind}", quantity="ops", unit="ops per step", measured=float(count))
        for lane, counted in kinds.items()
        for kind, count in counted.items()
    ]
    return Drawn(
        figure,
        rows,
        "Figure 2: architecture",
        claim=(
            "Host memory stores parameters and optimizer state. The GPU is a transient engine:"
            " layers stream through two buffers, gradients leave through a slab pool, and the"
            " optimizer runs on the CPU."
        ),
        finding=(
            "This is our architecture: two interpreters, the simulator and the runtime, read one"
            " schedule. So both have the same lanes. In a step of this plan,"
            f" {sum(kinds['h2d'].values())} copies go to the device and"
            f" {sum(kinds['d2h'].values())} leave it. The optimizer runs on the device (lane"
            " `update`). Newer plans also update layers on the host (lane `cpu`)."
        ),
        caption=(
            "Boxes name folders of the code. Ops are counted in the schedule of"
            f" {run.plan.model.name}, {run.plan.workload.batch} x {run.plan.workload.sequence}"
            f" tokens, on 24 GiB of one {run.where}."
        ),
    )


def _boxes(axes: Any) -> None:
    """Draws the boxes of modules and the arrows between them.

    Raises UserError if a module does not exist.
    """
    axes.set_axis_off()
    axes.set_xlim(-0.01, 1.01)
    axes.set_ylim(-0.03, 1.02)
    axes.set_title("one schedule, two interpreters")
    for name, (x, y, width, folder, files) in BOXES.items():
        for file in files:
            if not ((ROOT / folder / f"{file}.py").exists() or (ROOT / folder / file).is_dir()):
                raise UserError(
                    f"{ROOT / folder / file}",
                    found="no such file or folder",
                    allowed="a file or a folder of the code",
                    fix="correct BOXES in paper_figures/figure2.py",
                )
        axes.add_patch(
            FancyBboxPatch(
                (x, y),
                width,
                _HEIGHT,
                boxstyle="round,pad=0,rounding_size=0.02",
                facecolor=_TINTS[folder],
                edgecolor=style.INK,
                linewidth=0.7,
            )
        )
        axes.text(
            x + width / 2,
            y + 0.165,
            name,
            ha="center",
            va="center",
            fontsize=7.5,
            fontweight="bold",
        )
        lines = f"{folder}/\n" + ", ".join(files)
        axes.text(
            x + width / 2, y + 0.07, lines, ha="center", va="center", fontsize=7, color=style.MUTED
        )
    for source, target in ARROWS:
        axes.add_patch(_arrow(BOXES[source], BOXES[target]))


def _arrow(source: Any, target: Any) -> FancyArrowPatch:
    """Returns an arrow between the sides of two boxes that face each other."""
    (x, y, width, *_), (to_x, to_y, to_width, *_) = source, target
    if to_x >= x + width:
        ends = (x + width, y + _HEIGHT / 2), (to_x, to_y + _HEIGHT / 2)
    elif to_x + to_width <= x:
        ends = (x, y + _HEIGHT / 2), (to_x + to_width, to_y + _HEIGHT / 2)
    elif y > to_y:
        ends = (x + width / 2, y), (to_x + to_width / 2, to_y + _HEIGHT)
    else:
        ends = (x + width / 2, y + _HEIGHT), (to_x + to_width / 2, to_y)
    return FancyArrowPatch(
        *ends,
        arrowstyle="-|>",
        mutation_scale=7,
        color=style.INK,
        linewidth=0.8,
        shrinkA=1,
        shrinkB=1,
    )


def _lanes(axes: Any, run: StoredRun) -> dict[str, dict[str, int]]:
    """Draws a row for each lane with the kinds of ops that ran there, and returns their counts."""
    counted: dict[str, Counter[str]] = defaultdict(Counter)
    for span in run.measured.spans:
        counted[span.lane][span.kind] += 1
    axes.set_axis_off()
    axes.set_title("lanes, and the ops of one step")
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.03, 1.02)
    lanes = [lane for lane in LANES if lane != "exchange" or lane in counted]
    height = 1 / len(lanes)
    for row, lane in enumerate(lanes):
        top = 1 - row * height
        axes.add_patch(
            FancyBboxPatch(
                (0, top - height + 0.02),
                1,
                height - 0.03,
                boxstyle="round,pad=0,rounding_size=0.02",
                facecolor="#f3f5f7",
                edgecolor=style.MUTED,
                linewidth=0.5,
            )
        )
        axes.text(0.015, top - height / 2, lane, va="center", fontsize=7.5, fontweight="bold")
        names = [
            f"{kind.replace('_', ' ')} {count}" for kind, count in counted[lane].most_common()
        ] or ["nothing in this plan"]
        axes.text(
            0.13, top - height / 2, ", ".join(names), va="center", fontsize=7, color=style.INK
        )
    return {lane: dict(counter) for lane, counter in counted.items()}
