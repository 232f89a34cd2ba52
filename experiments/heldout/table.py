"""Formats stored held-out rows as Markdown: the targets, the errors by policy, model and op kind,
the order of plans, and one line for each case.
"""

from __future__ import annotations

import posixpath
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from megatrain.experiments.heldout.rows import HeldoutRow
from megatrain.experiments.heldout.suites import BEST
from megatrain.experiments.heldout.summary import (
    ErrorSummary,
    device_error,
    format_value,
    host_error,
    judged,
    step_error,
    summarize_errors,
)
from megatrain.simulator.base.units import format_seconds
from megatrain.simulator.compare.error_report import relative_error
from megatrain.simulator.compare.error_table import signed_percent


def markdown(rows: Sequence[HeldoutRow]) -> str:
    """Returns the tables. The last table lists every row once, failed rows too. Errors are
    (predicted - measured) / measured.
    """
    ran = [row for row in rows if not row.failure]
    once, summary = [row for row in ran if not row.same_as], summarize_errors(rows)
    machines, dates = (
        ", ".join(sorted({value for value in values if value}))
        for values in ([row.machine for row in rows], [row.date for row in rows])
    )
    parts = [
        (
            f"{machines}, {dates}: {summary.cases} cases, {summary.executed} plans executed,"
            f" {summary.failed} failed.\nErrors are (predicted - measured) / measured."
        ),
        _targets(summary),
        *_repetitions(summary),
        _grouped("policy", once, lambda row: row.plan.policy),
        _grouped("model", once, lambda row: row.model),
        _order(summary),
        _kinds(once),
        _cases(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """Returns a Markdown table. All columns but the first `left` are right-aligned numbers."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _targets(summary: ErrorSummary) -> str:
    rows = [
        [
            what,
            format_value(what, value),
            target,
            judged(value, met).replace("MISSED", "**MISSED**"),
        ]
        for what, value, target, met in summary.targets()
    ]
    return _lines(["target", "value", "aimed at", ""], rows)


def _repetitions(summary: ErrorSummary) -> list[str]:
    """Returns the sentences on the spread between repetitions, or none without repetitions."""
    if summary.spread_between_repetitions is None:
        return []
    apart, worst = (
        signed_percent(summary.spread_between_repetitions),
        signed_percent(summary.spread_between_repetitions_worst),
    )
    return [
        f"{summary.visited_again} of the plans were executed again minutes later. The step times of"
        f" a plan\ndiffer by {apart} in the median, and by {worst} at most."
    ]


def _grouped(name: str, rows: Sequence[HeldoutRow], key: Callable[[HeldoutRow], str]) -> str:
    """Returns a table of step errors, grouped by the label that `key` returns for a row."""
    groups: dict[str, list[HeldoutRow]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    found = []
    for label, members in groups.items():
        errors, worst = (
            [step_error(row) for row in members],
            max(members, key=lambda row: abs(step_error(row))),
        )
        mean = signed_percent(statistics.mean(map(abs, errors))).removeprefix("+")
        found.append(
            [
                label,
                str(len(members)),
                mean,
                signed_percent(statistics.mean(errors)),
                signed_percent(step_error(worst)),
                worst.name,
            ]
        )
    return _lines([name, "plans", "step, mean absolute error", "mean", "worst", "of case"], found)


def _order(summary: ErrorSummary) -> str:
    """Returns a table of how well the predictions order the plans by speed."""
    rows = [
        [
            name,
            f"{tau:.2f}",
            f"{summary.tau_strict[name]:.2f}",
            f"{summary.tau_of_plans[name]:.2f}",
            signed_percent(summary.regret.get(name)),
        ]
        for name, tau in summary.tau.items()
    ]
    return _lines(
        [
            "same work, same cap",
            "tau of policies",
            "without ties",
            "tau of all plans",
            "regret of the planner's choice",
        ],
        rows,
    )


def _kinds(rows: Sequence[HeldoutRow]) -> str:
    """Returns a table of the errors of each op kind over all plans, with the longest kind first."""
    found: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for row in rows:
        for kind, (predicted, measured) in row.kinds.items():
            found[kind].append((predicted, measured, row.name))
    lines = []
    for kind, times in sorted(
        found.items(), key=lambda item: -sum(measured for _, measured, _ in item[1])
    ):
        errors = {
            name: error
            for predicted, measured, name in times
            if (error := relative_error(predicted, measured)) is not None
        }
        worst = max(errors, key=lambda name: abs(errors[name]), default="")
        totals = (
            sum(predicted for predicted, _, _ in times),
            sum(measured for _, measured, _ in times),
        )
        spread = (
            [
                signed_percent(statistics.median(errors.values())),
                signed_percent(errors[worst]),
                worst,
            ]
            if errors
            else ["-", "-", ""]
        )
        lines.append(
            [
                kind,
                str(len(times)),
                *map(format_seconds, totals),
                signed_percent(relative_error(*totals)),
                *spread,
            ]
        )
    return _lines(
        [
            "kind of op",
            "plans",
            "predicted",
            "measured",
            "error of the sum",
            "median by plan",
            "worst",
            "of case",
        ],
        lines,
    )


def _cases(rows: Sequence[HeldoutRow]) -> str:
    lines = []
    for row in rows:
        if row.failure:
            lines.append([row.name, *["-"] * 6, f"failed: {row.failure.replace('|', '/')}"])
            continue
        assert row.plan.prediction is not None
        assert row.step_seconds is not None
        times = [format_seconds(row.plan.prediction.step_seconds), format_seconds(row.step_seconds)]
        errors = [
            signed_percent(error)
            for error in (step_error(row), device_error(row), host_error(row), row.replay_error)
        ]
        note = (
            f"the plan of {_relative_name(row.name, row.same_as)}"
            if row.same_as
            else f"is {row.plan.policy}"
            if row.policy == BEST
            else ""
        )
        notes = [
            note,
            *(f"another repetition failed: {text.replace('|', '/')}" for text in row.failures),
        ]
        lines.append([row.name, *times, *errors, "; ".join(filter(None, notes))])
    return _lines(["case", "predicted", "measured", "step", "device", "host", "replay", ""], lines)


def _relative_name(name: str, other: str) -> str:
    """Returns `other` without the folders that it shares with `name`."""
    return other.removeprefix(posixpath.commonpath([name, posixpath.dirname(other)]) + "/")
