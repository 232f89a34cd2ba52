"""Exposed time: how long compute is idle while each of the other lanes is busy, from a timeline.

Time in which no compute op runs is divided equally among the other lanes that are busy. If no lane
is busy, it counts as `waiting`: dispatch, and ops that are ready but have not started. Therefore

    makespan = busy time of compute + sum of the exposed times of the other lanes + waiting

Compute's busy time is the sum of its ops at full speed plus the time by which other lanes slow them
down (`slowed_ns`). A faster lane may save less than its exposed time, because another lane may then
limit the step.
"""

from __future__ import annotations

from megatrain.simulator.costs import CostModel
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.timeline import Timeline

WAITING = "waiting"


def exposed_ns(timeline: Timeline) -> dict[str, float]:
    """Returns exposed nanoseconds by lane, for every lane of the timeline except compute, and for
    `waiting`.
    """
    lanes = list(dict.fromkeys(span.lane for span in timeline.spans))
    exposed = dict.fromkeys([lane for lane in lanes if lane != "compute"] + [WAITING], 0.0)
    changes = sorted(
        (time, sign, span.lane)
        for span in timeline.spans
        for time, sign in ((span.start_ns, 1), (span.end_ns, -1))
        if span.end_ns > span.start_ns
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
    """Returns the nanoseconds by which other lanes slowed compute.

    This is compute's busy time minus the durations of its ops at full speed.
    """
    alone = sum(costs.duration_ns(op) for op in schedule.lanes.get("compute", ()))
    return max(timeline.busy_ns("compute") - alone, 0)
