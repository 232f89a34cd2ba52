"""Rows: one line of JSON for each repetition of a case, with its plan, its prediction and its
measurement. They are read as one row for each case.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

import msgspec

from megatrain.experiments.files.row_file import parse_rows
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.schedule.plan import Plan


class HeldoutRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One repetition of a case, or all of its repetitions together. Times are in seconds, sizes in
    bytes. Measured fields are None if the case failed.
    """

    name: str
    """The case."""
    model: str
    """The model's name in the suite."""
    policy: str
    """The policy that the case asks for. `best` is the planner's choice."""
    variant: str = ""
    """The change to the policy's best plan, or an empty text."""
    plan: Plan
    """The plan with its digest and its prediction, made before it ran."""
    extrapolated: tuple[str, ...] = ()
    """Op kinds whose cost lies outside the calibrated range."""
    failure: str = ""
    """The error that ended the case. Empty if it ran."""
    same_as: str = ""
    """Name of another case with the same plan. The plan was executed only once."""
    steps: tuple[float, ...] = ()
    """Wall-clock time of each steady step of the last repetition."""
    step_seconds: float | None = None
    """Median of `steps`. With several repetitions, the median of `repetitions`."""
    repetitions: tuple[float, ...] = ()
    """Median step of each repetition, which are minutes apart. Empty in the file, where each
    repetition has its own line.
    """
    failures: tuple[str, ...] = ()
    """Why other repetitions failed. Empty in the file, where each repetition has its own line."""
    device_peak_bytes: int | None = None
    """Peak of device memory."""
    host_bytes: int | None = None
    """Host memory: the plan's pools, and the growth of the process outside of them."""
    host_pool_bytes: int | None = None
    """The plan's host pools."""
    replay_error: float | None = None
    """Signed error of the engine, as a share: the step simulated with the measured durations of its
    ops, divided by the measured step, minus 1.
    """
    kinds: dict[str, tuple[float, float]] = {}
    """Op kind -> (predicted, measured) seconds in a step."""
    machine: str = ""
    """The device's name."""
    date: str = ""
    """Day of the measurement, as YYYY-MM-DD."""

    @property
    def group(self) -> str:
        """The group of the row, as text. Rows of one group have the same workload and memory limit,
        so their step times can be compared.
        """
        work = self.plan.workload
        limit = format_bytes(self.plan.device_limit_bytes)
        compiled = "/compiled" if work.compiled else ""
        return f"{self.model}/{work.accumulation}x{work.batch}x{work.sequence}/{limit}{compiled}"


def read_repetitions(path: Path) -> list[HeldoutRow]:
    """Returns the rows of every line of a file, or none if the file does not exist. A half-written
    last line is left out. Raises UserError for other content.
    """
    return parse_rows(path.read_bytes(), HeldoutRow, str(path))[0] if path.exists() else []


def by_case(repetitions: Iterable[HeldoutRow]) -> list[HeldoutRow]:
    """Returns one row for each case, in the order in which the cases first ran. Repetitions are
    ignored if their plan or machine differs from the last repetition's. A case that has the plan of
    another case gets that case's measurements.
    """
    found: dict[str, list[HeldoutRow]] = {}
    for row in repetitions:
        found.setdefault(row.name, []).append(row)
    cases = {name: _together(rows) for name, rows in found.items()}
    for name, row in cases.items():
        original = cases.get(row.same_as)
        if original and original.plan == row.plan:
            cases[name] = msgspec.structs.replace(
                original, name=name, policy=row.policy, variant=row.variant, same_as=row.same_as
            )
        elif row.same_as:  # the other case now has another plan
            cases[name] = msgspec.structs.replace(row, same_as="")
    return list(cases.values())


def _together(repetitions: list[HeldoutRow]) -> HeldoutRow:
    """Returns the last repetition that was measured, with the steps of all repetitions and their
    highest peaks. If all failed, returns the last one.
    """
    last = repetitions[-1]
    alike = [row for row in repetitions if (row.plan, row.machine) == (last.plan, last.machine)]
    measured = [row for row in alike if not row.failure]
    if not measured:
        return last
    steps = tuple(row.step_seconds for row in measured if row.step_seconds)
    return msgspec.structs.replace(
        measured[-1],
        repetitions=steps,
        step_seconds=statistics.median(steps),
        failures=tuple(row.failure for row in alike if row.failure),
        device_peak_bytes=max(row.device_peak_bytes or 0 for row in measured),
        host_bytes=max(row.host_bytes or 0 for row in measured),
    )


def read_rows(path: Path) -> list[HeldoutRow]:
    """Returns one row for each case of a file, as `by_case` does."""
    return by_case(read_repetitions(path))
