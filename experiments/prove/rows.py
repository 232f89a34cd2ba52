"""Rows: a line of JSON for each time that a case was executed, its visits: its plan, what was foretold of it and what was seen; read as one row a case."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatrain.experiments.row_file import parse_rows
from megatrain.simulator.plan import Plan
from megatrain.simulator.units import format_bytes


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One visit of a case, or all of them. Times in seconds, sizes in bytes; what was measured is None where it failed."""

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
    """each steady step of the last visit, by the clock"""
    step_seconds: float | None = None
    """their median; of several visits the median of each visit's"""
    visits: tuple[float, ...] = ()
    """that of each visit, minutes after the one before; empty in the file, where each has its line"""
    failures: tuple[str, ...] = ()
    """what other visits died of; likewise"""
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
        return f"{self.model}/{work.accumulation}x{work.batch}x{work.sequence}/{format_bytes(self.plan.device_limit_bytes)}"


def read_visits(path: Path) -> list[Row]:
    """Every line of a file; none where there is no file. A last line that was half written is left out. Raises UserError for other content."""
    return parse_rows(path.read_bytes(), Row, str(path))[0] if path.exists() else []


def by_case(visits: Iterable[Row]) -> list[Row]:
    """One row a case, in the order in which they first ran. What ran with another plan or on another machine than the last visit does not count; what is the
    plan of another case is what that one is.
    """
    found: dict[str, list[Row]] = {}
    for row in visits:
        found.setdefault(row.name, []).append(row)
    cases = {name: _together(rows) for name, rows in found.items()}
    for name, row in cases.items():
        original = cases.get(row.same_as)
        if original and original.plan == row.plan:
            cases[name] = msgspec.structs.replace(original, name=name, policy=row.policy, variant=row.variant, same_as=row.same_as)
        elif row.same_as:  # the other has another plan by now
            cases[name] = msgspec.structs.replace(row, same_as="")
    return list(cases.values())


def _together(visits: list[Row]) -> Row:
    """The last that was measured, with the steps of all and their highest peaks; the last one where all failed."""
    last = visits[-1]
    alike = [row for row in visits if (row.plan, row.machine) == (last.plan, last.machine)]
    measured = [row for row in alike if not row.failure]
    if not measured:
        return last
    steps = tuple(row.step_seconds for row in measured if row.step_seconds)
    return msgspec.structs.replace(
        measured[-1], visits=steps, step_seconds=statistics.median(steps), failures=tuple(row.failure for row in alike if row.failure),
        device_peak_bytes=max(row.device_peak_bytes or 0 for row in measured), host_bytes=max(row.host_bytes or 0 for row in measured),
    )  # fmt: skip


def read_rows(path: Path) -> list[Row]:
    """`by_case` of a file."""
    return by_case(read_visits(path))
