"""Callbacks that compare the steps of a training with their prediction.

`StepComparison` compares the first steps, and `RangeWatch` all later ones. They use only
measurements that every run makes, and run between steps.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path

from megatrain.experiments.cli.file_arguments import hardware_of
from megatrain.experiments.cli.options import unmeasured_layers
from megatrain.experiments.files.peaks import memory_errors
from megatrain.runtime.training.callback import Callback, Step
from megatrain.runtime.training.run_folder import measured_memory
from megatrain.runtime.training.training_run import TrainingRun
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.units import format_bytes, format_seconds
from megatrain.simulator.compare.compare import compare
from megatrain.simulator.compare.error_report import ErrorReport
from megatrain.simulator.compare.error_table import signed_percent
from megatrain.simulator.costs import costs_of
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.planner.assessment import step_seconds
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.verdict.step_range import step_range

COMPARED_STEPS = 3
"""Number of steps that are compared, after the warm-up."""
LARGE = 0.05
"""If the step is slower than predicted by more than this error, the difference is explained."""
WATCHED, OUTSIDE = 20, 15
"""If `OUTSIDE` of the last `WATCHED` steps are longer, or shorter, than the predicted range, the
user is told. At random this is rare: the range holds for 90 % of steps."""
_USUAL = "other programs may be running now, or ran when this machine was measured"
"""The usual reason why a calibrated machine is slower or faster than predicted."""
_LEAST_SHARE = 0.1
"""A kind of operation is named only if it explains at least this share of the difference."""


class StepComparison(Callback):
    """Notes measured and predicted step time and memory, once for each plan, after its first steps.

    The first two steps are left out. If the step is much slower than predicted, another note names
    the kind of operation and the lane that explain the largest part of the difference.
    """

    def __init__(
        self, show: Callable[[str], object] | None = None, *, recalibrates: bool = False
    ) -> None:
        """Creates the callback.

        Args:
            show: called with a short text on the error of the predicted step time, if given.
            recalibrates: whether the command measures the machine itself and has the option
                `--recalibrate`. The advice then names this option.
        """
        self._show, self._recalibrates = show, recalibrates
        self._seconds: dict[int, float] = {}
        self._done = False

    def on_start(self, trainer: TrainingRun) -> None:
        """Notes why steps cannot be compared, if the plan's hardware file is missing or damaged."""
        try:
            hardware_of(trainer.origin / "plan.toml", trainer.plan.hardware)
        except UserError as error:
            trainer.note(f"step times are not compared with the prediction: {error}")

    def on_switch(self, trainer: TrainingRun, seconds: float) -> None:
        """Starts a new comparison, for the new plan."""
        self._seconds, self._done = {}, False

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        if self._done or step.number < trainer.first_step + WARM_UP_STEPS:
            return
        self._seconds[step.number] = step.seconds
        if len(self._seconds) < COMPARED_STEPS:
            return
        self._done = True
        try:
            report = self._compare(trainer)
        except UserError:  # noted at the start; it must not stop the training
            return
        advice = _advice(trainer, recalibrates=self._recalibrates)
        for note in describe_difference(report, trainer.executor.schedule, advice=advice):
            trainer.note(note)
        if self._show is not None and report.steps is not None:
            self._show(f"step time {error_text(report, 'predicted with ')}")

    def _compare(self, trainer: TrainingRun) -> ErrorReport:
        plan, schedule = trainer.plan, trainer.executor.schedule
        hardware = hardware_of(trainer.origin / "plan.toml", plan.hardware)
        costs = costs_of(plan, hardware)
        memory = measured_memory(trainer.executor, trainer.device_bytes_before)
        return compare(
            simulate(schedule, costs),
            trainer.measured,
            schedule,
            step_seconds=self._seconds,
            overhead_ns=costs.step_overhead_ns,
            memory=memory_errors(memory, plan, schedule, costs),
        )


class RangeWatch(Callback):
    """Notes once for each plan that steps have left the predicted range of the step time.

    They have left it if at least `OUTSIDE` of the last `WATCHED` steps are longer than the range,
    or if as many are shorter. The range holds for most steps, so single steps outside are expected.
    """

    def __init__(self, *, recalibrates: bool = False) -> None:
        """`recalibrates` is an argument of `StepComparison`."""
        self._recalibrates = recalibrates
        self._seconds: deque[float] = deque(maxlen=WATCHED)
        self._range: tuple[float, float] | None = None
        self._done = False

    def on_switch(self, trainer: TrainingRun, seconds: float) -> None:
        """Watches the steps of the new plan."""
        self._seconds.clear()
        self._range, self._done = None, False

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        if self._done or step.number < trainer.first_step + WARM_UP_STEPS:
            return
        self._seconds.append(step.seconds)
        if len(self._seconds) < WATCHED:
            return
        if self._range is None:
            self._range = _predicted_range(trainer)
            self._done = self._range is None
        if self._range is not None and (note := self._note(*self._range, trainer)):
            self._done = True
            trainer.note(note)

    def _note(self, low: float, high: float, trainer: TrainingRun) -> str:
        """Returns the note, or an empty text if the steps are within the range."""
        longer = sum(seconds > high for seconds in self._seconds)
        shorter = sum(seconds < low for seconds in self._seconds)
        if max(longer, shorter) < OUTSIDE:
            return ""
        count, word = (longer, "longer") if longer >= OUTSIDE else (shorter, "shorter")
        advice = _advice(trainer, recalibrates=self._recalibrates, usual=f"{_USUAL}; ")
        return (
            f"{count} of the last {WATCHED} steps were {word} than the predicted range of"
            f" {format_seconds(low)} to {format_seconds(high)} (median"
            f" {format_seconds(statistics.median(self._seconds))}): {advice}"
        )


