"""Rows: one line of JSON for each case that was executed: its plan, what was foretold of it and what was seen."""

from __future__ import annotations

import statistics
from pathlib import Path

import msgspec

from megatrain.experiments.row_file import parse_rows
from megatrain.simulator.plan import Plan
from megatrain.simulator.units import format_bytes


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One case. Times in seconds, sizes in bytes; what was measured is None for a case that failed."""

    name: str
    model: str
    policy: str
    """as the case asks for it: `best` is the planner's choice"""
    variant: str = ""
    plan: Plan
    """with its digest and its prediction, which were made before it ran"""
    extrapolated: tuple[str, ...] = ()
    """op kinds whose cost lies outside of what was calibrated"""
    failure: str = ""
    same_as: str = ""
    """another case, whose plan is this one: executed once"""
    steps: tuple[float, ...] = ()
    """each steady step, by the clock"""
    earlier: tuple[tuple[float, ...], ...] = ()
    """the same of earlier visits, each of them minutes before the next: a shared machine's host is another one by then"""
    step_seconds: float | None = None
    """the median of a visit; of several visits their medians' median"""
    device_peak_bytes: int | None = None
    host_bytes: int | None = None
    """the plan's pools, and by how much the process grew besides"""
    host_pool_bytes: int | None = None
    replay_error: float | None = None
    """measured durations played in the schedule, against the same step: the engine's own error, signed"""
    kinds: dict[str, tuple[float, float]] = {}
    """op kind -> (predicted, measured) seconds in a step"""
    machine: str = ""
    date: str = ""

    def visited(self, steps: tuple[float, ...]) -> Row:
        """With the steady steps of one more visit."""
        earlier = (*self.earlier, self.steps) if self.steps else ()
        typical = statistics.median(statistics.median(visit) for visit in (*earlier, steps))
        return msgspec.structs.replace(self, steps=steps, earlier=earlier, step_seconds=typical, failure="")

    @property
    def visits(self) -> int:
        """How often it was executed, with other cases in between."""
        return len(self.earlier) + bool(self.steps)

    @property
    def group(self) -> str:
        """Rows of one group do the same work under the same cap: they can be put in order."""
        work = self.plan.workload
        return f"{self.model}/{work.accumulation}x{work.batch}x{work.sequence}/{format_bytes(self.plan.device_limit_bytes)}"


def read_rows(path: Path) -> list[Row]:
    """Those of a file, the last of each case: one that failed is run again by the next command; none where there is no file. A last line that was half
    written is left out. Raises UserError for other content.
    """
    rows = parse_rows(path.read_bytes(), Row, str(path))[0] if path.exists() else []
    return list({row.name: row for row in rows}.values())
