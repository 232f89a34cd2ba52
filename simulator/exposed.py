"""Exposed time: what each lane makes compute wait for, read off a timeline.

An instant of the step at which no compute op runs belongs to the other lanes that are busy then, in equal parts; where none is busy it is
`waiting`: dispatch, and ops that are ready but not started. So

    makespan = busy time of compute + sum over the other lanes of their exposed time + waiting

where compute's busy time is the sum of its ops at full speed and what other lanes slow them by (`slowed_ns`).
It says who was at work while compute stood still, not that a faster lane would give all of that back: another may bind right after it.
"""

from __future__ import annotations

from megatrain.simulator.costs import CostModel
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.timeline import Timeline

WAITING = "waiting"


def exposed_ns(timeline: Timeline) -> dict[str, float]:
    """Lane -> exposed nanoseconds, for every lane of the timeline but compute, and `waiting`."""
    lanes = list(dict.fromkeys(span.lane for span in timeline.spans))
    exposed = dict.fromkeys([lane for lane in lanes if lane != "compute"] + [WAITING], 0.0)
    changes = sorted(
        (time, sign, span.lane) for span in timeline.spans for time, sign in ((span.start_ns, 1), (span.end_ns, -1)) if span.end_ns > span.start_ns
    )
    busy: dict[str, int] = dict.fromkeys(lanes, 0)
    before = 0
    for time, sign, lane in changes:
        if time > before and not busy.get("compute"):
            running = [name for name, count in busy.items() if count] or [WAITING]
            for name in running:
                exposed[name] += (time - before) / len(running)
        before = time
        busy[lane] += sign
    return exposed


def slowed_ns(timeline: Timeline, schedule: Schedule, costs: CostModel) -> int:
    """By how much longer compute was busy than its ops take alone, because of what the other lanes did at the same time."""
    alone = sum(costs.duration_ns(op) for op in schedule.lanes.get("compute", ()))
    return max(timeline.busy_ns("compute") - alone, 0)
