"""Formats a sweep as text: the number of plans by result, the fastest plan of each policy, and the
Pareto front.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatrain.experiments.sweep.front import fastest, front
from megatrain.experiments.sweep.store import SweepRow
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.compare.error_table import align
from megatrain.simulator.schedule.plan import Placement

_MEANINGS = {
    "engine": "timed by the engine",
    "evaluator": "timed exactly by the evaluator (no lane slows another)",
    "execution": "executed",
    "memory": "do not fit",
    "refused": "refused",
}
_REASONS = 3
_LEAST_GAIN = 0.01
"""A printed row of the front is faster than the row before by more than this share."""


def table(rows: Sequence[SweepRow]) -> str:
    """Returns a summary of the sweep as text. It does not list all rows."""
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
        *([f"  refused for {others:,} other reasons"] if others > 0 else []),
    ]
    if not any(row.timed for row in rows):
        return "\n".join(lines)
    for title, chosen in (
        ("fastest of each policy", fastest(rows)),
        (
            "Pareto front of device memory and time, each plan at least"
            f" {_LEAST_GAIN:.0%} faster than the one above",
            front(rows, _LEAST_GAIN),
        ),
    ):
        lines += ["", f"{title}:", *_lines(chosen)]
    return "\n".join(lines)


def settings(row: SweepRow) -> dict[str, str]:
    """Returns axis -> value of the row as text. If the planner chose the knobs, their value is
    `planned`: they are a result, so a table needs no columns for them. `rows.csv` has them.
    """
    knobs = {
        name: _text(name, getattr(row.knobs, name))
        for name in row.knobs.__struct_fields__
        if name != "placement"
    }
    placed = {
        f"placement.{name}": getattr(row.knobs.placement, name) or "-"
        for name in Placement.__struct_fields__
    }
    work = {name: str(getattr(row.workload, name)) for name in row.workload.__struct_fields__}
    if row.planned:
        knobs, placed = (dict.fromkeys(names, "planned") for names in (knobs, placed))
    return {
        **knobs,
        **placed,
        **work,
        "device_memory": format_bytes(row.device_limit_bytes),
        "host_memory": format_bytes(row.host_limit_bytes),
    }


def _text(name: str, value: object) -> str:
    return format_bytes(int(str(value))) if name.endswith("_bytes") else str(value)


def _varied(rows: Sequence[SweepRow]) -> list[str]:
    """Returns the axes in which the rows differ."""
    seen: dict[str, set[str]] = {}
    for row in rows:
        for name, value in settings(row).items():
            seen.setdefault(name, set()).add(value)
    return [name for name, values in seen.items() if len(values) > 1]


def _lines(rows: Sequence[SweepRow]) -> list[str]:
    """Returns the lines of the table. It has a column for each setting that varies between rows."""
    varied = _varied(rows)
    executed = any(row.predicted_seconds is not None for row in rows)
    head = [
        "policy",
        *(name.removeprefix("placement.") for name in varied),
        "step",
        *(["predicted"] if executed else []),
        "tokens/s",
        "device",
        "host",
        "by",
    ]
    cells = [head]
    for row in rows:
        values = settings(row)
        predicted = [format_seconds(row.predicted_seconds or 0)] if executed else []
        cells.append(
            [
                row.policy,
                *(values[name] for name in varied),
                format_seconds(row.step_seconds or 0),
                *predicted,
                f"{row.tokens_per_second or 0:,.0f}",
                format_bytes(row.device_peak_bytes),
                format_bytes(row.host_peak_bytes),
                row.decided_by,
            ]
        )
    return [line.rstrip() for line in align(cells)]
