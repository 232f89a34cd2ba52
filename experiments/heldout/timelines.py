"""Stored timelines: the middle measured step of each case, as one line of JSON. With it, a case can
be replayed and compared on a machine without a GPU.

A line has two numbers for each op, in the order of the schedule of the row's plan. Op ids and lanes
come from that schedule. An op takes about 20 bytes: 0.3 MB for the suite `h200`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatrain.experiments.files.row_file import parse_rows
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.timeline import Span, Timeline


class StoredTimeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured step, in nanoseconds from its start."""

    name: str
    """The case."""
    digest: str
    """Digest of the schedule."""
    starts_ns: tuple[int, ...]
    """Start of each op, in program order."""
    durations_ns: tuple[int, ...]
    """Duration of each op, in program order."""

    @classmethod
    def of(cls, name: str, measured: Timeline, schedule: Schedule) -> StoredTimeline:
        """Returns the measured timeline of a case in the stored form."""
        spans = [measured.by_op[op.id] for op in schedule.ops]
        return cls(
            name=name,
            digest=schedule.digest,
            starts_ns=tuple(span.start_ns for span in spans),
            durations_ns=tuple(span.duration_ns for span in spans),
        )

    def timeline(self, schedule: Schedule) -> Timeline:
        """Returns the measured timeline. Raises UserError if another schedule was measured."""
        if schedule.digest != self.digest or not len(schedule.ops) == len(self.starts_ns) == len(
            self.durations_ns
        ):
            raise UserError(
                f"timeline of {self.name}",
                found=f"{len(self.starts_ns)} ops of schedule {self.digest}",
                allowed=f"the {len(schedule.ops)} ops of schedule {schedule.digest}",
                fix="run the case again",
            )
        columns = zip(schedule.ops, self.starts_ns, self.durations_ns, strict=True)
        spans = tuple(
            Span(op=op.id, lane=op.lane, start_ns=start, end_ns=start + duration)
            for op, start, duration in columns
        )
        return Timeline(name="measured", digest=self.digest, spans=spans)


def read_timelines(path: Path) -> dict[str, StoredTimeline]:
    """Returns case -> its last timeline. The result is empty if the file does not exist, because
    older experiments stored no timelines. Raises UserError for other content.
    """
    rows = parse_rows(path.read_bytes(), StoredTimeline, str(path))[0] if path.exists() else []
    return {row.name: row for row in rows}
