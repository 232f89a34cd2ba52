"""Again: stored rows predicted by today's simulator, from the calibration beside them; which of them came out worse."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatrain.experiments.prove.rows import Row, read_rows
from megatrain.experiments.prove.summary import device_error, step_error
from megatrain.simulator.assessment import assess
from megatrain.simulator.costs import cost_model
from megatrain.simulator.error_table import signed_percent
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.policies import lower

TOLERANCE = 0.001
"""by which an error may grow: rounding"""


def moved(rows: Iterable[Row], hardware: HardwareSpec) -> list[str]:
    """A line for each row whose schedule is another one today, or whose error of step time or device peak is larger than when it was stored."""
    found = []
    for row in rows:
        if row.failure or row.same_as:
            continue
        plan = row.plan
        try:
            digest = lower(plan).digest
            now = row_of(row, hardware) if digest == plan.digest else None
        except UserError as error:
            found.append(f"{row.name}: {error}")
            continue
        if now is None:
            found.append(f"{row.name}: lowers to schedule {digest}, ran as {plan.digest}")
            continue
        for what, error_of in (("step", step_error), ("device peak", device_error)):
            stored, today = error_of(row), error_of(now)
            if abs(today) > abs(stored) + TOLERANCE:
                found.append(f"{row.name}: {what} {signed_percent(today)}, was {signed_percent(stored)}")
    return found


def row_of(row: Row, hardware: HardwareSpec) -> Row:
    """`row` with what is predicted today."""
    choice = assess(row.plan, cost_model(hardware, row.plan.model, row.plan.workload))
    return msgspec.structs.replace(row, plan=choice.plan)


def moved_in(folder: Path) -> list[str]:
    """Of a folder that `python -m megatrain.experiments.prove` left."""
    return moved(read_rows(folder / "rows.jsonl"), HardwareSpec.load(str(folder / "hardware.toml")))
