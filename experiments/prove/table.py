"""Table: a proof as Markdown: a line a case, the targets, errors by policy, model and kind of op, the order of plans. From stored rows alone."""

from __future__ import annotations

import posixpath
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from megatrain.experiments.prove.rows import Row
from megatrain.experiments.prove.suites import BEST
from megatrain.experiments.prove.summary import Summary, device_error, format_value, host_error, judged, step_error, summarize
from megatrain.simulator.error_report import relative_error
from megatrain.simulator.error_table import signed_percent
from megatrain.simulator.units import format_seconds


def markdown(rows: Sequence[Row]) -> str:
    """Every row once, also what failed; errors are (predicted - measured) / measured."""
    ran = [row for row in rows if not row.failure]
    once, summary = [row for row in ran if not row.same_as], summarize(rows)
    machines, dates = (", ".join(sorted({each for each in found if each})) for found in ([row.machine for row in rows], [row.date for row in rows]))
    parts = [
        f"{machines}, {dates}: {summary.cases} cases, {summary.executed} plans executed, {summary.failed} failed. Errors are (predicted - measured) / measured.",
        _targets(summary),
        *_visits(summary),
        _grouped("policy", once, lambda row: row.plan.policy),
        _grouped("model", once, lambda row: row.model),
        _order(summary),
        _kinds(once),
        _cases(rows),
    ]
    return "\n\n".join(parts) + "\n"


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table; all but the first `left` columns are numbers."""
    rule = ["---" if column < left else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def _targets(summary: Summary) -> str:
    rows = [[what, format_value(what, value), target, judged(value, met).replace("MISSED", "**MISSED**")] for what, value, target, met in summary.targets()]
    return _lines(["target", "value", "aimed at", ""], rows)


def _visits(summary: Summary) -> list[str]:
    """How far the machine itself repeats a step."""
    if summary.visits_apart is None:
        return []
    apart, worst = signed_percent(summary.visits_apart), signed_percent(summary.visits_apart_worst)
    return [f"Executed again minutes later: {summary.visited_again} of the plans. Visits lie {apart} apart in the median, {worst} at most."]


def _grouped(name: str, rows: Sequence[Row], key: Callable[[Row], str]) -> str:
    """Errors of the step by what `key` says of a row."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    found = []
    for label, members in groups.items():
        errors, worst = [step_error(row) for row in members], max(members, key=lambda row: abs(step_error(row)))
        mean = signed_percent(statistics.mean(map(abs, errors))).removeprefix("+")
        found.append([label, str(len(members)), mean, signed_percent(statistics.mean(errors)), signed_percent(step_error(worst)), worst.name])
    return _lines([name, "plans", "step, mean absolute error", "mean", "worst", "of case"], found)


def _order(summary: Summary) -> str:
    """What the predictions say of which plan is faster."""
    rows = [
        [name, f"{tau:.2f}", f"{summary.tau_strict[name]:.2f}", f"{summary.tau_of_plans[name]:.2f}", signed_percent(summary.regret.get(name))]
        for name, tau in summary.tau.items()
    ]
    return _lines(["same work, same cap", "tau of policies", "without ties", "tau of all plans", "regret of the planner's choice"], rows)


def _kinds(rows: Sequence[Row]) -> str:
    """Which ops are foretold too slow or too fast, over all plans; the longest first."""
    found: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
    for row in rows:
        for kind, (predicted, measured) in row.kinds.items():
            found[kind].append((predicted, measured, row.name))
    lines = []
    for kind, times in sorted(found.items(), key=lambda item: -sum(measured for _, measured, _ in item[1])):
        errors = {name: error for predicted, measured, name in times if (error := relative_error(predicted, measured)) is not None}
        worst = max(errors, key=lambda name: abs(errors[name]), default="")
        totals = (sum(predicted for predicted, _, _ in times), sum(measured for _, measured, _ in times))
        spread = [signed_percent(statistics.median(errors.values())), signed_percent(errors[worst]), worst] if errors else ["-", "-", ""]
        lines.append([kind, str(len(times)), *map(format_seconds, totals), signed_percent(relative_error(*totals)), *spread])
    return _lines(["kind of op", "plans", "predicted", "measured", "error of the sum", "median by plan", "worst", "of case"], lines)


def _cases(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if row.failure:
            lines.append([row.name, *["-"] * 6, f"failed: {row.failure.replace('|', '/')}"])
            continue
        assert row.plan.prediction is not None
        assert row.step_seconds is not None
        times = [format_seconds(row.plan.prediction.step_seconds), format_seconds(row.step_seconds)]
        errors = [signed_percent(error) for error in (step_error(row), device_error(row), host_error(row), row.replay_error)]
        note = f"the plan of {_beside(row.name, row.same_as)}" if row.same_as else f"is {row.plan.policy}" if row.policy == BEST else ""
        notes = [note, *(f"another visit failed: {each.replace('|', '/')}" for each in row.failures)]
        lines.append([row.name, *times, *errors, "; ".join(filter(None, notes))])
    return _lines(["case", "predicted", "measured", "step", "device", "host", "replay", ""], lines)


def _beside(name: str, other: str) -> str:
    """`other` without the folders that it shares with `name`."""
    return other.removeprefix(posixpath.commonpath([name, posixpath.dirname(other)]) + "/")
