"""Tests of traces in the format of Chrome's viewer, on schedules of several policies."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatrain.simulator.plots.perfetto import perfetto, save_trace
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import LANES, Schedule
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Span, Timeline

POLICIES = ("sequential", "double_buffer", "resident")


def play(schedule: Schedule, name: str, factor: int = 1) -> Timeline:
    """Returns a timeline in which every op starts as early as its lane and dependencies allow.

    An op's duration follows from its place in the schedule.
    """
    end: dict[str, int] = {}
    free: dict[str, int] = {}
    spans = []
    for number, op in enumerate(schedule.ops):
        start = max([free.get(op.lane, 0), *(end[other] for other in op.after)])
        end[op.id] = free[op.lane] = start + factor * (1_000 + 37 * (number % 11))
        spans.append(Span(op=op.id, lane=op.lane, start_ns=start, end_ns=end[op.id]))
    return Timeline(name=name, digest=schedule.digest, spans=tuple(spans))


@pytest.fixture(params=POLICIES)
def schedule(request: pytest.FixtureRequest, make_plan: Callable[..., Plan]) -> Schedule:
    return lower(make_plan(request.param, accumulation=2))


def events(trace: dict[str, Any], phase: str, process: int | None = None) -> list[dict[str, Any]]:
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == phase and process in (None, event["pid"])
    ]


def names(trace: dict[str, Any], process: int, key: str) -> list[str]:
    return [event["args"]["name"] for event in events(trace, "M", process) if event["name"] == key]


def nanoseconds(microseconds: float) -> int:
    return round(1000 * microseconds)


def test_one_process_per_timeline_with_equal_lanes_in_order(schedule: Schedule) -> None:
    trace = perfetto([play(schedule, "predicted"), play(schedule, "measured", 2)], schedule)
    assert [names(trace, process, "process_name") for process in (1, 2)] == [
        ["predicted"],
        ["measured"],
    ]
    lanes = names(trace, 1, "thread_name")
    assert lanes == names(trace, 2, "thread_name") == list(schedule.lanes)
    assert sorted(lanes, key=LANES.index) == lanes
    order = [
        event["args"]["sort_index"]
        for event in events(trace, "M", 1)
        if event["name"] == "thread_sort_index"
    ]
    assert order == sorted(order)
    threads = {event["tid"] for event in events(trace, "M") if event["name"].startswith("process_")}
    assert threads == {0}, "no lane has this number"


def test_one_slice_per_op_to_the_nanosecond(schedule: Schedule) -> None:
    timeline = play(schedule, "predicted")
    slices = {event["name"]: event for event in events(perfetto([timeline], schedule), "X")}
    assert slices.keys() == schedule.by_id.keys()
    for span in timeline.spans:
        event, op = slices[span.op], schedule.by_id[span.op]
        assert (nanoseconds(event["ts"]), nanoseconds(event["dur"])) == (
            span.start_ns,
            span.duration_ns,
        )
        assert event["cat"] == event["args"]["kind"] == op.kind
        for key in ("bytes", "parameters", "flops", "shape"):
            assert event["args"].get(key, type(getattr(op, key))()) == getattr(op, key)
        assert event["args"].get("reads", "").split() == list(op.reads)
        assert event["args"].get("writes", "").split() == list(op.writes)


def test_a_slice_shows_its_error_against_the_measurement(schedule: Schedule) -> None:
    predicted, measured = play(schedule, "predicted"), play(schedule, "measured", 3)
    trace = perfetto([predicted, measured], schedule)
    for event in events(trace, "X", 1):
        span, real = predicted.by_op[event["name"]], measured.by_op[event["name"]]
        assert nanoseconds(event["args"]["measured_us"]) == real.duration_ns
        assert nanoseconds(event["args"]["error_us"]) == span.duration_ns - real.duration_ns
        assert nanoseconds(event["args"]["start_error_us"]) == span.start_ns - real.start_ns
    assert not any(
        "error_us" in event["args"]
        for event in [*events(trace, "X", 2), *events(perfetto([predicted], schedule), "X")]
    )


def test_slices_of_a_lane_do_not_overlap_even_where_clocks_do(schedule: Schedule) -> None:
    """Slices of a lane do not overlap, even if measured spans do because of different clocks."""
    played = play(schedule, "measured")
    skewed = tuple(msgspec.structs.replace(span, end_ns=span.end_ns + 150) for span in played.spans)
    trace = perfetto([played, msgspec.structs.replace(played, spans=skewed)], schedule)
    cut = 0
    for process in (1, 2):
        for thread in {event["tid"] for event in events(trace, "X", process)}:
            lane = sorted(
                (event for event in events(trace, "X", process) if event["tid"] == thread),
                key=lambda event: event["ts"],
            )
            for first, second in pairwise(lane):
                assert nanoseconds(first["ts"]) + nanoseconds(first["dur"]) <= nanoseconds(
                    second["ts"]
                )
            cut += sum("overlap_ns" in event["args"] for event in lane)
    assert cut > 0
    assert all(event["args"].get("overlap_ns", 0) <= 150 for event in events(trace, "X"))


def test_arrows_lead_from_a_slice_to_the_op_that_waited_for_it(schedule: Schedule) -> None:
    trace = perfetto([play(schedule, "predicted"), play(schedule, "measured", 3)], schedule)
    starts, ends = events(trace, "s"), events(trace, "f")
    assert [event["id"] for event in starts] == [event["id"] for event in ends]
    assert len({event["id"] for event in starts}) == len(starts) <= 2 * len(schedule.ops)
    if len(schedule.lanes) > 1:
        assert starts
    slices = events(trace, "X")
    for start, end in zip(starts, ends, strict=True):
        assert end["bp"] == "e"
        assert start["pid"] == end["pid"]
        assert start["tid"] != end["tid"]
        source = next(
            event["name"]
            for event in slices
            if (event["pid"], event["tid"]) == (start["pid"], start["tid"])
            and event["ts"] <= start["ts"] < event["ts"] + event["dur"]
        )
        target = next(
            event["name"]
            for event in slices
            if (event["pid"], event["tid"], event["ts"]) == (end["pid"], end["tid"], end["ts"])
        )
        assert source in schedule.by_id[target].after


def test_counters_rise_and_fall_back_to_nothing(schedule: Schedule) -> None:
    """The bytes of held slots end at zero and never exceed all slots."""
    trace = perfetto([play(schedule, "predicted")], schedule)
    counters: dict[str, list[int]] = {}
    for event in events(trace, "C"):
        counters.setdefault(event["name"], []).append(event["args"]["bytes"])
    assert "device slots held" in counters
    for place, values in counters.items():
        slots = sum(
            buffer.allocated
            for buffer in schedule.buffers
            if not buffer.persistent and place.startswith(buffer.place)
        )
        assert values[-1] == 0
        assert 0 < max(values) <= slots
        assert min(values) == 0
    times = [event["ts"] for event in events(trace, "C") if event["name"] == "device slots held"]
    assert times == sorted(set(times))


def test_saved_trace_reads_back_and_stays_small(schedule: Schedule, tmp_path: Path) -> None:
    timelines = [play(schedule, "predicted"), play(schedule, "measured", 2)]
    save_trace(tmp_path / "trace.json", timelines, schedule)
    assert json.loads((tmp_path / "trace.json").read_text()) == perfetto(timelines, schedule)
    assert (tmp_path / "trace.json").stat().st_size < 700 * 2 * len(schedule.ops)
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


def test_timelines_with_the_same_name_get_different_ones(schedule: Schedule) -> None:
    trace = perfetto([play(schedule, "measured")] * 2, schedule)
    assert [names(trace, process, "process_name") for process in (1, 2)] == [
        ["measured"],
        ["measured 2"],
    ]


def test_a_timeline_of_another_schedule_is_refused(schedule: Schedule) -> None:
    timeline = play(schedule, "predicted")
    with pytest.raises(ValueError, match="belongs to schedule 0123, not to"):
        perfetto([msgspec.structs.replace(timeline, digest="0123")], schedule)
    stranger = Span(op="F999.m0", lane="compute", start_ns=0, end_ns=1)
    with pytest.raises(ValueError, match=r"F999\.m0 is not in the schedule"):
        perfetto([msgspec.structs.replace(timeline, spans=(*timeline.spans, stranger))], schedule)
