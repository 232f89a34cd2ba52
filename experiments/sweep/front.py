"""The Pareto front of a sweep: rows that no other row beats in both device memory and time per
token.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatrain.experiments.sweep.store import SweepRow

LEAST_GAIN = 0.01
"""The share by which each row of a shown front is faster than the row before."""


def front(rows: Iterable[SweepRow], least_gain: float = 0.0) -> list[SweepRow]:
    """Returns the front by ascending device memory. Each row takes less time per token than the row
    before, by more than the share `least_gain`. Among equal rows, the one with smaller limits is
    kept.
    """
    kept: list[SweepRow] = []
    for row in sorted(
        (row for row in rows if row.timed),
        key=lambda row: (row.device_peak_bytes, row.seconds_per_token, *_limits(row)),
    ):
        if not kept or row.seconds_per_token < (1 - least_gain) * kept[-1].seconds_per_token:
            kept.append(row)
    return kept


def _limits(row: SweepRow) -> tuple[int, int, str]:
    return row.device_limit_bytes, row.host_limit_bytes, row.key


def fastest(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Returns the fastest row of each policy, with the fastest first."""
    best: dict[str, SweepRow] = {}
    for row in sorted(
        (row for row in rows if row.timed),
        key=lambda row: (row.seconds_per_token, row.device_peak_bytes, *_limits(row)),
    ):
        best.setdefault(row.policy, row)
    return list(best.values())
