"""Defines `ErrorReport`: the errors of a predicted step, as plain data.

`compare.py` explains and computes them. Every relative error is
`(predicted - measured) / measured`. A negative error means that the prediction was too fast or too
small.
"""

from __future__ import annotations

import msgspec


def relative_error(predicted: float, measured: float) -> float | None:
    """Returns (predicted - measured) / measured.

    If `measured` is 0, returns 0 if `predicted` is also 0, and None otherwise.
    """
    if not measured:
        return None if predicted else 0.0
    return (predicted - measured) / measured


class KindError(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the durations of all ops of one kind.

    An error is None if the measured duration is 0.
    """

    kind: str
    """Kind of op."""
    count: int
    """Number of ops of this kind."""
    predicted_seconds: float
    """Sum of the predicted durations."""
    measured_seconds: float
    """Sum of the measured durations."""
    error: float | None
    """Relative error of the sum."""
    median_error: float | None
    """Signed median of the errors of single ops."""
    p95_abs_error: float | None
    """95th percentile of the absolute errors of single ops. At least 95 % of the ops have no larger
    error."""
    worst_op: str
    """Op with the largest absolute error."""
    worst_error: float | None
    """Signed error of `worst_op`."""
    of_step: float = 0.0
    """Weight of this kind: by how much the predicted step becomes shorter if the ops of this kind
    have their measured durations and all others their predicted ones, divided by the measured
    step."""


class LaneErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Busy and idle time of one lane during the step, and the errors of its ops."""

    lane: str
    """Name of the lane."""
    predicted_busy_seconds: float
    """Predicted time in which the lane runs an op."""
    measured_busy_seconds: float
    """Measured time in which the lane runs an op."""
    busy_error: float | None
    """Relative error of the busy time. None if the measured time is 0."""
    predicted_idle_seconds: float
    """Predicted time in which the lane runs no op."""
    measured_idle_seconds: float
    """Measured time in which the lane runs no op."""
    measured_stalled_seconds: float
    """Part of the measured idle time in which the next op was ready but did not start, for example
    because of launch overhead or host work."""
    count: int = 0
    """Number of ops on this lane."""
    median_error: float | None = None
    """Signed median of the errors of op durations on this lane."""
    p95_abs_error: float | None = None
    """95th percentile of the absolute errors of op durations on this lane."""
    worst_op: str = ""
    """Op on this lane with the largest absolute error."""
    worst_error: float | None = None
    """Signed error of `worst_op`."""


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the step. The parts add up to the step, both predicted and measured."""

    name: str
    """`compute` for the time in which compute is busy, the name of another lane for the exposed
    time of that lane, or `waiting` for the time in which no lane is busy."""
    predicted_seconds: float
    """Predicted length of the part."""
    measured_seconds: float
    """Measured length of the part."""
    of_step: float
    """Predicted minus measured length, divided by the measured step. The values of all parts add up
    to the error of the step."""


class StepsError(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of the predicted step against the wall time of each steady step of a run."""

    count: int
    """Number of measured steps."""
    predicted_seconds: float
    """Predicted step, including the host's time outside the schedule."""
    median_seconds: float
    """Median of the measured steps."""
    median_error: float
    """Signed median of the errors."""
    p95_abs_error: float
    """95th percentile of the absolute errors."""
    worst_step: int
    """Number of the step with the largest absolute error."""
    worst_error: float
    """Signed error of `worst_step`."""


class PeakError(msgspec.Struct, frozen=True, kw_only=True):
    """Error of the peak memory of one pool or process."""

    what: str
    """Name of the pool or process."""
    predicted_bytes: int
    """Predicted peak."""
    measured_bytes: int
    """Measured peak."""
    error: float | None
    """Relative error. None if bytes were predicted but none measured."""


class OrderViolation(msgspec.Struct, frozen=True, kw_only=True):
    """An op that started before the end of another op that it has to wait for."""

    op: str
    """The op that started too early."""
    waits_for: str
    """The op that had not ended."""
    rule: str
    """Why `op` has to wait: `dependency`, or `lane` if `waits_for` is before it on its lane."""
    early_ns: int
    """Time by which `op` started too early, in ns."""


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """An op that started later than in a replay with the measured durations."""

    op: str
    """The late op."""
    measured_start_ns: int
    """Measured start in ns."""
    replayed_start_ns: int
    """Start in ns in the replay with measured durations."""
    ready_ns: int = 0
    """Measured time in ns at which the op could have started, because all its dependencies and the
    op before it on its lane had ended. From then until its start, the op waited for nothing in the
    schedule."""

    @property
    def late_ns(self) -> int:
        """Time by which the op started later than in the replay, in ns."""
        return self.measured_start_ns - self.replayed_start_ns


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The errors of a predicted step. Plain data that can be written as JSON."""

    policy: str
    """Policy of the schedule."""
    digest: str
    """Digest of the schedule."""
    ops: int
    """Number of ops of the schedule."""
    predicted_seconds: float
    """Length of the predicted step."""
    measured_seconds: float
    """Length of the measured step."""
    error: float
    """End-to-end error: relative error of the step's length."""
    replayed_seconds: float | None
    """Length of the step that the engine computes from measured durations. None if there is no
    replay."""
    engine_error: float | None
    """Relative error of `replayed_seconds`. None if there is no replay."""
    cost_model_error: float | None = None
    """Predicted minus replayed step, divided by the measured step. The sum of this and the engine
    error is `error`. None if there is no replay."""
    median_op_error: float | None = None
    """Signed median of the errors of all op durations."""
    p95_abs_op_error: float | None = None
    """95th percentile of the absolute errors of all op durations."""
    worst_op: str = ""
    """Op with the largest absolute error of its duration."""
    worst_op_error: float | None = None
    """Signed error of `worst_op`."""
    steps: StepsError | None = None
    """Errors against all steady steps of the run. None if these are not known."""
    kinds: tuple[KindError, ...]
    """Errors by op kind, the longest measured sum first."""
    lanes: tuple[LaneErrors, ...]
    """Errors by lane."""
    parts: tuple[StepPart, ...] = ()
    """Parts of the step: compute, the other lanes in the order of the schedule, and waiting."""
    memory: tuple[PeakError, ...] = ()
    """Errors of memory peaks."""
    tolerance_ns: int
    """Time in ns by which an op may start too early without a violation."""
    violations: tuple[OrderViolation, ...]
    """Violations of the order, ordered by measured start."""
    divergence_ns: int = 0
    """An op diverges if it starts later than in the replay by more than this time in ns."""
    first_divergence: Divergence | None
    """The first op, by measured start, that diverges. None if no op diverges, or if there is no
    replay."""
    latest: Divergence | None = None
    """The op with the largest delay against the replay, even if it does not diverge. None if there
    is no replay."""


def peak_error(what: str, predicted_bytes: int, measured_bytes: int) -> PeakError:
    """Returns the error of a predicted memory peak. `what` names the pool or process."""
    return PeakError(
        what=what,
        predicted_bytes=predicted_bytes,
        measured_bytes=measured_bytes,
        error=relative_error(predicted_bytes, measured_bytes),
    )
