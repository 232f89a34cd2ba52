"""Formats an error report as aligned plain text.

Errors are in percent, with their sign. Nothing is computed here.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.compare.error_report import ErrorReport

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[munμ]?s|[KMGT]?i?B)\b)")
_SHOWN_VIOLATIONS = 10
_LEGEND = [
    "error: (predicted - measured) / measured; below zero the prediction was too fast or too small",
    (
        "of the step, of a kind: the part of the step's error that vanishes if only these ops are"
        " predicted exactly"
    ),
    "of the step, of a part: (predicted - measured) / measured step; the parts add up",
    "exposed: the lane ran while compute did not",
    "stalled: the lane did not run although its next op was ready",
]


def format_report(report: ErrorReport, width: int = 1000) -> str:
    """Returns the whole report as text: the three errors of the step, op kinds, lanes, parts of the
    step, order, and memory.

    Lines are wrapped at `width` columns. A wider table is printed without its last columns, and the
    next line names them.
    """
    about = f"policy {report.policy}, {report.ops} ops, schedule {report.digest}"
    tables = [
        _fitted(_step(report), width, left=(0, 5)),
        _wrapped(_steps(report), width),
        [about, ""],
        _fitted(_kinds(report), width, left=(0, 9)),
        [""],
        _fitted(_lanes(report), width, left=(0, 9)),
        [""],
        _fitted(_parts(report), width),
        [""],
        _wrapped(_LEGEND, width),
        [""],
        _wrapped(_order(report), width),
    ]
    if report.memory:
        tables += [[""], _fitted(_memory(report), width)]
    return "".join(f"{line.rstrip()}\n" for table in tables for line in table)


def signed_percent(error: float | None) -> str:
    """Returns a relative error in percent with one decimal place, or `-` for None.

    >>> signed_percent(0.0123), signed_percent(-0.1), signed_percent(-1e-9), signed_percent(None)
    ('+1.2 %', '-10.0 %', '+0.0 %', '-')
    """
    return "-" if error is None else f"{round(100 * error, 1) + 0.0:+.1f} %"


def two_decimals(error: float | None) -> str:
    """Returns a relative error in percent with two decimal places, or `-` for None."""
    return "-" if error is None else f"{round(100 * error, 2) + 0.0:+.2f} %"


def format_times(*seconds: float) -> list[str]:
    """Returns durations as text."""
    return [format_seconds(value) for value in seconds]


def _errors(median: float | None, p95: float | None, worst: float | None, name: str) -> list[str]:
    """Returns the cells of the columns `_SPREAD`. `name` is the op with the worst error."""
    return [
        signed_percent(median),
        signed_percent(p95).removeprefix("+"),
        signed_percent(worst),
        name,
    ]


_SPREAD = ["median", "P95 |error|", "worst", "op"]


def _step(report: ErrorReport) -> list[list[str]]:
    """Returns the table of the three errors of the step."""
    predicted, measured = format_times(report.predicted_seconds, report.measured_seconds)
    rows = [
        ["step", "predicted", "measured", "error", "", ""],
        [
            "end to end",
            predicted,
            measured,
            two_decimals(report.error),
            "",
            "the median step's timeline",
        ],
    ]
    if report.replayed_seconds is None:
        return rows
    (replayed,) = format_times(report.replayed_seconds)
    engine, model = two_decimals(report.engine_error), two_decimals(report.cost_model_error)
    return [
        *rows,
        ["engine", replayed, measured, engine, "", "measured durations, replayed"],
        ["cost model", predicted, replayed, model, "", "effect of wrong durations on the step"],
    ]


def _steps(report: ErrorReport) -> list[str]:
    """Returns lines about the errors of single ops and of all steady steps of the run."""
    errors = _errors(
        report.median_op_error, report.p95_abs_op_error, report.worst_op_error, report.worst_op
    )
    lines = [
        f"one op's duration: median {errors[0]}, P95 |error| {errors[1]}, worst {errors[2]}"
        f" ({errors[3]})"
    ]
    if steps := report.steps:
        median, p95, worst, number = _errors(
            steps.median_error, steps.p95_abs_error, steps.worst_error, f"step {steps.worst_step}"
        )
        times = format_times(steps.predicted_seconds, steps.median_seconds)
        lines += [
            f"wall time of {steps.count} steady step{'s' if steps.count != 1 else ''}: predicted"
            f" {times[0]}, median {times[1]}",
            f"a step's wall time: median {median}, P95 |error| {p95}, worst {worst} ({number})",
        ]
    return lines


def _kinds(report: ErrorReport) -> list[list[str]]:
    return [
        ["op kind", "ops", "predicted", "measured", "error", "of the step", *_SPREAD],
        *(
            [
                kind.kind,
                str(kind.count),
                *format_times(kind.predicted_seconds, kind.measured_seconds),
                signed_percent(kind.error),
                signed_percent(kind.of_step),
                *_errors(kind.median_error, kind.p95_abs_error, kind.worst_error, kind.worst_op),
            ]
            for kind in report.kinds
        ),
    ]


def _lanes(report: ErrorReport) -> list[list[str]]:
    return [
        ["lane", "ops", "predicted", "measured", "error", "stalled", *_SPREAD],
        *(
            [
                lane.lane,
                str(lane.count),
                *format_times(lane.predicted_busy_seconds, lane.measured_busy_seconds),
                signed_percent(lane.busy_error),
                *format_times(lane.measured_stalled_seconds),
                *_errors(lane.median_error, lane.p95_abs_error, lane.worst_error, lane.worst_op),
            ]
            for lane in report.lanes
        ),
    ]


def _parts(report: ErrorReport) -> list[list[str]]:
    names = {"compute": "compute busy", "waiting": "no lane busy"}
    return [
        ["part of the step", "predicted", "measured", "of the step"],
        *(
            [
                names.get(part.name, f"exposed {part.name}"),
                *format_times(part.predicted_seconds, part.measured_seconds),
                signed_percent(part.of_step),
            ]
            for part in report.parts
        ),
    ]


def _order(report: ErrorReport) -> list[str]:
    """Returns lines about violations of the order and about ops that started late."""
    tolerance = format_seconds(report.tolerance_ns / 1e9)
    lines = [f"order: kept; no op started more than {tolerance} before what it waits for had ended"]
    if report.violations:
        lines = [f"order: broken {len(report.violations)} times (tolerance {tolerance})"]
        lines += [
            f"  {bad.op} started {format_seconds(bad.early_ns / 1e9)} before the end of"
            f" {bad.waits_for} ({bad.rule})"
            for bad in report.violations[:_SHOWN_VIOLATIONS]
        ]
    late = report.first_divergence
    if late:
        times = (
            f"{format_seconds(late.measured_start_ns / 1e9)} instead of"
            f" {format_seconds(late.replayed_start_ns / 1e9)}"
        )
        by = f"{format_seconds(late.late_ns / 1e9)} later than the measured durations explain"
        own = format_seconds(max(late.measured_start_ns - late.ready_ns, 0) / 1e9)
        lines += [
            f"first divergence: {late.op} started at {times}, {by},",
            f"  {own} after all that it waits for had ended",
        ]
    elif report.latest:
        limit, most = (
            format_seconds(report.divergence_ns / 1e9),
            format_seconds(report.latest.late_ns / 1e9),
        )
        lines.append(
            f"first divergence: none; no op started more than {limit} later than the measured"
            f" durations explain; {report.latest.op} did by {most}"
        )
    return lines


def _memory(report: ErrorReport) -> list[list[str]]:
    return [
        ["memory", "predicted", "measured", "error"],
        *(
            [
                peak.what,
                format_bytes(peak.predicted_bytes),
                format_bytes(peak.measured_bytes),
                "equal"
                if peak.predicted_bytes == peak.measured_bytes
                else two_decimals(peak.error),
            ]
            for peak in report.memory
        ),
    ]


def _wrapped(lines: Iterable[str], width: int) -> list[str]:
    """Returns `lines` wrapped at `width` columns. Continuation lines are indented. A number and its
    unit stay on one line.
    """
    return [
        part.replace("\x00", " ")
        for line in lines
        for part in textwrap.wrap(
            _BEFORE_UNIT.sub("\x00", line),
            width,
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        or [""]
    ]


def _fitted(rows: Sequence[Sequence[str]], width: int, left: Iterable[int] = (0,)) -> list[str]:
    """Returns the lines of `align` with as many of the first columns as fit in `width`. If columns
    are left out, another line names them.
    """
    count, left = len(rows[0]), set(left)
    while count > 1 and max(map(len, lines := align([row[:count] for row in rows], left))) > width:
        count -= 1
    left_out = [name for name in rows[0][count:] if name]
    return lines + _wrapped(
        [f"left out in {width} columns: {', '.join(left_out)}"] if left_out else [], width
    )


def align(rows: Sequence[Sequence[str]], left: Iterable[int] = (0,)) -> list[str]:
    """Returns the rows as lines of text, with each column as wide as its widest cell.

    The columns `left` are aligned to the left, all others to the right.
    """
    widths, to_left = [max(map(len, column)) for column in zip(*rows, strict=True)], set(left)

    def cell(column: int, text: str) -> str:
        return text.ljust(widths[column]) if column in to_left else text.rjust(widths[column])

    return ["  ".join(cell(column, text) for column, text in enumerate(row)) for row in rows]
