"""Table: what stands beside a figure as CSV: the paper's value, our predictions, our measurement, and signed deviations of each from the paper's."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from matplotlib.figure import Figure

from megatrain.paper_figures.results import Answer, Record

PREDICTIONS = ("paper_schedule", "published_code", "ours")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, in `unit`. None is an empty cell: not told, not predicted, not measured, or a speed of what does not fit."""

    item: str
    quantity: str
    unit: str
    paper: float | None = None
    sure: str = ""
    """`++` two readers agree, `+` one reader, `?` doubtful"""
    paper_schedule: float | None = None
    """policy double_buffer"""
    published_code: float | None = None
    """of the system that the row names: MegaTrain's code, ZeRO-3, FSDP2"""
    ours: float | None = None
    """the planner's best"""
    measured: float | None = None
    does_not_fit: str = ""
    """which of the predictions"""
    note: str = ""

    def deviation(self, field: str) -> float | None:
        """Of `field` from the paper's value, signed, of 1; None of a yes or no."""
        value = getattr(self, field)
        return None if value is None or not self.paper or self.quantity == "runs" else value / self.paper - 1


class Drawn(NamedTuple):
    """A figure, ready to be saved."""

    figure: Figure
    rows: list[Row]
    title: str
    claim: str
    """what the paper claims"""
    finding: str
    """what we find, and why it differs, as far as known"""
    made: str
    """machines and dates"""


def value_of(answer: Answer | None, quantity: str, tokens: int) -> float | None:
    """The answer's figure for a row of `tokens` a step; None where a plan that does not fit has no speed."""
    if answer is None or quantity == "state_gb":
        return None
    if quantity in ("device_gib", "host_gib", "rss_gib"):
        return answer.device_gib if quantity == "device_gib" else answer.host_gib
    if quantity == "runs":
        return float(answer.fits)
    own_tokens = answer.batch * answer.accumulation * answer.sequence
    speeds = {"tflops": answer.tflops, "tokens_per_s": answer.tokens_per_s, "step_s": answer.step_s * tokens / own_tokens}
    return speeds[quantity] if answer.fits else None


def rows_of(records: Iterable[Record], measured: Mapping[tuple[str, str], float] = {}) -> list[Row]:
    """Each record as a row; `measured` by item and quantity."""
    made = []
    for record in records:
        code = record.code
        tokens = code.batch * code.sequence if code else 1
        misfits = [
            name for name, found in (("paper_schedule", record.paper_schedule), ("published_code", code), ("ours", record.ours)) if found is not None and not found.fits
        ]  # fmt: skip
        made.append(
            Row(
                item=record.item, quantity=record.quantity, unit=record.unit, paper=record.paper, sure=record.sure,
                paper_schedule=value_of(record.paper_schedule, record.quantity, tokens), published_code=code.value if code else None,
                ours=value_of(record.ours, record.quantity, tokens), measured=measured.get((record.item, record.quantity)),
                does_not_fit=", ".join(misfits), note=record.note,
            )
        )  # fmt: skip
    return made


def as_csv(rows: Sequence[Row]) -> str:
    """A line a row, numbers to six digits, deviations to four places."""
    fields = [name for name in Row.__struct_fields__ if name not in ("does_not_fit", "note")]
    deviations = (*PREDICTIONS, "measured")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*fields, *(f"deviation_{name}" for name in deviations), "does_not_fit", "note"])
    for row in rows:
        cells: list[Any] = [_cell(getattr(row, name), "g") for name in fields]
        writer.writerow([*cells, *(_cell(row.deviation(name), "+.4f") for name in deviations), row.does_not_fit, row.note])
    return text.getvalue()


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, ".6g" if form == "g" else form) if isinstance(value, float | int) else str(value)
