"""Front: of a sweep's rows, those that no other beats in both device memory and time a token."""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.experiments.sweep.store import Row


def front(rows: Iterable[Row], least_gain: float = 0.0) -> list[Row]:
    """By device memory, each faster than the one before, in time by more than `least_gain`. Of equals the one of smaller limits."""
    kept: list[Row] = []
    for row in sorted((row for row in rows if row.timed), key=lambda row: (row.device_peak_bytes, row.seconds_per_token, *_limits(row))):
        if not kept or row.seconds_per_token < (1 - least_gain) * kept[-1].seconds_per_token:
            kept.append(row)
    return kept


def _limits(row: Row) -> tuple[int, int, str]:
    return row.device_limit_bytes, row.host_limit_bytes, row.key


def fastest(rows: Iterable[Row]) -> list[Row]:
    """The fastest row of each policy, fastest first."""
    best: dict[str, Row] = {}
    for row in sorted((row for row in rows if row.timed), key=lambda row: (row.seconds_per_token, row.device_peak_bytes, *_limits(row))):
        best.setdefault(row.policy, row)
    return list(best.values())
