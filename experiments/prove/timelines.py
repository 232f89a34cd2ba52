"""Timelines: the middle measured step of each case, a line of JSON a case, so that it can be replayed and compared where there is no GPU.

A line holds two numbers an op, in the order of the schedule, which the row's plan lowers to; ids and lanes are the schedule's. Some 20 bytes an op: 67 plans
of 14,687 ops, 0.3 MB (the suite `h200`, 2026-11-22).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatrain.experiments.row_file import parse_rows
from megatrain.simulator.errors import UserError
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.timeline import Span, Timeline


class StoredTimeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured step, in nanoseconds from its start."""

    name: str
    """the case"""
    digest: str
    """of the schedule"""
    starts_ns: tuple[int, ...]
    """of each op, in program order"""
    durations_ns: tuple[int, ...]

    @classmethod
    def of(cls, name: str, measured: Timeline, schedule: Schedule) -> StoredTimeline:
        spans = [measured.by_op[op.id] for op in schedule.ops]
        return cls(name=name, digest=schedule.digest, starts_ns=tuple(span.start_ns for span in spans), durations_ns=tuple(span.duration_ns for span in spans))

    def timeline(self, schedule: Schedule) -> Timeline:
        """As it was measured. Raises UserError for another schedule than that which ran."""
        if schedule.digest != self.digest or not len(schedule.ops) == len(self.starts_ns) == len(self.durations_ns):
            raise UserError(
                f"timeline of {self.name}", found=f"{len(self.starts_ns)} ops of schedule {self.digest}",
                allowed=f"the {len(schedule.ops)} ops of schedule {schedule.digest}", fix="run the case again",
            )  # fmt: skip
        columns = zip(schedule.ops, self.starts_ns, self.durations_ns, strict=True)
        spans = tuple(Span(op=op.id, lane=op.lane, start_ns=start, end_ns=start + duration) for op, start, duration in columns)
        return Timeline(name="measured", digest=self.digest, spans=spans)


def read_timelines(path: Path) -> dict[str, StoredTimeline]:
    """By case, the last of each; none where there is no file: rows from before there were any have none. Raises UserError for other content."""
    rows = parse_rows(path.read_bytes(), StoredTimeline, str(path))[0] if path.exists() else []
    return {row.name: row for row in rows}
