"""A sweep as one flat table: a line for each plan, with a column for each axis and each result."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from megatrain.experiments.files.row_file import parse_rows
from megatrain.experiments.sweep.store import SweepRow
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import csv_text, write_text

if TYPE_CHECKING:
    import pandas as pd

ROWS = "rows.jsonl"
"""The name of the store in a sweep's folder."""
_MAY_BE_NONE = (
    "step_seconds",
    "tokens_per_second",
    "predicted_seconds",
    "measured_device_peak_bytes",
    "measured_host_peak_bytes",
)


def load_sweep(folder: str | os.PathLike[str]) -> pd.DataFrame:
    """Returns the rows of the sweep in `folder` as a DataFrame with the columns of `rows.csv`.

    Rows that later ones replace are left out (`latest`). Raises UserError if `folder` has no sweep.
    """
    import pandas as pd

    path = Path(folder) / ROWS
    if not path.is_file():
        raise UserError(
            str(path),
            found="no such file",
            allowed="a folder that `megatrain sweep --out` wrote",
            fix="run the sweep, or name its folder",
        )
    rows, _ = parse_rows(path.read_bytes(), SweepRow, str(path))
    frame = pd.DataFrame([flat_row(row) for row in latest(rows)])
    return frame.astype(dict.fromkeys(_MAY_BE_NONE, float))  # None becomes NaN


def latest(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Returns the last row of each plan, without rows that were made with another simulator or
    another version of the machine's file than the last row of the same model and machine.

    Rows whose knobs the planner chose are of one plan if they differ only in their knobs, because
    these are a result. Executed and simulated rows do not replace each other.
    """
    rows = list(rows)
    current = _current(rows)
    found: dict[bytes, SweepRow] = {}
    for row in rows:
        if _is_current(row, current):
            plan = (row.policy, row.workload, row.device_limit_bytes, row.host_limit_bytes)
            knobs = None if row.planned else row.knobs
            key = msgspec.msgpack.encode((_place(row), row.kind, plan, knobs))
            found.pop(key, None)  # so that the order is that of the last rows
            found[key] = row
    return list(found.values())


def outdated(rows: Iterable[SweepRow], now: Iterable[SweepRow]) -> list[SweepRow]:
    """Returns those of `rows` that were made with another simulator or another version of the
    machine's file than those of `now` of the same model and machine.
    """
    current = _current(now)
    return [row for row in rows if not _is_current(row, current)]


_Place = tuple[str, str, str]


def _place(row: SweepRow) -> _Place:
    """Returns the model and the machine of a row."""
    return row.model, row.hardware, row.machine


def _current(rows: Iterable[SweepRow]) -> dict[tuple[_Place, str], str]:
    """Returns (model and machine, kind of row) -> `made_with` of the last row. Impossible rows
    decide nothing, because they are made for both other kinds.
    """
    return {(_place(row), row.kind): row.made_with for row in rows if row.kind != "impossible"}


def _is_current(row: SweepRow, current: dict[tuple[_Place, str], str]) -> bool:
    """Returns whether a row was made with what `current` names for its model and machine. A row
    stored before 2026-11-30 does not say where the machine's file was, so any later row of a
    machine with the same name replaces it.
    """
    if not row.made_with:
        return not any(
            made_with and (model, hardware) == (row.model, row.hardware)
            for ((model, hardware, _), _), made_with in current.items()
        )
    kinds = ("executed", "simulated") if row.kind == "impossible" else (row.kind,)
    wanted = [current[_place(row), kind] for kind in kinds if (_place(row), kind) in current]
    return not wanted or row.made_with in wanted


def flat_row(row: SweepRow) -> dict[str, object]:
    """Returns column -> value for a row. Columns of axes have the names that `--over` takes."""
    knobs = msgspec.structs.asdict(row.knobs)
    placed = msgspec.structs.asdict(knobs.pop("placement"))
    return {
        "model": row.model,
        "hardware": row.hardware,
        "policy": row.policy,
        "planned": row.planned,
        **msgspec.structs.asdict(row.workload),
        **knobs,
        **{f"placement.{name}": layers for name, layers in placed.items()},
        "device_limit_bytes": row.device_limit_bytes,
        "host_limit_bytes": row.host_limit_bytes,
        "fits": row.timed,
        "step_seconds": row.step_seconds,
        "tokens_per_second": row.tokens_per_second,
        "predicted_seconds": row.predicted_seconds,
        "device_peak_bytes": row.device_peak_bytes,
        "host_peak_bytes": row.host_peak_bytes,
        "measured_device_peak_bytes": row.measured_device_peak_bytes,
        "measured_host_peak_bytes": row.measured_host_peak_bytes,
        "binding": row.binding,
        "decided_by": row.decided_by,
        "reason": row.reason,
    }


def write_csv(path: Path, rows: Iterable[SweepRow]) -> None:
    """Writes the last row of each plan as CSV. There must be at least one row."""
    write_text(path, csv_text([flat_row(row) for row in latest(rows)]))
