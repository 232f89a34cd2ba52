"""Compare: a predicted step against the measured one, op by op.

Every relative error is `(predicted - measured) / measured`: negative means that the prediction was too fast. Three errors are kept
apart. *End to end*: the steps' lengths. *Cost model*: the ops' durations, per kind. *Engine*: the measured durations played by the
engine against the measured step, so what the schedule's rules leave out (launch gaps, host work, waiting that is in no dependency).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from megatrain.simulator.schedule import Schedule
from megatrain.simulator.timeline import Timeline
from megatrain.simulator.units import format_seconds

CLOCK_SKEW_NS = 20_000
"""How far the clocks of two lanes may disagree: CUDA events and the host's clock are joined to within some microseconds."""


class KindError(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the ops of one kind. An error is None where nothing was measured to relate it to."""

    kind: str
    count: int
    predicted_seconds: float
    measured_seconds: float
    error: float | None
    """of the total"""
    median_error: float | None
    """over the ops, signed"""
    p95_abs_error: float | None
    """the smallest |error| that at least 95 % of the ops do not exceed"""
    worst_op: str
    worst_error: float | None


class LaneError(msgspec.Struct, frozen=True, kw_only=True):
    """What one lane did during the step; idle is the step less busy."""

    lane: str
    predicted_busy_seconds: float
    measured_busy_seconds: float
    busy_error: float | None
    predicted_idle_seconds: float
    measured_idle_seconds: float
    measured_stalled_seconds: float
    """of the measured idle: the next op had all it waits for and did not start (launch overhead, host work)"""


class OrderViolation(msgspec.Struct, frozen=True, kw_only=True):
    """An op was seen to start before one that it has to wait for had ended."""

    op: str
    waits_for: str
    rule: str
    """`dependency`, or `lane`: the op before it in its lane"""
    early_ns: int


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """The first op that started later than the measured durations explain."""

    op: str
    measured_start_ns: int
    replayed_start_ns: int

    @property
    def late_ns(self) -> int:
        """By how much, in nanoseconds."""
        return self.measured_start_ns - self.replayed_start_ns


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """How well a step was predicted. Plain data, JSON-able."""

    policy: str
    digest: str
    ops: int
    predicted_seconds: float
    measured_seconds: float
    error: float
    """end to end"""
    replayed_seconds: float | None
    engine_error: float | None
    kinds: tuple[KindError, ...]
    """longest measured total first"""
    lanes: tuple[LaneError, ...]
    tolerance_ns: int
    violations: tuple[OrderViolation, ...]
    """by measured start"""
    first_divergence: Divergence | None

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat row for the step, each kind and each lane (its busy time), with the same keys, for a table of many runs."""

        def row(scope: str, name: str, count: int, predicted: float, measured: float, error: float | None) -> dict[str, Any]:
            about = {"policy": self.policy, "digest": self.digest, "scope": scope, "name": name, "count": count}
            return {**about, "predicted_seconds": predicted, "measured_seconds": measured, "error": error}

        rows = [row("step", "step", 1, self.predicted_seconds, self.measured_seconds, self.error)]
        rows += [row("kind", kind.kind, kind.count, kind.predicted_seconds, kind.measured_seconds, kind.error) for kind in self.kinds]
        rows += [row("lane", lane.lane, 1, lane.predicted_busy_seconds, lane.measured_busy_seconds, lane.busy_error) for lane in self.lanes]
        return rows


def compare(
    predicted: Timeline, measured: Timeline, schedule: Schedule, *,
    replayed: Timeline | None = None, tolerance_ns: int = CLOCK_SKEW_NS, divergence: float = 0.01,
) -> ErrorReport:  # fmt: skip
    """How well `predicted` foretold `measured`, both of `schedule`.

    `replayed` is the measured durations played by the engine; without it there is no engine error and no first divergence.
    `tolerance_ns`: an op may start this much early before it breaks the order. `divergence`: an op diverges when it starts later
    than replayed by more than this share of the measured step. Raises ValueError for timelines of another schedule, for
    missing or unknown ops, and for a measured step of no length.
    """
    for timeline in (predicted, measured, *([replayed] if replayed else [])):
        _check(timeline, schedule)
    if not measured.makespan_ns:
        raise ValueError(f"timeline {measured.name}: a step of no length")
    kinds: dict[str, list[str]] = {}
    for op in schedule.ops:
        kinds.setdefault(op.kind, []).append(op.id)
    errors = [_kind_error(kind, ids, predicted, measured) for kind, ids in kinds.items()]
    return ErrorReport(
        policy=schedule.policy, digest=schedule.digest, ops=len(schedule.ops), predicted_seconds=predicted.makespan_ns / 1e9,
        measured_seconds=measured.makespan_ns / 1e9, error=(predicted.makespan_ns - measured.makespan_ns) / measured.makespan_ns,
        replayed_seconds=replayed.makespan_ns / 1e9 if replayed else None,
        engine_error=_relative(replayed.makespan_ns, measured.makespan_ns) if replayed else None,
        kinds=tuple(sorted(errors, key=lambda error: -error.measured_seconds)),
        lanes=tuple(_lane_error(lane, predicted, measured, schedule) for lane in schedule.lanes),
        tolerance_ns=tolerance_ns, violations=_violations(measured, schedule, tolerance_ns),
        first_divergence=_first_divergence(measured, replayed, divergence) if replayed else None,
    )  # fmt: skip


def _check(timeline: Timeline, schedule: Schedule) -> None:
    if timeline.digest != schedule.digest:
        raise ValueError(f"timeline {timeline.name}: of schedule {timeline.digest}, not of {schedule.digest}; compare steps of one schedule")
    odd = sorted(timeline.by_op.keys() ^ schedule.by_id.keys())
    if odd or len(timeline.spans) != len(schedule.ops):
        counts = f"{len(timeline.spans)} spans for {len(schedule.ops)} ops"
        raise ValueError(f"timeline {timeline.name}: {counts}; missing, unknown or twice: {', '.join(odd[:5]) or 'an op'}")


def _relative(predicted: float, measured: float) -> float | None:
    """Signed relative error; None where something was predicted and nothing measured."""
    if not measured:
        return None if predicted else 0.0
    return (predicted - measured) / measured


def _kind_error(kind: str, ids: Sequence[str], predicted: Timeline, measured: Timeline) -> KindError:
    totals = [sum(timeline.by_op[op].duration_ns for op in ids) for timeline in (predicted, measured)]
    pairs = {op: _relative(predicted.by_op[op].duration_ns, measured.by_op[op].duration_ns) for op in ids}
    errors = {op: error for op, error in pairs.items() if error is not None}
    worst = max(errors, key=lambda op: abs(errors[op]), default="")
    magnitudes = sorted(abs(error) for error in errors.values())
    return KindError(
        kind=kind, count=len(ids), predicted_seconds=totals[0] / 1e9, measured_seconds=totals[1] / 1e9, error=_relative(*totals),
        median_error=statistics.median(errors.values()) if errors else None,
        p95_abs_error=magnitudes[math.ceil(0.95 * len(magnitudes)) - 1] if errors else None,
        worst_op=worst, worst_error=errors.get(worst),
    )  # fmt: skip


def _lane_error(lane: str, predicted: Timeline, measured: Timeline, schedule: Schedule) -> LaneError:
    busy = [timeline.busy_ns(lane) for timeline in (predicted, measured)]
    spans, stalled_ns, ready_ns = measured.by_op, 0, 0
    for op in schedule.lanes[lane]:
        ready_ns = max([ready_ns, *(spans[other].end_ns for other in op.after)])
        stalled_ns += max(0, spans[op.id].start_ns - ready_ns)
        ready_ns = spans[op.id].end_ns
    return LaneError(
        lane=lane, predicted_busy_seconds=busy[0] / 1e9, measured_busy_seconds=busy[1] / 1e9, busy_error=_relative(*busy),
        predicted_idle_seconds=(predicted.makespan_ns - busy[0]) / 1e9, measured_idle_seconds=(measured.makespan_ns - busy[1]) / 1e9,
        measured_stalled_seconds=stalled_ns / 1e9,
    )  # fmt: skip


def _violations(measured: Timeline, schedule: Schedule, tolerance_ns: int) -> tuple[OrderViolation, ...]:
    spans = measured.by_op
    waits = [(op.id, other, "dependency") for op in schedule.ops for other in op.after]
    waits += [(second.id, first.id, "lane") for queue in schedule.lanes.values() for first, second in pairwise(queue)]
    found = [
        OrderViolation(op=op, waits_for=other, rule=rule, early_ns=spans[other].end_ns - spans[op].start_ns)
        for op, other, rule in waits
        if spans[op].start_ns < spans[other].end_ns - tolerance_ns
    ]
    return tuple(sorted(found, key=lambda violation: spans[violation.op].start_ns))


def _first_divergence(measured: Timeline, replayed: Timeline, divergence: float) -> Divergence | None:
    for span in sorted(measured.spans, key=lambda span: span.start_ns):
        replayed_ns = replayed.by_op[span.op].start_ns
        if span.start_ns - replayed_ns > divergence * measured.makespan_ns:
            return Divergence(op=span.op, measured_start_ns=span.start_ns, replayed_start_ns=replayed_ns)
    return None


def format_report(report: ErrorReport) -> str:
    """The report as aligned plain text of at most 120 columns: a few lines and two tables; errors in percent, with their sign."""
    times = _times(report.predicted_seconds, report.measured_seconds)
    head = [["step", "predicted", times[0], "measured", times[1], "error", signed_percent(report.error)]]
    if report.replayed_seconds is not None:
        head.append(["engine", "replayed", *_times(report.replayed_seconds), "", "", "error", signed_percent(report.engine_error)])
    kinds = [["op kind", "ops", "predicted", "measured", "error", "median", "P95 |error|", "worst", "op"]]
    for kind in report.kinds:
        errors = [signed_percent(error) for error in (kind.error, kind.median_error, kind.p95_abs_error, kind.worst_error)]
        errors[2] = errors[2].removeprefix("+")
        kinds.append([kind.kind, str(kind.count), *_times(kind.predicted_seconds, kind.measured_seconds), *errors, kind.worst_op])
    lanes = [["lane", "busy predicted", "measured", "error", "idle predicted", "measured", "stalled"]]
    for lane in report.lanes:
        busy = [*_times(lane.predicted_busy_seconds, lane.measured_busy_seconds), signed_percent(lane.busy_error)]
        lanes.append([lane.lane, *busy, *_times(lane.predicted_idle_seconds, lane.measured_idle_seconds, lane.measured_stalled_seconds)])
    about = f"policy {report.policy}, {report.ops} ops, schedule {report.digest}"
    tables = [_align(head), [about, ""], _align(kinds, left=(0, 8)), [""], _align(lanes), [""], _order_lines(report)]
    return "".join(f"{line.rstrip()}\n" for table in tables for line in table)


def _times(*seconds: float) -> list[str]:
    return [format_seconds(value) for value in seconds]


def signed_percent(error: float | None) -> str:
    """A relative error as people read it.

    >>> signed_percent(0.0123), signed_percent(-0.1), signed_percent(-1e-9), signed_percent(None)
    ('+1.2 %', '-10.0 %', '+0.0 %', '-')
    """
    return "-" if error is None else f"{round(100 * error, 1) + 0.0:+.1f} %"


def _order_lines(report: ErrorReport) -> list[str]:
    tolerance = format_seconds(report.tolerance_ns / 1e9)
    lines = [f"order: kept; no op started more than {tolerance} before what it waits for had ended"]
    if report.violations:
        lines = [f"order: broken {len(report.violations)} times (tolerance {tolerance})"]
        lines += [f"  {bad.op} started {format_seconds(bad.early_ns / 1e9)} before the end of {bad.waits_for} ({bad.rule})" for bad in report.violations[:10]]
    late = report.first_divergence
    if late:
        times = f"{format_seconds(late.measured_start_ns / 1e9)} instead of {format_seconds(late.replayed_start_ns / 1e9)}"
        lines.append(f"first divergence: {late.op} started at {times}, {format_seconds(late.late_ns / 1e9)} later than the measured durations explain")
    return lines


def _align(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Rows as text, columns as wide as their widest cell, right-aligned but for the columns `left`."""
    widths, to_left = [max(map(len, column)) for column in zip(*rows, strict=True)], set(left)

    def cell(column: int, text: str) -> str:
        return text.ljust(widths[column]) if column in to_left else text.rjust(widths[column])

    return ["  ".join(cell(column, text) for column, text in enumerate(row)) for row in rows]
