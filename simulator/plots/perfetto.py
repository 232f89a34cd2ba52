"""Writes timelines as Chrome trace JSON, which https://ui.perfetto.dev and chrome://tracing open.

* Each timeline is a process, so prediction and measurement are shown one above the other.
* Each lane is a thread, with the same name in all timelines.
* Each op is a slice, named by its id. If there is a timeline named `measured`, slices of the other
  timelines have the errors of their duration and start.
* If an op's lane was idle until an op of another lane ended, an arrow leads from that op to the
  first one. Other dependencies have no arrow, so arrows show only critical dependencies.
* A counter for each place (device, host) shows the bytes of the slots in use. Persistent buffers
  are left out, because they do not change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatrain.simulator.base.files import write_json
from megatrain.simulator.base.units import format_seconds
from megatrain.simulator.schedule import LANES, Op, Schedule
from megatrain.simulator.schedule.timeline import Span, Timeline

Event = dict[str, Any]
"""One event of a Chrome trace."""


def perfetto(timelines: Sequence[Timeline], schedule: Schedule) -> dict[str, Any]:
    """Returns the trace of `timelines`, which all belong to `schedule`, as a JSON object.

    Times are in microseconds with nanosecond precision. Measured ops of one lane may overlap
    slightly, but slices of a thread must not. So a slice ends where the next one begins at the
    latest, and its `overlap_ns` is the time that was cut off.

    Raises ValueError for a timeline of another schedule, or with an unknown op.
    """
    events: list[Event] = []
    names: dict[str, int] = defaultdict(int)
    measured = next((timeline for timeline in timelines if timeline.name == "measured"), None)
    for process, timeline in enumerate(timelines, start=1):
        if timeline.digest != schedule.digest:
            raise ValueError(
                f"timeline {timeline.name}: belongs to schedule {timeline.digest}, not to"
                f" {schedule.digest}; trace it with its own schedule"
            )
        unknown = next((span.op for span in timeline.spans if span.op not in schedule.by_id), None)
        if unknown:
            raise ValueError(f"timeline {timeline.name}: op {unknown} is not in the schedule")
        names[timeline.name] += 1
        name = (
            timeline.name
            if names[timeline.name] == 1
            else f"{timeline.name} {names[timeline.name]}"
        )
        events += [
            *_headings(process, name, timeline, schedule),
            *_slices(process, timeline, schedule, None if measured is timeline else measured),
            *_arrows(process, timeline, schedule),
            *_counters(process, timeline, schedule),
        ]
    persistent: dict[str, int] = defaultdict(int)
    for buffer in schedule.buffers:
        persistent[buffer.place] += buffer.allocated if buffer.persistent else 0
    about = {
        "policy": schedule.policy,
        "schedule": schedule.digest,
        **{f"{place}_persistent_bytes": size for place, size in persistent.items()},
    }
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def save_trace(path: Path, timelines: Sequence[Timeline], schedule: Schedule) -> None:
    """Writes `perfetto(timelines, schedule)` to `path` atomically.

    Raises ValueError as `perfetto` does, and UserError if `path` cannot be written.
    """
    write_json(path, perfetto(timelines, schedule))


def _thread(lane: str) -> int:
    return LANES.index(lane) + 1


def _headings(process: int, name: str, timeline: Timeline, schedule: Schedule) -> Iterator[Event]:
    """Yields the events that name and order a process and its lanes."""

    def heading(key: str, thread: int, **args: object) -> Event:
        return {"ph": "M", "name": key, "pid": process, "tid": thread, "args": args}

    yield heading("process_name", 0, name=name)
    yield heading("process_sort_index", 0, sort_index=process)
    yield heading(
        "process_labels",
        0,
        labels=f"{schedule.policy}, step {format_seconds(timeline.makespan_ns / 1e9)}",
    )
    for lane in schedule.lanes:
        yield heading("thread_name", _thread(lane), name=lane)
        yield heading("thread_sort_index", _thread(lane), sort_index=_thread(lane))


def _by_lane(timeline: Timeline) -> dict[str, list[Span]]:
    """Returns the spans of each lane, ordered by time."""
    lanes: dict[str, list[Span]] = {}
    for span in sorted(timeline.spans, key=lambda span: (span.start_ns, span.end_ns)):
        lanes.setdefault(span.lane, []).append(span)
    return lanes


def _slices(
    process: int, timeline: Timeline, schedule: Schedule, measured: Timeline | None
) -> Iterator[Event]:
    """Yields one complete event per op."""
    for lane, spans in _by_lane(timeline).items():
        following: list[Span | None] = [*spans[1:], None]
        for span, after in zip(spans, following, strict=True):
            overlap = max(0, span.end_ns - after.start_ns) if after else 0
            op = schedule.by_id[span.op]
            args = (
                _arguments(op)
                | ({"overlap_ns": overlap} if overlap else {})
                | (_errors(span, measured.by_op.get(span.op)) if measured else {})
            )
            yield {
                "ph": "X",
                "name": span.op,
                "cat": op.kind,
                "pid": process,
                "tid": _thread(lane),
                "ts": span.start_ns / 1000,
                "dur": (span.duration_ns - overlap) / 1000,
                "args": args,
            }


def _errors(span: Span, measured: Span | None) -> dict[str, object]:
    """Returns the signed errors of a span against the measured one, in microseconds."""
    if measured is None:
        return {}
    duration, start = span.duration_ns - measured.duration_ns, span.start_ns - measured.start_ns
    return {
        "measured_us": measured.duration_ns / 1000,
        "error_us": duration / 1000,
        "start_error_us": start / 1000,
    }


def _arguments(op: Op) -> dict[str, object]:
    """Returns the fields of the op that are not empty."""
    sizes = {
        key: getattr(op, key)
        for key in ("layer", "offset", "bytes", "parameters", "flops", "shape")
    }
    lists = {key: " ".join(getattr(op, key)) for key in ("after", "reads", "writes")}
    return {"kind": op.kind, **{key: value for key, value in (sizes | lists).items() if value}}


def _arrows(process: int, timeline: Timeline, schedule: Schedule) -> Iterator[Event]:
    """Yields the flow events of arrows.

    An arrow leads to each op whose lane was idle until its last dependency ended, from that
    dependency.
    """
    spans = timeline.by_op
    before = {
        second.id: first.id
        for queue in schedule.lanes.values()
        for first, second in pairwise(queue)
    }
    for number, op in enumerate(schedule.ops):
        waited = [spans[other] for other in op.after if other in spans]
        if op.id not in spans or not waited:
            continue
        start_ns, last = spans[op.id].start_ns, max(waited, key=lambda span: span.end_ns)
        ready_ns = spans[before[op.id]].end_ns if before.get(op.id) in spans else 0
        if last.end_ns <= ready_ns or last.start_ns > start_ns:
            continue
        # The format requires that an arrow begins inside its slice.
        leaves_ns = max(last.start_ns, min(last.end_ns - 1, start_ns))
        flow: Event = {
            "name": "waits for",
            "cat": "dependency",
            "id": process << 32 | number,
            "pid": process,
        }
        yield {**flow, "ph": "s", "tid": _thread(last.lane), "ts": leaves_ns / 1000}
        yield {**flow, "ph": "f", "bp": "e", "tid": _thread(op.lane), "ts": start_ns / 1000}


def _counters(process: int, timeline: Timeline, schedule: Schedule) -> Iterator[Event]:
    """Yields counter events with the bytes of the slots in use in each place.

    A slot is in use from the start of the op that acquires it to the end of the op that releases
    it.
    """
    changes: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for span in timeline.spans:
        op = schedule.by_id[span.op]
        for slots, time_ns, sign in (
            (op.acquires, span.start_ns, 1),
            (op.releases, span.end_ns, -1),
        ):
            for slot in slots:
                buffer = schedule.buffer[slot]
                changes[buffer.place][time_ns] += sign * buffer.allocated
    for place in sorted(changes):
        held = 0
        for time_ns, change in sorted(changes[place].items()):
            if change or not held:
                held += change
                yield {
                    "ph": "C",
                    "name": f"{place} slots held",
                    "pid": process,
                    "tid": 0,
                    "ts": time_ns / 1000,
                    "args": {"bytes": held},
                }
