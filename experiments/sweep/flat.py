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
    last = {_kind(row): row.made_with for row in rows}
    found: dict[bytes, SweepRow] = {}
    for row in rows:
        if row.made_with == last[_kind(row)]:
            plan = (row.policy, row.workload, row.device_limit_bytes, row.host_limit_bytes)
            knobs = None if row.planned else row.knobs
            found[msgspec.msgpack.encode((_kind(row), plan, knobs))] = row
    return list(found.values())


def replaced(rows: Iterable[SweepRow], now: Iterable[SweepRow]) -> int:
    """Returns how many of `rows` were made with another simulator or another version of the
    machine's file than those of `now` of the same model and machine.
    """
    last = {_kind(row): row.made_with for row in now}
    return sum(last.get(_kind(row), row.made_with) != row.made_with for row in rows)


def _kind(row: SweepRow) -> tuple[str, str, bool]:
    """Returns the model and the machine of a row, and whether it was executed."""
    return row.model, row.hardware, row.executed


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
