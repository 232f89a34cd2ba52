"""Formats a sweep as text: the number of plans by result, the fastest plan of each policy, and the
Pareto front.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from megatrain.experiments.sweep.front import LEAST_GAIN, fastest, front
from megatrain.experiments.sweep.grid import ALIASES, AXES, KNOBS, LIMITS
from megatrain.experiments.sweep.store import SweepRow
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.compare.error_table import align
from megatrain.simulator.schedule.plan import Knobs

_MEANINGS = {
    "engine": "timed by the engine",
    "evaluator": "timed exactly by the evaluator (no lane slows another)",
    "execution": "executed",
    "memory": "do not fit",
    "refused": "refused",
}
_REASONS = 3


def table(rows: Sequence[SweepRow], axes: Sequence[str]) -> str:
    """Returns a summary of the sweep as text. It does not list all rows. Beside the policy, it has
    a column for each of the swept `axes` with more than one value in `rows`.
    """
    counts = Counter[str](row.decided_by for row in rows)
    reasons = Counter(row.reason for row in rows if row.decided_by == "refused")
    others = len(reasons) - _REASONS
    lines = [
        f"{len(rows):,} plans: "
        + ", ".join(
            f"{counts[name]:,} {meaning}" for name, meaning in _MEANINGS.items() if counts[name]
        ),
        *(
            f"  refused, {count:,} plans: {reason}"
            for reason, count in reasons.most_common(_REASONS)
        ),
        *([f"  refused for {others:,} other reasons, in rows.csv"] if others > 0 else []),
    ]
    if not any(row.timed for row in rows):
        return "\n".join(lines)
    varied = [name for name in axes if name != "policy" and _varies(rows, name)]
    for title, chosen in (
        ("fastest of each policy", fastest(rows)),
        (
            "Pareto front of device memory and time, each plan at least"
            f" {LEAST_GAIN:.0%} faster than the one above",
            front(rows, LEAST_GAIN),
        ),
    ):
        lines += ["", f"{title}:", *_lines(chosen, varied)]
    return "\n".join(lines)


def point(row: SweepRow, axes: Sequence[str]) -> str:
    """Returns the policy of the row and its values of `axes`, such as `resident, batch 8`."""
    named = [name for name in axes if name != "policy"]
    return ", ".join([row.policy, *(f"{_heading(name)} {_setting(row, name)}" for name in named)])


def same_results(rows: Sequence[SweepRow], axes: Sequence[str]) -> list[str]:
    """Returns the knobs and fields of the placement in `axes` that change no result: simulated
    plans that differ only in one of them have the same time and memory.
    """
    given = [row for row in rows if not row.planned and row.decided_by in ("engine", "evaluator")]
    return [name for name in axes if name in KNOBS and _changes_nothing(given, name)]


def _changes_nothing(rows: Sequence[SweepRow], name: str) -> bool:
    if not rows or not _varies(rows, name):
        return False
    results: dict[object, list[object]] = {}
    for row in rows:
        limits = row.device_limit_bytes, row.host_limit_bytes
        others = row.policy, _without(row.knobs, name), row.workload, limits
        found = row.step_seconds, row.device_peak_bytes, row.host_peak_bytes
        results.setdefault(others, []).append(found)
    compared = [found for found in results.values() if len(found) > 1]
    return bool(compared) and all(len(set(found)) == 1 for found in compared)


def _without(knobs: Knobs, name: str) -> Knobs:
    """Returns `knobs` with the default value of the axis `name`."""
    field = name.removeprefix("placement.")
    if field == name:
        return msgspec.structs.replace(knobs, **{name: getattr(Knobs(), name)})
    placement = msgspec.structs.replace(knobs.placement, **{field: ""})
    return msgspec.structs.replace(knobs, placement=placement)


def settings(row: SweepRow) -> dict[str, str]:
    """Returns axis -> value of the row as text, without the policy. If the planner chose the knobs,
    their value is `planned`: they are a result, so a table needs no columns for them. `rows.csv`
    has them.
    """
    return {name: _setting(row, name) for name in AXES if name != "policy"}


def _setting(row: SweepRow, name: str) -> str:
    """Returns the row's value of an axis as text."""
    if name in LIMITS:
        return format_bytes(getattr(row, LIMITS[name]))
    if name in KNOBS and row.planned:
        return "planned"
    if name.startswith("placement."):
        return getattr(row.knobs.placement, name.removeprefix("placement.")) or "-"
    value = getattr(row.knobs if name in Knobs.__struct_fields__ else row.workload, name)
    return format_bytes(value) if name.endswith("_bytes") else str(value)


def _heading(name: str) -> str:
    short = name.removeprefix("placement.")
    return short if ALIASES.get(short) == name else name


def _varies(rows: Sequence[SweepRow], name: str) -> bool:
    """Returns whether the rows have more than one value of an axis."""
    first = _setting(rows[0], name)
    return any(_setting(row, name) != first for row in rows)


def _lines(rows: Sequence[SweepRow], axes: Sequence[str]) -> list[str]:
    """Returns the lines of the table, with a column for each of `axes`."""
    executed = any(row.predicted_seconds is not None for row in rows)
    head = [
        "policy",
        *map(_heading, axes),
        "step",
        *(["predicted"] if executed else []),
        "tokens/s",
        "device",
        *(["measured"] if executed else []),
        "host",
        *(["measured"] if executed else []),
        "by",
    ]
    cells = [head]
    for row in rows:
        predicted = [format_seconds(row.predicted_seconds or 0)] if executed else []
        device, host = (
            [format_bytes(peak), *([format_bytes(measured or 0)] if executed else [])]
            for peak, measured in (
                (row.device_peak_bytes, row.measured_device_peak_bytes),
                (row.host_peak_bytes, row.measured_host_peak_bytes),
            )
        )
        cells.append(
            [
                row.policy,
                *(_setting(row, name) for name in axes),
                format_seconds(row.step_seconds or 0),
                *predicted,
                f"{row.tokens_per_second or 0:,.0f}",
                *device,
                *host,
                row.decided_by,
            ]
        )
    return [line.rstrip() for line in align(cells)]
