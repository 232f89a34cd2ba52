"""corrections: computes how much longer the ops of a run took than predicted, by kind and lane."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.timeline import Timeline


def corrections(
    predicted: Timeline, measured: Sequence[Timeline], schedule: Schedule
) -> dict[str, float]:
    """Returns the factors of `HardwareSpec.corrections` that turn `predicted` into `measured`.

    A factor is the measured time of all ops of a kind on a lane, divided by their predicted time.
    The measured time is the median of the steps, so one slow step does not change the factors.
    Kinds whose measured or predicted time is 0 have no factor.

    Args:
        predicted: The predicted timeline, without corrections.
        measured: The timelines of one or more steady steps.
        schedule: The schedule of all timelines.
    """
    before, after = durations([predicted], schedule), durations(measured, schedule)
    return {key: time / before[key] for key, time in after.items() if time > 0 and before[key] > 0}


def durations(timelines: Sequence[Timeline], schedule: Schedule) -> dict[str, float]:
    """Returns the total duration of ops in a step, in ns, as the median of the timelines.

    The keys are `KIND@LANE`, the lanes, and `all`.
    """
    steps = []
    for timeline in timelines:
        totals: Counter[str] = Counter()
        for op in schedule.ops:
            for key in (f"{op.kind}@{op.lane}", op.lane, "all"):
                totals[key] += timeline.by_op[op.id].duration_ns
        steps.append(totals)
    return {key: float(statistics.median(step[key] for step in steps)) for key in steps[0]}
