"""Errors of the predictions of published figures, their summary, and tables of both.

An error is (predicted - published) / published. MAPE is the mean of absolute errors. A prediction
that is too low has an error of at most 100 %, but one that is too high has no such limit. The
symmetric error, exp(mean of |ln(predicted / published)|) - 1, treats both alike.

Both leave out figures that are inputs of a machine's file or a policy, figures by which an
assumption was chosen, bounds, rows that repeat another row's experiment, and `runs`, which is right
or wrong.

Rows of the paper, of others and of our own measurements are summarized separately, because the
policies were written with our measurements known. Rows are classified by how certain the figure is.
Certain rows are classified by whether their source reports batch and sequence, because an assumed
workload changes the error more than any model of the machine does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import msgspec

from megatrain.experiments.validation.predict import Implied, Predicted
from megatrain.experiments.validation.rows import GROUPS, HOST, LAYERS, ORIGINS, RATES, PublishedRow
from megatrain.simulator.base.files import csv_text

MISSED = 0.20
STATED, ASSUMED, SINGLE, DOUBTFUL = (
    "sure, workload stated",
    "sure, workload assumed",
    "one reader",
    "doubtful",
)
CLASSES = (STATED, ASSUMED, SINGLE, DOUBTFUL)
ALL, ALL_SURE = "all", "all sure"


class ValidationResult(msgspec.Struct, frozen=True, kw_only=True):
    """A row and its prediction."""

    row: PublishedRow
    """The published figure."""
    predicted: Predicted | None
    """The prediction, or None for a row without a policy."""
    implied: Implied | None = None
    """The batch with which the speed would be met, for baselines whose batch is not stated."""

    @property
    def error(self) -> float | None:
        """The signed error as a share. None if there is no prediction, or if the figure is a yes or
        no. A prediction above a lower bound has the error 0.
        """
        if self.predicted is None or self.row.quantity == "runs" or not self.row.value:
            return None
        error = self.predicted.value / self.row.value - 1
        return min(error, 0.0) if self.row.bound else error

    @property
    def missed(self) -> bool:
        """Whether the absolute error exceeds MISSED, or for `runs`, whether the prediction is
        wrong.
        """
        if self.row.quantity == "runs":
            return self.predicted is not None and self.predicted.value != self.row.value
        return self.error is not None and abs(self.error) > MISSED

    @property
    def group(self) -> str:
        """The key of GROUPS that contains the row's quantity."""
        return next(
            (name for name, quantities in GROUPS.items() if self.row.quantity in quantities),
            "other",
        )

    @property
    def sureness(self) -> str:
        """The row's class, one of CLASSES."""
        row = self.row
        if row.sure != "++":
            return SINGLE if row.sure == "+" else DOUBTFUL
        needless = row.quantity in (*HOST, *RATES, *LAYERS)  # independent of the workload
        return STATED if needless or (row.batch and row.sequence) else ASSUMED

    @property
    def counted(self) -> bool:
        """Whether the result counts in the mean errors."""
        row = self.row
        return self.error is not None and not row.used and not row.repeats and not row.bound


def mape(results: Iterable[ValidationResult]) -> float | None:
    """Returns the mean absolute error, as a share, of the results that count, if any counts."""
    errors = [
        abs(result.error) for result in results if result.counted and result.error is not None
    ]
    return sum(errors) / len(errors) if errors else None


def symmetric(results: Iterable[ValidationResult]) -> float | None:
    """Returns exp(mean of |ln(predicted / published)|) - 1 of the results that count, or None if
    none does. A prediction of twice or of half the figure gives 1.0.
    """
    logs = [
        abs(math.log1p(max(result.error, -0.999999)))
        for result in results
        if result.counted and result.error is not None
    ]
    return math.expm1(sum(logs) / len(logs)) if logs else None


def summary(results: Sequence[ValidationResult]) -> dict[str, object]:
    """Returns errors and numbers of rows by origin, class and group, and how many predictions of
    `runs` are right in each origin. Inputs are left out.
    """
    origins, runs = {}, {}
    for origin in ORIGINS:
        mine = [result for result in results if result.row.origin == origin]
        table: dict[str, dict[str, dict[str, float | int | None]]] = {}
        for name in (ALL, ALL_SURE, *CLASSES):
            members = [
                result
                for result in mine
                if result.counted
                and (
                    name in (ALL, result.sureness) or (name == ALL_SURE and result.row.sure == "++")
                )
            ]
            parts = {"all": members} | {
                group: [result for result in members if result.group == group]
                for group in GROUPS
                if group != "runs or not"
            }
            table[name] = {group: _numbers(part) for group, part in parts.items() if part}
        origins[origin] = {name: groups for name, groups in table.items() if groups}
        verdicts = [
            result
            for result in mine
            if result.row.quantity == "runs" and result.predicted and not result.row.used
        ]
        if verdicts:
            right = sum(not result.missed for result in verdicts)
            runs[origin] = {"rows": len(verdicts), "right": right}
    return {
        "origins": {origin: found for origin, found in origins.items() if found},
        "runs": runs,
        "rows": len(results),
        "not_predicted": sum(result.predicted is None for result in results),
        "used": sum(result.row.used for result in results),
        "repeats": sum(bool(result.row.repeats) and not result.row.used for result in results),
        "bounds": sum(bool(result.row.bound) for result in results),
        "missed": sum(result.missed for result in results),
    }


def _numbers(members: Sequence[ValidationResult]) -> dict[str, float | int | None]:
    errors = [result.error for result in members if result.error is not None]
    return {
        "rows": len(errors),
        "mape": mape(members),
        "median": statistics.median(map(abs, errors)),
        "symmetric": symmetric(members),
        "mean_signed": sum(errors) / len(errors),
    }


