"""Compare: a predicted step against the measured one, op by op.

Every relative error is `(predicted - measured) / measured`: negative means that the prediction was too fast. Three errors are kept
apart. *End to end*: the steps' lengths. *Engine*: the measured durations played by the engine against the measured step, so what the
schedule's rules and the machine's dispatch leave out (host work, waiting that is in no dependency). *Cost model*: what the durations
make of the step, and per op, kind and lane how far they are off. Of the step the three add up:

    predicted - measured = (predicted - replayed) + (replayed - measured),    cost model + engine = end to end

Where in the step it went wrong say its parts: compute's busy time, what each other lane makes compute wait for, and waiting for nobody
(`exposed.py`). Their differences add up to the step's, but they are no causes: compute that is foretold too slow hides more of the copies beside it.
Which kind of op is to blame says its weight: the step with this kind's measured durations among the predicted ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from megatrain.simulator.costs import Replayed
from megatrain.simulator.error_report import Divergence, ErrorReport, KindError, LaneError, OrderViolation, PeakError, StepPart, StepsError, relative_error
from megatrain.simulator.evaluator import evaluate
from megatrain.simulator.exposed import exposed_ns
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.timeline import Timeline

CLOCK_SKEW_NS = 20_000
"""How far the clocks of two lanes may disagree: CUDA events and the host's clock are joined to within some microseconds."""


def compare(
    predicted: Timeline, measured: Timeline, schedule: Schedule, *,
    replayed: Timeline | None = None, step_seconds: Mapping[int, float] | None = None, overhead_ns: int = 0, memory: Sequence[PeakError] = (),
    tolerance_ns: int = CLOCK_SKEW_NS, divergence: float = 0.01,
) -> ErrorReport:  # fmt: skip
    """How well `predicted` foretold `measured`, both of `schedule`.

    `replayed` is the measured durations played by the engine; without it neither engine nor cost model have an error of the step, and nothing
    diverges. `step_seconds`: wall time of the run's steady steps by number, to be compared with the predicted step and `overhead_ns` of host
    time outside of it. `memory`: goes into the report. `tolerance_ns`: an op may start this much early before it breaks the order. `divergence`:
    an op diverges when it starts later than replayed by more than this share of the measured step. Raises ValueError for timelines of another
    schedule, for missing or unknown ops, and for a measured step of no length.
    """
    for timeline in (predicted, measured, *([replayed] if replayed else [])):
        _check(timeline, schedule)
    step_ns = measured.makespan_ns
    if not step_ns:
        raise ValueError(f"timeline {measured.name}: a step of no length")
    kinds: dict[str, list[str]] = {}
    for op in schedule.ops:
        kinds.setdefault(op.kind, []).append(op.id)
    weights = _weights(predicted, measured, schedule, kinds)
    errors = [_kind_error(kind, ids, predicted, measured, weights[kind]) for kind, ids in kinds.items()]
    spread = _spread(list(schedule.by_id), predicted, measured)
    ready = _ready_ns(measured, schedule)
    late = _latenesses(measured, replayed, ready) if replayed else []
    limit_ns = round(divergence * step_ns)
    return ErrorReport(
        policy=schedule.policy, digest=schedule.digest, ops=len(schedule.ops), predicted_seconds=predicted.makespan_ns / 1e9,
        measured_seconds=step_ns / 1e9, error=(predicted.makespan_ns - step_ns) / step_ns,
        replayed_seconds=replayed.makespan_ns / 1e9 if replayed else None,
        engine_error=(replayed.makespan_ns - step_ns) / step_ns if replayed else None,
        cost_model_error=(predicted.makespan_ns - replayed.makespan_ns) / step_ns if replayed else None,
        median_op_error=spread.median, p95_abs_op_error=spread.p95, worst_op=spread.worst, worst_op_error=spread.worst_error,
        steps=_steps_error((predicted.makespan_ns + overhead_ns) / 1e9, step_seconds) if step_seconds else None,
        kinds=tuple(sorted(errors, key=lambda error: -error.measured_seconds)),
        lanes=tuple(_lane_error(lane, predicted, measured, schedule, ready) for lane in schedule.lanes),
        parts=_parts(predicted, measured, schedule), memory=tuple(memory), tolerance_ns=tolerance_ns, violations=_violations(measured, schedule, tolerance_ns),
        divergence_ns=limit_ns, first_divergence=next((each for each in late if each.late_ns > limit_ns), None),
        latest=max(late, key=lambda each: each.late_ns, default=None),
    )  # fmt: skip


def _check(timeline: Timeline, schedule: Schedule) -> None:
    if timeline.digest != schedule.digest:
        raise ValueError(f"timeline {timeline.name}: of schedule {timeline.digest}, not of {schedule.digest}; compare steps of one schedule")
    odd = sorted(timeline.by_op.keys() ^ schedule.by_id.keys())
    if odd or len(timeline.spans) != len(schedule.ops):
        counts = f"{len(timeline.spans)} spans for {len(schedule.ops)} ops"
        raise ValueError(f"timeline {timeline.name}: {counts}; missing, unknown or twice: {', '.join(odd[:5]) or 'an op'}")


class _Spread(NamedTuple):
    """Of the errors of many: median with sign, P95 of the magnitudes, and the largest with its name."""

    median: float | None
    p95: float | None
    worst: str
    worst_error: float | None

    @classmethod
    def of(cls, errors: Mapping[str, float]) -> _Spread:
        if not errors:
            return cls(None, None, "", None)
        magnitudes = sorted(abs(error) for error in errors.values())
        worst = max(errors, key=lambda name: abs(errors[name]))
        return cls(statistics.median(errors.values()), magnitudes[math.ceil(0.95 * len(magnitudes)) - 1], worst, errors[worst])


