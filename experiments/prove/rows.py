"""Rows: one line of JSON for each case that was executed: its plan, what was foretold of it and what was seen."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from megatrain.simulator.errors import UserError
from megatrain.simulator.files import convert, write_text
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
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
        write_text(path, "".join(lines))
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(convert(msgspec.json.decode(line), Row, f"{path}, line {number}"))
        except msgspec.DecodeError:
            raise UserError(f"{path}, line {number}", found="no JSON", allowed="a line for each case", fix="remove this line") from None
    return rows


def append_row(path: Path, row: Row) -> None:
    """Written through to the disk: a machine that is taken away leaves the rows before it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(msgspec.json.encode(row) + b"\n")
        file.flush()
        os.fsync(file.fileno())