def as_text(results: Sequence[ValidationResult]) -> str:
    """Returns the text of the command: every row, the summary, the batches that the baselines'
    speeds imply, the ten largest errors, the missed rows with their reasons, and the rows that are
    not predicted.
    """
    found = summary(results)
    origins, runs = found["origins"], found["runs"]
    assert isinstance(origins, dict)
    assert isinstance(runs, dict)
    worst = sorted(
        (result for result in results if result.counted), key=lambda result: -abs(result.error or 0)
    )[:10]
    lines = [
        f"{'what':<38} {'setting':<13} {'quantity':<16} {'batch x seq':>12} {'predicted':>10}"
        f" {'published':>10} {'error':>8}  sure",
        *map(_line, results),
        "",
        *(line for origin, classes in origins.items() for line in _table(origin, classes)),
        *(
            f"runs or out of memory, {origin}: {counts['right']} of {counts['rows']} right"
            for origin, counts in runs.items()
        ),
        f"rows {found['rows']}, not predicted {found['not_predicted']}, inputs of the prediction"
        f" {found['used']}, repeats of another row {found['repeats']}, bounds {found['bounds']}",
        "",
        "the batch that a baseline's published speed implies (an inference, no test):",
        *(
            f"  {_name(result)}: {result.row.value:g} published, batch {result.implied.batch} gives"
            f" {result.implied.value:.4g} ({result.implied.value / result.row.value - 1:+.1%})"
            for result in results
            if result.implied and result.row.value
        ),
        "",
        "the ten largest errors:",
        *map(_line, worst),
        "",
        "missed by more than 20 %:",
        *(
            f"  {_name(result)}: {_error(result)}. {result.row.note}"
            for result in results
            if result.missed
        ),
        "",
        "not predicted:",
        *(
            f"  {_name(result)}: {result.row.note}"
            for result in results
            if result.predicted is None
        ),
    ]
    return "\n".join(lines)


def _table(origin: str, classes: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Returns the lines of the table with one origin's errors."""
    return [
        f"{origin:<41} {'group':<16} {'rows':>5} {'MAPE':>8} {'median':>8} {'symmetric':>10}"
        f" {'signed':>8}",
        *(
            f"  {name:<39} {group:<16} {numbers['rows']:>5} {numbers['mape']:>8.1%}"
            f" {numbers['median']:>8.1%} {numbers['symmetric']:>10.1%}"
            f" {numbers['mean_signed']:>+8.1%}"
            for name, groups in classes.items()
            for group, numbers in groups.items()
        ),
        "",
    ]


def _name(result: ValidationResult) -> str:
    return f"{result.row.item} ({result.row.quantity}, {result.row.source})"


def _error(result: ValidationResult) -> str:
    if result.row.quantity == "runs" and result.predicted:
        return "wrong" if result.missed else "right"
    return "" if result.error is None else f"{result.error:+.1%}"


def _line(result: ValidationResult) -> str:
    row, predicted = result.row, result.predicted
    shape = f"{predicted.batch} x {predicted.sequence}" if predicted else ""
    value = f"{predicted.value:.4g}" if predicted else "-"
    published = "-" if row.value is None else f"{row.value:g}"
    marks = (
        row.sure
        + (", input" if row.used else "")
        + (", a lower bound" if row.bound else "")
        + (f", repeats {row.repeats}" if row.repeats else "")
        + (
            ""
            if not predicted or predicted.fits or row.quantity == "runs"
            else ", does not fit by our memory account"
        )
    )
    return (
        f"{row.item[:38]:<38} {row.setting:<13} {row.quantity:<16} {shape:>12} {value:>10}"
        f" {published:>10} {_error(result):>8}  {marks}"
    )


_COLUMNS: dict[str, Callable[[ValidationResult], object]] = {
    "item": lambda result: result.row.item,
    "setting": lambda result: result.row.setting,
    "policy": lambda result: result.row.policy,
    "model": lambda result: result.row.model,
    "quantity": lambda result: result.row.quantity,
    "unit": lambda result: result.row.unit,
    "batch": lambda result: result.predicted.batch if result.predicted else "",
    "sequence": lambda result: result.predicted.sequence if result.predicted else "",
    "predicted": lambda result: f"{result.predicted.value:.6g}" if result.predicted else "",
    "published": lambda result: "" if result.row.value is None else f"{result.row.value:g}",
    "error": lambda result: "" if result.error is None else f"{result.error:.4f}",
    "missed": lambda result: "yes" if result.missed else "",
    "fits": lambda result: "" if not result.predicted else "yes" if result.predicted.fits else "no",
    "sure": lambda result: result.row.sure,
    "class": lambda result: result.sureness,
    "bound": lambda result: result.row.bound,
    "input": lambda result: "yes" if result.row.used else "",
    "repeats": lambda result: result.row.repeats,
    "origin": lambda result: result.row.origin,
    "implied_batch": lambda result: result.implied.batch if result.implied else "",
    "implied_speed": lambda result: f"{result.implied.value:.6g}" if result.implied else "",
    "source": lambda result: result.row.source,
    "note": lambda result: result.row.note,
}


def records(results: Sequence[ValidationResult]) -> list[dict[str, object]]:
    """Returns column -> plain value for every row."""
    return [{name: column(result) for name, column in _COLUMNS.items()} for result in results]


def as_csv(results: Sequence[ValidationResult]) -> str:
    """Returns every row as CSV, with a line of column names."""
    return csv_text(records(results))
