"""Timeline: the start and end of each op of a step, predicted or measured."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from megatrain.simulator.base.files import convert, read_json, write_json
from megatrain.simulator.schedule import Schedule, parse_id


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """The start and end of one op, in nanoseconds from the start of the step."""

    op: str
    """The id of the op."""
    lane: str
    """The lane that ran it."""
    start_ns: int
    """The start of the op."""
    end_ns: int
    """The end of the op."""

    @property
    def duration_ns(self) -> int:
        """The time from start to end, in nanoseconds."""
        return self.end_ns - self.start_ns

    @property
    def kind(self) -> str:
        """The kind of the op."""
        return parse_id(self.op).kind


class Timeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The spans of one step."""

    name: str
    """A label such as `predicted` or `measured`. Errors are relative to the timeline named
    `measured`."""
    digest: str
    """The digest of the schedule that was simulated or executed."""
    spans: tuple[Span, ...]
    """One span for each op."""

    @classmethod
    def of(cls, name: str, schedule: Schedule, times: Iterable[tuple[int, int]]) -> Timeline:
        """Returns the timeline `name` of `schedule`. `times` has the start and the end of each op
        in nanoseconds, in program order.
        """
        spans = [
            Span(op=op.id, lane=op.lane, start_ns=start, end_ns=end)
            for op, (start, end) in zip(schedule.ops, times, strict=True)
        ]
        return cls(name=name, digest=schedule.digest, spans=tuple(spans))

    @functools.cached_property
    def by_op(self) -> dict[str, Span]:
        """The spans by op id."""
        return {span.op: span for span in self.spans}

    @functools.cached_property
    def makespan_ns(self) -> int:
        """The end of the last op, in nanoseconds from the start of the step."""
        return max((span.end_ns for span in self.spans), default=0)

    def busy_ns(self, lane: str) -> int:
        """Returns the time during which `lane` ran an op, in nanoseconds."""
        return sum(span.duration_ns for span in self.spans if span.lane == lane)

    def save(self, path: Path) -> None:
        """Writes the timeline as JSON to `path`."""
        write_json(path, self)

    @classmethod
    def load(cls, path: Path) -> Timeline:
        """Reads a timeline that `save` wrote. Raises UserError if the file is missing or
        malformed.
        """
        return convert(read_json(path), cls, str(path))


def median_timeline(timelines: Sequence[Timeline]) -> Timeline:
    """Returns the timeline with the median makespan. This is a real step and not a mean. For an
    even number of timelines, it is the lower of the two in the middle.

    Raises ValueError if there is no timeline, or if they belong to different schedules.
    """
    if len({timeline.digest for timeline in timelines}) != 1:
        raise ValueError(
            f"median of {len(timelines)} timelines: expected one or more, all of one schedule"
        )
    middle = statistics.median_low(timeline.makespan_ns for timeline in timelines)
    return next(timeline for timeline in timelines if timeline.makespan_ns == middle)
