"""ErrorReport: how well a step was predicted, as plain data. `compare.py` says what its errors mean and computes them.

Every relative error is `(predicted - measured) / measured`: negative means that the prediction was too fast, or too small.
"""

from __future__ import annotations

from typing import Any

import msgspec


def relative_error(predicted: float, measured: float) -> float | None:
    """(predicted - measured) / measured; None where something was predicted and nothing measured."""
    if not measured:
        return None if predicted else 0.0
    return (predicted - measured) / measured


class KindError(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the ops of one kind. An error is None where nothing was measured to relate it to."""

    kind: str
    count: int
    predicted_seconds: float
    measured_seconds: float
    error: float | None
    """of the total"""
    median_error: float | None
    """over the ops, signed"""
    p95_abs_error: float | None
    """the smallest |error| that at least 95 % of the ops do not exceed"""
    worst_op: str
    worst_error: float | None
    of_step: float = 0.0
    """how much of the step's error would go if these ops alone were foretold exactly, in the schedule, all others as predicted"""


class LaneError(msgspec.Struct, frozen=True, kw_only=True):
    """What one lane did during the step; idle is the step less busy."""

    lane: str
    predicted_busy_seconds: float
    measured_busy_seconds: float
    busy_error: float | None
    predicted_idle_seconds: float
    measured_idle_seconds: float
    measured_stalled_seconds: float
    """of the measured idle: the next op had all it waits for and did not start (launch overhead, host work)"""
    count: int = 0
    median_error: float | None = None
    """over the durations of its ops, as of a kind; so too the next three"""
    p95_abs_error: float | None = None
    worst_op: str = ""
    worst_error: float | None = None


class StepPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the step; all of them add up to it, predicted and measured."""

    name: str
    """`compute`: it was busy; another lane: what that one made compute wait for (exposed); `waiting`: no lane was busy"""
    predicted_seconds: float
    measured_seconds: float
    of_step: float
    """predicted - measured, over the measured step: all parts' together are the step's error"""


class StepsError(msgspec.Struct, frozen=True, kw_only=True):
    """The predicted step, the host's time outside the schedule included, against the wall time of every steady step of the run."""

    count: int
    predicted_seconds: float
    median_seconds: float
    median_error: float
    p95_abs_error: float
    worst_step: int
    worst_error: float


class PeakError(msgspec.Struct, frozen=True, kw_only=True):
    """The most bytes that something takes."""

    what: str
    predicted_bytes: int
    measured_bytes: int
    error: float | None


class OrderViolation(msgspec.Struct, frozen=True, kw_only=True):
    """An op was seen to start before one that it has to wait for had ended."""

    op: str
    waits_for: str
    rule: str
    """`dependency`, or `lane`: the op before it in its lane"""
    early_ns: int


class Divergence(msgspec.Struct, frozen=True, kw_only=True):
    """An op that started later than the measured durations explain."""

    op: str
    measured_start_ns: int
    replayed_start_ns: int
    ready_ns: int = 0
    """measured: all that it waits for, and its lane, had come so far; what it is late by beyond that, it is late of itself"""

    @property
    def late_ns(self) -> int:
        """By how much, in nanoseconds."""
        return self.measured_start_ns - self.replayed_start_ns


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """How well a step was predicted. Plain data, JSON-able."""

    policy: str
    digest: str
    ops: int
    predicted_seconds: float
    measured_seconds: float
    error: float
    """end to end"""
    replayed_seconds: float | None
    engine_error: float | None
    cost_model_error: float | None = None
    """of the step: predicted - replayed, over measured; with the engine's error it is the error end to end"""
    median_op_error: float | None = None
    """of the durations of all ops, as of a kind; so too the next three"""
    p95_abs_op_error: float | None = None
    worst_op: str = ""
    worst_op_error: float | None = None
    steps: StepsError | None = None
    """None where the run's other steps are not known"""
    kinds: tuple[KindError, ...]
    """longest measured total first"""
    lanes: tuple[LaneError, ...]
    parts: tuple[StepPart, ...] = ()
    """compute, the other lanes as the schedule has them, waiting"""
    memory: tuple[PeakError, ...] = ()
    tolerance_ns: int
    violations: tuple[OrderViolation, ...]
    """by measured start"""
    divergence_ns: int = 0
    """an op diverges when it starts later than replayed by more than this"""
    first_divergence: Divergence | None
    latest: Divergence | None = None
    """the op that is furthest behind its replayed start, however little that is"""

    def to_rows(self) -> list[dict[str, Any]]:
        """One flat row for the step, each kind, each lane (its busy time) and each part, with the same keys, for a table of many runs."""

        def row(scope: str, name: str, count: int, predicted: float, measured: float, error: float | None) -> dict[str, Any]:
            about = {"policy": self.policy, "digest": self.digest, "scope": scope, "name": name, "count": count}
            return {**about, "predicted_seconds": predicted, "measured_seconds": measured, "error": error}

        rows = [row("step", "step", 1, self.predicted_seconds, self.measured_seconds, self.error)]
        rows += [row("kind", kind.kind, kind.count, kind.predicted_seconds, kind.measured_seconds, kind.error) for kind in self.kinds]
        rows += [row("lane", lane.lane, 1, lane.predicted_busy_seconds, lane.measured_busy_seconds, lane.busy_error) for lane in self.lanes]
        parts = [(part, relative_error(part.predicted_seconds, part.measured_seconds)) for part in self.parts]
        return rows + [row("part", part.name, 1, part.predicted_seconds, part.measured_seconds, error) for part, error in parts]


def peak_error(what: str, predicted_bytes: int, measured_bytes: int) -> PeakError:
    """With its relative error, None where something was predicted and nothing measured."""
    return PeakError(what=what, predicted_bytes=predicted_bytes, measured_bytes=measured_bytes, error=relative_error(predicted_bytes, measured_bytes))
