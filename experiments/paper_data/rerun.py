"""Runs the simulations of the figures, one after the other. All of them take about 11 minutes on
one core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatrain.experiments.paper_data import (
    figure1,
    figure3,
    figure4,
    figure5,
    figure6,
    formats,
    pareto,
    ratio,
    regimes,
    robustness,
    table4,
    tables8_9,
    times,
)
from megatrain.experiments.paper_data.published_vs_ours import published, published_vs_ours
from megatrain.experiments.paper_data.stored import store
from megatrain.experiments.validate_published import validate
from megatrain.experiments.validation.report import as_csv
from megatrain.simulator.base.files import write_text
from megatrain.simulator.hardware.shared import library_only

PUBLISHED = "published"


def _table3() -> Any:
    """Trains the small models of Table 3. Only this simulation imports torch."""
    from megatrain.experiments.paper_data import table3

    return table3.simulate()


SIMULATIONS: dict[str, Callable[[], Any]] = {
    "figure1": figure1.simulate,
    "figure3": figure3.simulate,
    "figure4": figure4.simulate,
    "figure5": figure5.simulate,
    "figure6": figure6.simulate,
    "figure7": lambda: published_vs_ours(published("paper Figure 7")),
    "table3": _table3,
    "table4": table4.simulate,
    "table7": lambda: published_vs_ours(published("paper Table 7")),
    "tables8_9": tables8_9.simulate,
    "regimes": regimes.simulate,
    "pareto": pareto.simulate,
    "ratio": ratio.simulate,
    "robustness": robustness.simulate,
    "times": times.simulate,
    "formats": formats.simulate,
}
"""Figure -> its simulation. `figure2`, `table1` and `predicted_measured` have none, because they
draw stored runs, folders or the library.
"""


@library_only()
def rerun(names: Iterable[str], folder: Path, report: Callable[[str], None]) -> None:
    """Runs the simulations of `names` and stores each result in the results folder `folder` when it
    is done. Names without a simulation are ignored. `published` stores the table of
    validate_published. Machines have the library's own estimates. `report` receives a line for each
    simulation.
    """
    for name in names:
        start = time.monotonic()
        if name == PUBLISHED:
            write_text(folder / "published" / "published.csv", as_csv(validate()))
        elif name in SIMULATIONS:
            store(folder, name, SIMULATIONS[name](), time.strftime("%Y-%m-%d"))
        else:
            continue
        report(f"{name}: simulated in {time.monotonic() - start:.0f} s")
