"""Timeline: what happened when, predicted or measured, op by op."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from megatrain.simulator.files import convert, read_json, write_json
from megatrain.simulator.schedule import parse_id


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """One op's time on its lane, in nanoseconds from the start of the step."""

    op: str
    lane: str
    start_ns: int
    end_ns: int

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def kind(self) -> str:
        return parse_id(self.op).kind


class Timeline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The spans of one step."""

    name: str
    """`predicted`, `measured`, or what else tells it apart; errors are taken against the one named `measured`"""
    digest: str
    """of the schedule that was played"""
    spans: tuple[Span, ...]

    @functools.cached_property
    def by_op(self) -> dict[str, Span]:
        return {span.op: span for span in self.spans}

    @functools.cached_property
    def makespan_ns(self) -> int:
        """End of the last op."""
        return max((span.end_ns for span in self.spans), default=0)

    def busy_ns(self, lane: str) -> int:
        """Time during which `lane` ran an op."""
        return sum(span.duration_ns for span in self.spans if span.lane == lane)

    def save(self, path: Path) -> None:
        write_json(path, self)

    @classmethod
    def load(cls, path: Path) -> Timeline:
        return convert(read_json(path), cls, str(path))


def median_timeline(timelines: Sequence[Timeline]) -> Timeline:
    """The one of several steps of one schedule whose makespan is the median (the lower of two): a step that happened, not a mean.

    Raises ValueError for none, or for steps of different schedules.
    """
    if len({timeline.digest for timeline in timelines}) != 1:
        raise ValueError(f"median of {len(timelines)} timelines: want one or more, all of one schedule")
    middle = statistics.median_low(timeline.makespan_ns for timeline in timelines)
    return next(timeline for timeline in timelines if timeline.makespan_ns == middle)