def _advice(trainer: TrainingRun, *, recalibrates: bool, usual: str = "") -> str:
    """Returns why the steps of a training may differ from their prediction, as one line, and how to
    get a better prediction.

    It is that layers were not measured, or `advice_on`. On a calibrated machine, `usual` comes
    before the latter, which names the usual reason itself if `recalibrates` is set.
    """
    plan = trainer.plan
    try:
        hardware = hardware_of(trainer.origin / "plan.toml", plan.hardware)
    except UserError:  # the file was removed after the steps were predicted
        hardware = None
    if hardware is not None and (note := unmeasured_layers(hardware, plan.model)):
        return note
    calibrated = hardware is not None and hardware.costs is not None
    advice = advice_on(calibrated=calibrated, recalibrates=recalibrates, gpus=plan.gpus)
    return f"{usual}{advice}" if calibrated and not recalibrates else advice


def predicted_seconds(plan: Plan, folder: Path) -> float:
    """Returns the predicted step time of `plan` in seconds. Its files are seen from `folder`.

    If its machine cannot be read, it is the time that was predicted when the plan was made.
    """
    assert plan.prediction is not None
    try:
        costs = costs_of(plan, hardware_of(folder / "plan.toml", plan.hardware))
    except UserError:  # a missing or damaged hardware file must not stop the training
        return plan.prediction.step_seconds
    return step_seconds(lower(plan), costs)


def _predicted_range(trainer: TrainingRun) -> tuple[float, float] | None:
    """Returns the range of the step time in seconds, or None if it is not known."""
    plan = trainer.plan
    if plan.prediction is None:
        return None
    try:
        hardware = hardware_of(trainer.origin / "plan.toml", plan.hardware)
        low, high = step_range(plan, plan.prediction.step_seconds, hardware)
    except UserError:  # a missing or damaged hardware file must not stop the training
        return None
    return None if low is None or high is None else (low, high)


def error_text(report: ErrorReport, before: str = "") -> str:
    """Returns the error of the predicted step time as text, such as `error -1.3 %`, after `before`.

    For a step that took at least twice the predicted time, the text is such as `2.5 times the
    prediction`, without `before`.
    """
    assert report.steps is not None
    ratio = report.steps.median_seconds / report.steps.predicted_seconds
    if ratio >= 2:
        return f"{ratio:,.1f} times the prediction"
    return f"{before}error {signed_percent(1 / ratio - 1)}"


def describe_difference(report: ErrorReport, schedule: Schedule, *, advice: str) -> list[str]:
    """Returns one line with the measured and predicted step time and memory.

    If the step is much slower than predicted, two more lines follow: the largest part of the
    difference, and `advice`.
    """
    steps, memory = report.steps, report.memory
    assert steps is not None
    shown = [error for error in memory if error.what == "whole device peak"] or list(memory)[:1]
    error = steps.predicted_seconds / steps.median_seconds - 1
    faster = ", faster than predicted" if error > LARGE else ""
    line = (
        f"measured {format_seconds(steps.median_seconds)} a step, predicted"
        f" {format_seconds(steps.predicted_seconds)} ({error_text(report)}{faster})"
    )
    for peak in shown:
        line += (
            f"; {peak.what} {format_bytes(peak.measured_bytes)}, predicted"
            f" {format_bytes(peak.predicted_bytes)}"
        )
    return [line, _explained(report, schedule), advice] if error < -LARGE else [line]


def advice_on(*, calibrated: bool, recalibrates: bool, gpus: int = 1) -> str:
    """Returns one line that says how to get a better prediction.

    Args:
        calibrated: whether the machine was measured, and does not come from the library.
        recalibrates: whether the command measures the machine itself and has the option
            `--recalibrate`.
        gpus: the number of GPUs of the plan.
    """
    if calibrated and gpus > 1:
        return (
            "measure the GPUs together with `megatrain calibrate --several`"
            " (docs/several_gpus.md), and plan again"
        )
    if not calibrated:
        return (
            "the plan is for a machine of the library: measure this one with `megatrain"
            " calibrate`, and plan again"
        )
    if recalibrates:
        return f"{_USUAL}; a run with `--recalibrate` measures it again"
    return "measure this machine again with `megatrain calibrate`, and plan again"


def _explained(report: ErrorReport, schedule: Schedule) -> str:
    """Returns a line on the largest part of the difference: a kind of operation and its lane or, if
    each kind explains less than 10 %, a part of the step.
    """
    sign = 1 if report.error > 0 else -1
    kind = max(report.kinds, key=lambda kind: sign * kind.of_step)
    share = kind.of_step / report.error if report.error else 0.0
    if share < _LEAST_SHARE:
        part = max(report.parts, key=lambda part: sign * part.of_step)
        where = "time with no lane busy" if part.name == "waiting" else f"the lane {part.name}"
        return f"the largest part of the difference: {where}"
    lane = next(op.lane for op in schedule.ops if op.kind == kind.kind)
    return (
        f"the largest part of the difference: {kind.kind} on {lane}, measured"
        f" {format_seconds(kind.measured_seconds)} a step, predicted"
        f" {format_seconds(kind.predicted_seconds)}"
    )
