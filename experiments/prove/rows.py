"""Rows: one line of JSON for each case that was executed: its plan, what was foretold of it and what was seen."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from megatrain.experiments.row_file import parse_rows, write_rows
from megatrain.simulator.plan import Plan


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
    step_seconds: float | None = None
    """their median"""
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

    @property
    def group(self) -> str:
        """Rows of one group do the same work under the same cap: they can be put in order."""
        work = self.plan.workload
        return f"{self.model}/{work.accumulation}x{work.batch}x{work.sequence}/{self.plan.device_limit_bytes}"


def read_rows(path: Path) -> list[Row]:
    """Those of a file; a last line that was half written is left out, and the file is mended. Raises UserError for other content."""
    if not path.exists():
        return []
    text = path.read_bytes()
    rows, whole = parse_rows(text, Row, str(path))
    if whole < len(text):
        os.truncate(path, whole)
    return rows


def append_row(path: Path, row: Row) -> None:
    """Written through to the disk: a machine that is taken away leaves the rows before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        write_rows(file, [row])
        os.fsync(file.fileno())
