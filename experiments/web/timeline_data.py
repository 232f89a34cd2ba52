"""Data for the picture of a simulated step, which `run_report/timeline.js` draws."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.plots.pictures import KIND_COLOURS, UNKNOWN
from megatrain.simulator.schedule import Schedule, parse_id
from megatrain.simulator.schedule.timeline import Timeline

MOST_BARS = 20_000
"""Largest number of bars in a picture. More would be slow in a browser."""


def timeline_data(schedule: Schedule, timeline: Timeline) -> dict[str, Any] | None:
    """Returns the bars of a timeline, or None if there are more than `MOST_BARS`.

    A bar is one op, or all successive chunks of one copy. Times are in microseconds.
    """
    lanes = [lane for lane in schedule.lanes if any(span.lane == lane for span in timeline.spans)]
    bars: list[list[Any]] = []
    for lane in lanes:
        spans = [span for span in timeline.spans if span.lane == lane]
        last = ""
        for span in sorted(spans, key=lambda each: each.start_ns):
            name, _, _ = span.op.partition(".c")
            if name == last:
                bars[-1][4] = span.end_ns
            else:
                bars.append([name, parse_id(span.op).kind, lane, span.start_ns, span.end_ns])
            last = name
    if len(bars) > MOST_BARS:
        return None
    used = {bar[1] for bar in bars}
    kinds = sorted(used, key=[*KIND_COLOURS, *sorted(used)].index)
    return {
        "lanes": lanes,
        "kinds": [
            {"name": kind.replace("_", " "), "colour": KIND_COLOURS.get(kind, UNKNOWN)}
            for kind in kinds
        ],
        "id": [bar[0] for bar in bars],
        "kind": [kinds.index(bar[1]) for bar in bars],
        "lane": [lanes.index(bar[2]) for bar in bars],
        "start": [round(bar[3] / 1e3) for bar in bars],
        "end": [round(bar[4] / 1e3) for bar in bars],
    }
