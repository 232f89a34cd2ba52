"""The table of a figure as CSV: the paper's value, our predictions, our measurement, and their
signed deviations from the paper's value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from matplotlib.figure import Figure

from megatrain.paper_figures.common.results import BenchmarkRecord, StoredAnswer
from megatrain.simulator.base.files import csv_text

PREDICTIONS = ("paper_stated", "paper_schedule", "published_code", "ours")


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """One value of a figure, in `unit`. None is an empty cell: not reported, not predicted, not
    measured, or the speed of a plan that does not fit.
    """

    item: str
    """What the value describes."""
    quantity: str
    """What it measures, such as `tflops`."""
    unit: str
    """The unit of all values of the row."""
    machine: str = ""
    """The machine of the paper's row, by its name in the library."""
    paper: float | None = None
    """The paper's value."""
    sure: str = ""
    """`++`: two readers agree. `+`: one reader. `?`: doubtful."""
    mark: str = ""
    """`input`: an assumption was chosen by the paper's value. `lower bound`: the paper's value is
    one. `repeats ROW`: that row of the same experiment counts. Marked rows are in no mean."""
    workload: str = ""
    """Sequences x tokens of a step of `published_code`. The paper's schedule and ours train as
    many tokens."""
    paper_stated: float | None = None
    """The prediction for the paper's schedule with 12 bytes per parameter, as the paper states."""
    paper_schedule: float | None = None
    """The prediction for the policy `double_buffer`, which has fp32 masters."""
    published_code: float | None = None
    """The prediction for the system that the row names: MegaTrain's code, ZeRO-3 or FSDP2."""
    ours: float | None = None
    """The prediction for the planner's best plan."""
    measured: float | None = None
    """Our measurement."""
    does_not_fit: str = ""
    """Names of the fields whose plans do not fit, separated by commas."""
    note: str = ""
    """A remark on the row."""

    def deviation(self, field: str) -> float | None:
        """Returns `field` / the paper's value - 1, or None if a value is missing or if it is a yes
        or no.
        """
        value = getattr(self, field)
        if value is None or not self.paper or self.quantity == "runs":
            return None
        return float(value / self.paper - 1)


class Drawn(NamedTuple):
    """A figure with its table and texts."""

    figure: Figure
    """The picture."""
    rows: list[TableRow]
    """The rows of its CSV file."""
    title: str
    """The heading on the page."""
    claim: str
    """The paper's claim."""
    finding: str
    """Our finding, and the reason for a difference if it is known."""
    caption: str
    """Machines, dates and what the marks mean."""
    caption_columns: int = 135
    """Number of characters at which `caption` is wrapped in the picture."""


def value_of(answer: StoredAnswer | None, quantity: str, tokens: int) -> float | None:
    """Returns the answer's value of `quantity`, with a step time scaled to `tokens` per step. None
    means that the quantity is not predicted, or that it is the speed of a plan that does not fit.
    """
    if answer is None or quantity == "state_gb":
        return None
    own_tokens = answer.batch * answer.accumulation * answer.sequence
    return {
        "device_gib": answer.device_gib,
        "host_gib": answer.host_gib,
        "rss_gib": None,  # peaks, unlike what is resident when gradients are freed
        "runs": float(answer.fits),
        "tflops": answer.tflops if answer.fits else None,
        "tokens_per_s": answer.tokens_per_s if answer.fits else None,
        "step_s": answer.step_s * tokens / own_tokens if answer.fits else None,
    }[quantity]


def rows_of(
    records: Iterable[BenchmarkRecord], measured: Mapping[tuple[str, str], float] = {}
) -> list[TableRow]:
    """Returns a row for each record. `measured` maps (item, quantity) to our measurement."""
    rows = []
    for record in records:
        code = record.code
        tokens = code.batch * code.sequence if code else 1
        misfits = [
            name
            for name, found in (
                ("paper_stated", record.paper_stated),
                ("paper_schedule", record.paper_schedule),
                ("published_code", code),
                ("ours", record.ours),
            )
            if found is not None and not found.fits
        ]
        implied = (
            f"the speed implies batch {record.implied.batch}, which gives"
            f" {record.implied.value:.4g}"
            if record.implied
            else ""
        )
        rows.append(
            TableRow(
                item=record.item,
                quantity=record.quantity,
                unit=record.unit,
                machine=record.machine,
                paper=record.paper,
                sure=record.sure,
                mark=mark_of(record),
                workload=f"{code.batch} x {code.sequence}" if code else "",
                paper_stated=value_of(record.paper_stated, record.quantity, tokens),
                paper_schedule=value_of(record.paper_schedule, record.quantity, tokens),
                published_code=code.value if code else None,
                ours=value_of(record.ours, record.quantity, tokens),
                measured=measured.get((record.item, record.quantity)),
                does_not_fit=", ".join(misfits),
                note="; ".join(filter(None, (record.note, implied))),
            )
        )
    return rows


def mark_of(record: BenchmarkRecord) -> str:
    """Returns why a row of the paper is in no mean, or an empty text."""
    if record.used:
        return "input"
    if record.repeats:
        return f"repeats {record.repeats}"
    return "lower bound" if record.bound else ""


def as_csv(rows: Sequence[TableRow]) -> str:
    """Returns one line for each row, with numbers to six digits and deviations to four places."""
    fields = [name for name in TableRow.__struct_fields__ if name not in ("does_not_fit", "note")]
    return csv_text(
        [
            {
                **{name: _cell(getattr(row, name), ".6g") for name in fields},
                **{
                    f"deviation_{name}": _cell(row.deviation(name), "+.4f")
                    for name in (*PREDICTIONS, "measured")
                },
                "does_not_fit": row.does_not_fit,
                "note": row.note,
            }
            for row in rows
        ]
    )


def _cell(value: Any, form: str) -> str:
    if value is None:
        return ""
    return format(value, form) if isinstance(value, float | int) else str(value)
