"""Compares a predicted step with the measured one, op by op.

Every relative error is `(predicted - measured) / measured`. A negative error means that the
prediction was too fast. There are three errors of the step:

* The end-to-end error compares the lengths of both steps.
* The engine error compares the measured step with a replay, in which the engine runs the schedule
  with the measured durations. It shows what the engine does not model, such as host work and waits
  that are not dependencies of the schedule.
* The cost model error is the effect of wrong durations on the step. Errors of durations are also
  reported for each op, kind and lane.

The last two add up to the first:

    predicted - measured = (predicted - replayed) + (replayed - measured)
    end to end           = cost model             + engine

Two further numbers help to find the cause:

* The parts of the step are the time in which compute is busy, the exposed time of each other lane,
  and the time in which no lane runs (`exposed.py`). Their differences add up to the difference of
  the step. A difference need not be a cause: if compute is predicted too slow, it hides more of the
  copies, so their exposed time is predicted too short.
* The weight of an op kind says how much the predicted step changes if the ops of this kind get
  their measured durations.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatrain.simulator.compare.error_report import (
    Divergence,
    ErrorReport,
    KindError,
    LaneErrors,
    OrderViolation,
    PeakError,
    StepPart,
    StepsError,
    relative_error,
)
from megatrain.simulator.costs import Replayed
from megatrain.simulator.engine.evaluator import evaluate
from megatrain.simulator.engine.exposed import exposed_ns
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.timeline import Timeline

CLOCK_SKEW_NS = 20_000
"""Largest expected difference of the clocks of two lanes, in ns. CUDA events and the host's clock
are aligned to within a few microseconds."""


def compare(
    predicted: Timeline,
    measured: Timeline,
    schedule: Schedule,
    *,
    replayed: Timeline | None = None,
    step_seconds: Mapping[int, float] | None = None,
    overhead_ns: int = 0,
    memory: Sequence[PeakError] = (),
    tolerance_ns: int = CLOCK_SKEW_NS,
    divergence: float = 0.01,
) -> ErrorReport:
    """Returns the errors of a predicted timeline against a measured one.

    Args:
        predicted: The predicted timeline.
        measured: The measured timeline.
        schedule: The schedule of all timelines.
        replayed: The timeline that the engine computes from the measured durations. Without it, the
            report has no engine error, no cost model error, and no divergence.
        step_seconds: Step number -> wall time of the steady steps of the run. They are compared
            with the predicted step plus `overhead_ns`.
        overhead_ns: Host time of a step outside the schedule, in ns.
        memory: Errors of memory peaks, to be included in the report.
        tolerance_ns: An op violates the order if it starts too early by more than this time.
        divergence: An op diverges if it starts later than in the replay by more than this share of
            the measured step.

    Raises ValueError for a timeline of another schedule, for missing or unknown ops, and for a
    measured step of length 0.
    """
    for timeline in (predicted, measured, *([replayed] if replayed else [])):
        _check(timeline, schedule)
    step_ns = measured.makespan_ns
    if not step_ns:
        raise ValueError(f"timeline {measured.name}: the step has length 0")
    kinds: dict[str, list[str]] = {}
    for op in schedule.ops:
        kinds.setdefault(op.kind, []).append(op.id)
    weights = _weights(predicted, measured, schedule, kinds)
    errors = [
        _kind_error(kind, ids, predicted, measured, weights[kind]) for kind, ids in kinds.items()
    ]
    spread = _spread(list(schedule.by_id), predicted, measured)
    ready = _ready_ns(measured, schedule)
    late = _latenesses(measured, replayed, ready) if replayed else []
    limit_ns = round(divergence * step_ns)
    return ErrorReport(
        policy=schedule.policy,
        digest=schedule.digest,
        ops=len(schedule.ops),
        predicted_seconds=predicted.makespan_ns / 1e9,
        measured_seconds=step_ns / 1e9,
        error=(predicted.makespan_ns - step_ns) / step_ns,
        replayed_seconds=replayed.makespan_ns / 1e9 if replayed else None,
        engine_error=(replayed.makespan_ns - step_ns) / step_ns if replayed else None,
        cost_model_error=(
            (predicted.makespan_ns - replayed.makespan_ns) / step_ns if replayed else None
        ),
        median_op_error=spread.median,
        p95_abs_op_error=spread.p95,
        worst_op=spread.worst,
        worst_op_error=spread.worst_error,
        steps=(
            _steps_error((predicted.makespan_ns + overhead_ns) / 1e9, step_seconds)
            if step_seconds
            else None
        ),
        kinds=tuple(sorted(errors, key=lambda error: -error.measured_seconds)),
        lanes=tuple(
            _lane_error(lane, predicted, measured, schedule, ready) for lane in schedule.lanes
        ),
        parts=_parts(predicted, measured, schedule),
        memory=tuple(memory),
        tolerance_ns=tolerance_ns,
        violations=_violations(measured, schedule, tolerance_ns),
        divergence_ns=limit_ns,
        first_divergence=next((entry for entry in late if entry.late_ns > limit_ns), None),
        latest=max(late, key=lambda entry: entry.late_ns, default=None),
    )


def _check(timeline: Timeline, schedule: Schedule) -> None:
    """Raises ValueError if the timeline does not have exactly one span for each op."""
    if timeline.digest != schedule.digest:
        raise ValueError(
            f"timeline {timeline.name}: belongs to schedule {timeline.digest}, not to"
            f" {schedule.digest}; compare timelines of the same schedule"
        )
    odd = sorted(timeline.by_op.keys() ^ schedule.by_id.keys())
    if odd or len(timeline.spans) != len(schedule.ops):
        counts = f"{len(timeline.spans)} spans for {len(schedule.ops)} ops"
        raise ValueError(
            f"timeline {timeline.name}: {counts}; missing, unknown or duplicate:"
            f" {', '.join(odd[:5]) or 'an op'}"
        )


class _Spread(NamedTuple):
    """Statistics of the errors of several ops or steps."""

    median: float | None
    """Signed median. None if there are no errors."""
    p95: float | None
    """95th percentile of the absolute errors. None if there are no errors."""
    worst: str
    """Name of the op or step with the largest absolute error. Empty if there are no errors."""
    worst_error: float | None
    """Signed error of `worst`. None if there are no errors."""

    @classmethod
    def of(cls, errors: Mapping[str, float]) -> _Spread:
        """Returns the statistics of `errors`, a mapping of name -> error."""
        if not errors:
            return cls(None, None, "", None)
        magnitudes = sorted(abs(error) for error in errors.values())
        worst = max(errors, key=lambda name: abs(errors[name]))
        return cls(
            statistics.median(errors.values()),
            magnitudes[math.ceil(0.95 * len(magnitudes)) - 1],
            worst,
            errors[worst],
        )


def _spread(ids: Collection[str], predicted: Timeline, measured: Timeline) -> _Spread:
    """Returns the statistics of the errors of the durations of the ops `ids`.

    Ops with a measured duration of 0 and a longer predicted one are left out.
    """
    pairs = {
        op: relative_error(predicted.by_op[op].duration_ns, measured.by_op[op].duration_ns)
        for op in ids
    }
    return _Spread.of({op: error for op, error in pairs.items() if error is not None})


def _weights(
    predicted: Timeline,
    measured: Timeline,
    schedule: Schedule,
    kinds: Mapping[str, Collection[str]],
) -> dict[str, float]:
    """Returns `KindError.of_step` for each kind. Dispatch times are left out."""

    def step_ns(exact: Collection[str]) -> int:
        spans = tuple(
            (measured if span.op in exact else predicted).by_op[span.op] for span in predicted.spans
        )
        return evaluate(
            schedule, Replayed(Timeline(name="mixed", digest=schedule.digest, spans=spans))
        ).makespan_ns

    before = step_ns(())
    return {
        kind: (before - step_ns(frozenset(ids))) / measured.makespan_ns
        for kind, ids in kinds.items()
    }


def _kind_error(
    kind: str, ids: Sequence[str], predicted: Timeline, measured: Timeline, of_step: float
) -> KindError:
    """Returns the errors of the ops `ids`, all of one kind."""
    totals = [
        sum(timeline.by_op[op].duration_ns for op in ids) for timeline in (predicted, measured)
    ]
    spread = _spread(ids, predicted, measured)
    return KindError(
        kind=kind,
        count=len(ids),
        predicted_seconds=totals[0] / 1e9,
        measured_seconds=totals[1] / 1e9,
        error=relative_error(*totals),
        median_error=spread.median,
        p95_abs_error=spread.p95,
        worst_op=spread.worst,
        worst_error=spread.worst_error,
        of_step=of_step,
    )


def _ready_ns(measured: Timeline, schedule: Schedule) -> dict[str, int]:
    """Returns, for each op, the measured time in ns at which it could have started, which is when
    all its dependencies and the op before it on its lane had ended.
    """
    spans, free, ready = measured.by_op, dict.fromkeys(schedule.lanes, 0), {}
    for op in schedule.ops:
        ready[op.id] = max([free[op.lane], *(spans[other].end_ns for other in op.after)])
        free[op.lane] = spans[op.id].end_ns
    return ready


def _lane_error(
    lane: str,
    predicted: Timeline,
    measured: Timeline,
    schedule: Schedule,
    ready_ns: Mapping[str, int],
) -> LaneErrors:
    """Returns the errors of one lane. `ready_ns` is the result of `_ready_ns`."""
    busy = [timeline.busy_ns(lane) for timeline in (predicted, measured)]
    stalled_ns = sum(
        max(0, measured.by_op[op.id].start_ns - ready_ns[op.id]) for op in schedule.lanes[lane]
    )
    spread = _spread([op.id for op in schedule.lanes[lane]], predicted, measured)
    return LaneErrors(
        lane=lane,
        predicted_busy_seconds=busy[0] / 1e9,
        measured_busy_seconds=busy[1] / 1e9,
        busy_error=relative_error(*busy),
        predicted_idle_seconds=(predicted.makespan_ns - busy[0]) / 1e9,
        measured_idle_seconds=(measured.makespan_ns - busy[1]) / 1e9,
        measured_stalled_seconds=stalled_ns / 1e9,
        count=len(schedule.lanes[lane]),
        median_error=spread.median,
        p95_abs_error=spread.p95,
        worst_op=spread.worst,
        worst_error=spread.worst_error,
    )


def _parts(predicted: Timeline, measured: Timeline, schedule: Schedule) -> tuple[StepPart, ...]:
    """Returns the parts of the step: compute, the exposed time of each other lane, and waiting.

    Compute is the rest of the step, not the sum of its ops, because measured ops may overlap
    slightly on one lane.
    """
    sizes = []
    for timeline in (predicted, measured):
        exposed = exposed_ns(timeline)
        sizes.append({"compute": timeline.makespan_ns - sum(exposed.values()), **exposed})
    others = [lane for lane in schedule.lanes if lane != "compute"]
    return tuple(
        StepPart(
            name=name,
            predicted_seconds=before / 1e9,
            measured_seconds=after / 1e9,
            of_step=(before - after) / measured.makespan_ns,
        )
        for name in ("compute", *others, "waiting")
        for before, after in [(sizes[0][name], sizes[1][name])]
    )


def _steps_error(predicted_seconds: float, measured: Mapping[int, float]) -> StepsError:
    """Returns the errors of the predicted step. `measured` is step number -> seconds."""
    errors = {
        str(step): (predicted_seconds - seconds) / seconds for step, seconds in measured.items()
    }
    spread = _Spread.of(errors)
    assert spread.median is not None
    assert spread.p95 is not None
    return StepsError(
        count=len(errors),
        predicted_seconds=predicted_seconds,
        median_seconds=statistics.median(measured.values()),
        median_error=spread.median,
        p95_abs_error=spread.p95,
        worst_step=int(spread.worst),
        worst_error=errors[spread.worst],
    )


def _violations(
    measured: Timeline, schedule: Schedule, tolerance_ns: int
) -> tuple[OrderViolation, ...]:
    """Returns the ops that started before the end of an op that they must wait for, ordered by
    measured start.
    """
    spans = measured.by_op
    waits = [
        *((op.id, other, "dependency") for op in schedule.ops for other in op.after),
        *(
            (second.id, first.id, "lane")
            for queue in schedule.lanes.values()
            for first, second in pairwise(queue)
        ),
    ]
    violations = [
        OrderViolation(
            op=op, waits_for=other, rule=rule, early_ns=spans[other].end_ns - spans[op].start_ns
        )
        for op, other, rule in waits
        if spans[op].start_ns < spans[other].end_ns - tolerance_ns
    ]
    return tuple(sorted(violations, key=lambda violation: spans[violation.op].start_ns))


def _latenesses(
    measured: Timeline, replayed: Timeline, ready_ns: Mapping[str, int]
) -> list[Divergence]:
    """Returns the measured and the replayed start of each op, ordered by measured start."""
    spans = sorted(measured.spans, key=lambda span: span.start_ns)
    return [
        Divergence(
            op=span.op,
            measured_start_ns=span.start_ns,
            replayed_start_ns=replayed.by_op[span.op].start_ns,
            ready_ns=ready_ns[span.op],
        )
        for span in spans
    ]