def _spread(ids: Collection[str], predicted: Timeline, measured: Timeline) -> _Spread:
    """Of the durations of these ops, without those that nothing was measured of."""
    pairs = {op: relative_error(predicted.by_op[op].duration_ns, measured.by_op[op].duration_ns) for op in ids}
    return _Spread.of({op: error for op, error in pairs.items() if error is not None})


def _weights(predicted: Timeline, measured: Timeline, schedule: Schedule, kinds: Mapping[str, Collection[str]]) -> dict[str, float]:
    """Kind -> `KindError.of_step`. Dispatch is left out on both sides."""

    def step_ns(exact: Collection[str]) -> int:
        spans = tuple((measured if span.op in exact else predicted).by_op[span.op] for span in predicted.spans)
        return evaluate(schedule, Replayed(Timeline(name="mixed", digest=schedule.digest, spans=spans))).makespan_ns

    before = step_ns(())
    return {kind: (before - step_ns(frozenset(ids))) / measured.makespan_ns for kind, ids in kinds.items()}


def _kind_error(kind: str, ids: Sequence[str], predicted: Timeline, measured: Timeline, of_step: float) -> KindError:
    totals = [sum(timeline.by_op[op].duration_ns for op in ids) for timeline in (predicted, measured)]
    spread = _spread(ids, predicted, measured)
    return KindError(
        kind=kind, count=len(ids), predicted_seconds=totals[0] / 1e9, measured_seconds=totals[1] / 1e9, error=relative_error(*totals),
        median_error=spread.median, p95_abs_error=spread.p95, worst_op=spread.worst, worst_error=spread.worst_error,
        of_step=of_step,
    )  # fmt: skip


def _ready_ns(measured: Timeline, schedule: Schedule) -> dict[str, int]:
    """Op -> when the op before it on its lane and all that it waits for had ended."""
    spans, free, ready = measured.by_op, dict.fromkeys(schedule.lanes, 0), {}
    for op in schedule.ops:
        ready[op.id] = max([free[op.lane], *(spans[other].end_ns for other in op.after)])
        free[op.lane] = spans[op.id].end_ns
    return ready


def _lane_error(lane: str, predicted: Timeline, measured: Timeline, schedule: Schedule, ready_ns: Mapping[str, int]) -> LaneError:
    busy = [timeline.busy_ns(lane) for timeline in (predicted, measured)]
    stalled_ns = sum(max(0, measured.by_op[op.id].start_ns - ready_ns[op.id]) for op in schedule.lanes[lane])
    spread = _spread([op.id for op in schedule.lanes[lane]], predicted, measured)
    return LaneError(
        lane=lane, predicted_busy_seconds=busy[0] / 1e9, measured_busy_seconds=busy[1] / 1e9, busy_error=relative_error(*busy),
        predicted_idle_seconds=(predicted.makespan_ns - busy[0]) / 1e9, measured_idle_seconds=(measured.makespan_ns - busy[1]) / 1e9,
        measured_stalled_seconds=stalled_ns / 1e9, count=len(schedule.lanes[lane]),
        median_error=spread.median, p95_abs_error=spread.p95, worst_op=spread.worst, worst_error=spread.worst_error,
    )  # fmt: skip


def _parts(predicted: Timeline, measured: Timeline, schedule: Schedule) -> tuple[StepPart, ...]:
    """Compute is what the others leave, not the sum of its ops: by a measurement's clock two of them may overlap."""
    exposed = [exposed_ns(predicted), exposed_ns(measured)]
    sizes = [{"compute": timeline.makespan_ns - sum(each.values()), **each} for timeline, each in zip((predicted, measured), exposed, strict=True)]
    others = [lane for lane in schedule.lanes if lane != "compute"]
    return tuple(
        StepPart(name=name, predicted_seconds=before / 1e9, measured_seconds=after / 1e9, of_step=(before - after) / measured.makespan_ns)
        for name in ("compute", *others, "waiting")
        for before, after in [(sizes[0][name], sizes[1][name])]
    )


def _steps_error(predicted_seconds: float, measured: Mapping[int, float]) -> StepsError:
    errors = {str(step): (predicted_seconds - seconds) / seconds for step, seconds in measured.items()}
    spread = _Spread.of(errors)
    assert spread.median is not None
    assert spread.p95 is not None
    return StepsError(
        count=len(errors), predicted_seconds=predicted_seconds, median_seconds=statistics.median(measured.values()),
        median_error=spread.median, p95_abs_error=spread.p95, worst_step=int(spread.worst), worst_error=errors[spread.worst],
    )  # fmt: skip


def _violations(measured: Timeline, schedule: Schedule, tolerance_ns: int) -> tuple[OrderViolation, ...]:
    spans = measured.by_op
    waits = [(op.id, other, "dependency") for op in schedule.ops for other in op.after]
    waits += [(second.id, first.id, "lane") for queue in schedule.lanes.values() for first, second in pairwise(queue)]
    found = [
        OrderViolation(op=op, waits_for=other, rule=rule, early_ns=spans[other].end_ns - spans[op].start_ns)
        for op, other, rule in waits
        if spans[op].start_ns < spans[other].end_ns - tolerance_ns
    ]
    return tuple(sorted(found, key=lambda violation: spans[violation.op].start_ns))


def _latenesses(measured: Timeline, replayed: Timeline, ready_ns: Mapping[str, int]) -> list[Divergence]:
    """Every op's start, measured and replayed, by measured start."""
    spans = sorted(measured.spans, key=lambda span: span.start_ns)
    return [
        Divergence(op=span.op, measured_start_ns=span.start_ns, replayed_start_ns=replayed.by_op[span.op].start_ns, ready_ns=ready_ns[span.op])
        for span in spans
    ]
