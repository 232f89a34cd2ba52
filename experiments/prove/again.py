"""Again: stored rows predicted by today's simulator, from the calibration beside them, and their steps replayed by it; which of them came out worse, and
how many lie where the calibration's spreads say.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from megatrain.experiments.prove.compared import replay_error
from megatrain.experiments.prove.rows import Row, read_rows
from megatrain.experiments.prove.summary import device_error, step_error
from megatrain.experiments.prove.timelines import StoredTimeline, read_timelines
from megatrain.simulator.assessment import assess
from megatrain.simulator.costs import cost_model
from megatrain.simulator.error_table import signed_percent
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.policies import lower
from megatrain.simulator.verdict import brief

TOLERANCE = 0.001
"""by which an error may grow: rounding"""


def moved(rows: Iterable[Row], hardware: HardwareSpec, timelines: Mapping[str, StoredTimeline]) -> list[str]:
    """A line for each row whose schedule is another one today, or whose error of step time, of device peak, or, where its timeline is stored, of the replay
    is larger than when it was stored.
    """
    found = []
    for row in rows:
        if row.failure or row.same_as:
            continue
        plan = row.plan
        try:
            digest = lower(plan).digest
            now = row_of(row, hardware, timelines.get(row.name)) if digest == plan.digest else None
        except UserError as error:
            found.append(f"{row.name}: {error}")
            continue
        if now is None:
            found.append(f"{row.name}: lowers to schedule {digest}, ran as {plan.digest}")
            continue
        errors = [("step", step_error(row), step_error(now)), ("device peak", device_error(row), device_error(now))]
        if row.replay_error is not None and now.replay_error is not None:
            errors.append(("replay", row.replay_error, now.replay_error))
        for what, stored, today in errors:
            if abs(today) > abs(stored) + TOLERANCE:
                found.append(f"{row.name}: {what} {signed_percent(today)}, was {signed_percent(stored)}")
    return found


def row_of(row: Row, hardware: HardwareSpec, stored: StoredTimeline | None) -> Row:
    """`row` with what is predicted today, and with today's replay of its step where that is stored."""
    plan = row.plan
    costs = cost_model(hardware, plan.model, plan.workload)
    schedule = lower(plan)
    replay = replay_error(schedule, stored.timeline(schedule), costs) if stored else row.replay_error
    return msgspec.structs.replace(row, plan=assess(plan, costs).plan, replay_error=replay)


def within_range(rows: Iterable[Row], hardware: HardwareSpec) -> tuple[int, int]:
    """(measured steps that lie in the range which the calibration's spreads give, measured steps)."""
    found = []
    for row in rows:
        if row.failure or row.same_as or row.step_seconds is None:
            continue
        told = brief(assess(row.plan, cost_model(hardware, row.plan.model, row.plan.workload)), hardware)
        found.append(
            told.step_seconds_low is not None and told.step_seconds_high is not None and told.step_seconds_low <= row.step_seconds <= told.step_seconds_high
        )
    return sum(found), len(found)


def moved_in(folder: Path) -> list[str]:
    """Of a folder that `python -m megatrain.experiments.prove` left."""
    return moved(read_rows(folder / "rows.jsonl"), HardwareSpec.load(str(folder / "hardware.toml")), read_timelines(folder / "timelines.jsonl"))
