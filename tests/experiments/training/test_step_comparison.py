"""Tests of StepComparison, which compares the first steps of a training with the prediction, and of
RangeWatch, which notes steps outside of the predicted range.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from megatrain.experiments.cli.training import step_comparison
from megatrain.experiments.cli.training.step_comparison import (
    OUTSIDE,
    WATCHED,
    RangeWatch,
    advice_on,
    describe_difference,
    error_text,
    predicted_seconds,
)
from megatrain.simulator.compare.compare import compare
from megatrain.simulator.compare.error_report import peak_error
from megatrain.simulator.compare.error_table import signed_percent
from megatrain.simulator.costs import cost_model
from megatrain.simulator.engine.discrete_event import simulate
from megatrain.simulator.hardware.machine import HardwareSpec, library
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.policies import verified
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline

TRAIN = ("train", "plan.toml", "--data", "corpus", "--device", "cpu", "--no-export")


@pytest.mark.parametrize("machine", ["h200", "corrected.toml"])
@pytest.mark.usefixtures("workplace")
def test_a_training_compares_its_third_to_fifth_step_with_the_prediction(
    command: Any, machine: str
) -> None:
    """A hardware file with corrections and no calibration does not count as measured."""
    text = library()["h200"].read_text()
    Path("corrected.toml").write_text(f"{text}\n[corrections]\ncompute = 1.0\n")
    plan = Path("plan.toml")
    plan.write_text(plan.read_text().replace('hardware = "h200"', f'hardware = "{machine}"'))
    outcome = command(*TRAIN, "--steps", 6, "--out", "run")
    assert (outcome.status, outcome.err) == (0, "")
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("measured ")]
    assert re.match(
        r"measured [\d.]+ \w+ a step, predicted [\d.]+ [um]s"
        r" \(([\d,.]+ times the prediction|error [+-][\d.]+ %)\);"
        r" device pools [\d.]+ KiB, predicted [\d.]+ KiB",
        line,
    ), line
    before, _, after = outcome.out.partition(line)
    assert re.match(
        r"\nthe largest part of the difference: (\w+ on \w+, measured .* a step, predicted .*"
        r"|time with no lane busy|the lane \w+)\n"
        r"the plan is for a machine of the library: measure this one",
        after,
    ), after
    assert "learning rate 1e-5" in before
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == 6


@pytest.mark.parametrize("content", ["spoilt", None], ids=["damaged", "missing"])
@pytest.mark.usefixtures("workplace")
def test_a_training_without_its_hardware_file_says_that_steps_are_not_compared(
    command: Any, content: str | None
) -> None:
    plan = Path("plan.toml")
    plan.write_text(plan.read_text().replace('hardware = "h200"', 'hardware = "here.toml"'))
    if content is not None:
        Path("here.toml").write_text(content)
    outcome = command(*TRAIN, "--steps", 6, "--out", "run")
    assert (outcome.status, outcome.err) == (0, "")
    assert "measured " not in outcome.out
    (note,) = [line for line in outcome.out.splitlines() if "not compared" in line]
    assert note.startswith("step times are not compared with the prediction: ")
    assert "here.toml" in note


@pytest.fixture(scope="module")
def prediction(prepared: Path) -> tuple[Plan, Any, Timeline]:
    plan = Plan.load(prepared / "plan.toml")
    schedule = verified(plan)
    costs = cost_model(HardwareSpec.load("h200"), plan.model, plan.workload)
    return plan, schedule, simulate(schedule, costs)


def slower(timeline: Timeline, kinds: dict[str, str], kind: str, added_ns: int) -> Timeline:
    """Returns the timeline with longer ops of one kind, which delay all later ops."""
    spans, shift = [], 0
    for span in sorted(timeline.spans, key=lambda each: each.start_ns):
        more = added_ns if kinds[span.op] == kind else 0
        start, end = span.start_ns + shift, span.end_ns + shift + more
        spans.append(msgspec.structs.replace(span, start_ns=start, end_ns=end))
        shift += more
    return msgspec.structs.replace(timeline, spans=tuple(spans))


@pytest.mark.parametrize(("added", "explained"), [(0, False), (10**9, True)])
def test_a_large_difference_is_explained_by_a_kind_of_operation_and_its_lane(
    prediction: tuple[Plan, Any, Timeline], added: int, explained: bool
) -> None:
    _, schedule, predicted = prediction
    kinds = {op.id: op.kind for op in schedule.ops}
    lane = next(op.lane for op in schedule.ops if op.kind == "forward")
    measured = slower(predicted, kinds, "forward", added)
    seconds = {3: measured.makespan_ns / 1e9}
    memory = (peak_error("device pools", 2**20, 2**20),)
    report = compare(predicted, measured, schedule, step_seconds=seconds, memory=memory)
    line = "; ".join(describe_difference(report, schedule, advice="the advice"))
    assert ("(error +0.0 %); device pools 1.00 MiB, predicted 1.00 MiB" in line) == (not explained)
    assert (
        f"the largest part of the difference: forward on {lane}, measured " in line
    ) == explained
    assert line.endswith("; the advice") == explained
    assert json.dumps(line).isascii()


@pytest.mark.parametrize(
    ("share", "text"), [(1.25, "error -20.0 %"), (0.8, "error +25.0 %"), (2.5, "2.5 times the")]
)
def test_an_error_has_the_same_sign_as_in_compare(
    prediction: tuple[Plan, Any, Timeline], share: float, text: str
) -> None:
    """An error is always predicted / measured - 1."""
    _, schedule, predicted = prediction
    seconds = {3: share * predicted.makespan_ns / 1e9}
    report = compare(predicted, predicted, schedule, step_seconds=seconds)
    assert report.steps is not None
    assert error_text(report).startswith(text)
    if share < 2:
        assert text == f"error {signed_percent(report.steps.median_error)}"
    lines = describe_difference(report, schedule, advice="the advice")
    assert (lines[-1] == "the advice") == (share > 1)


def test_no_advice_is_given_for_a_much_faster_step(prediction: tuple[Plan, Any, Timeline]) -> None:
    _, schedule, predicted = prediction
    seconds = {3: predicted.makespan_ns / 2e9}
    report = compare(predicted, predicted, schedule, step_seconds=seconds)
    (line,) = describe_difference(report, schedule, advice="the advice")
    assert line.endswith(", faster than predicted)")


def test_the_advice_names_only_options_of_the_command() -> None:
    assert "`--recalibrate`" in advice_on(calibrated=True, recalibrates=True)
    assert "`megatrain calibrate`, and plan again" in advice_on(calibrated=True, recalibrates=False)
    assert "machine of the library" in advice_on(calibrated=False, recalibrates=True)
    together = advice_on(calibrated=True, recalibrates=False, gpus=2)
    assert "`megatrain calibrate --several`" in together


CALIBRATED = (
    Path(__file__).parents[3] / "experiments" / "results" / "h200-qwen2.5-3b" / "hardware.toml"
)


class Watched:
    """A training with a step of 1 s. With the library's H200, the range is 0.9 to 1.1 s."""

    first_step = 1

    def __init__(self, plan: Plan, hardware: str = "h200") -> None:
        assert plan.prediction is not None
        prediction = msgspec.structs.replace(plan.prediction, step_seconds=1.0)
        self.plan = msgspec.structs.replace(plan, prediction=prediction, hardware=hardware)
        self.origin, self.notes, self.number = Path(), list[str](), 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def run(self, watch: RangeWatch, *seconds: float) -> None:
        for each in seconds:
            self.number += 1
            watch.on_step(self, SimpleNamespace(number=self.number, seconds=each))


@pytest.mark.usefixtures("workplace")
def test_steps_that_leave_the_predicted_range_are_noted_once_for_each_plan() -> None:
    training, watch = Watched(Plan.load(Path("plan.toml"))), RangeWatch()
    training.run(watch, *[9.0] * 2)  # the warm-up
    training.run(watch, *[1.0] * (WATCHED - OUTSIDE + 1), *[1.5] * (OUTSIDE - 1))
    assert not training.notes
    training.run(watch, 1.5)
    (note,) = training.notes
    assert note.startswith(
        "15 of the last 20 steps were longer than the predicted range of 900.000 ms to 1.100 s"
        " (median 1.500 s): "
    ), note
    assert "megatrain calibrate" in note
    training.run(watch, *[2.0] * 50)
    assert len(training.notes) == 1
    watch.on_switch(training, 1.0)
    training.run(watch, *[0.5] * WATCHED)
    assert "20 of the last 20 steps were shorter" in training.notes[1]


@pytest.mark.usefixtures("workplace")
def test_steps_on_both_sides_of_the_range_and_a_missing_hardware_file_are_not_noted() -> None:
    training, watch = Watched(Plan.load(Path("plan.toml"))), RangeWatch()
    training.run(watch, *[0.5, 1.5] * 40)
    lost = Watched(Plan.load(Path("plan.toml")), "lost.toml")
    lost.run(RangeWatch(), *[9.0] * 80)
    assert training.notes == lost.notes == []


@pytest.mark.usefixtures("workplace")
def test_a_step_time_is_predicted_for_another_length_of_documents() -> None:
    plan = Plan.load(Path("plan.toml"))
    assert plan.prediction
    same = predicted_seconds(msgspec.structs.replace(plan, hardware="h200"), Path())
    lost = msgspec.structs.replace(plan, hardware="lost.toml")
    assert same == plan.prediction.step_seconds == predicted_seconds(lost, Path())
    work = msgspec.structs.replace(plan.workload, batch=2 * plan.workload.batch)
    other = msgspec.structs.replace(plan, hardware="h200", workload=work)
    assert predicted_seconds(other, Path()) > same


def test_on_a_measured_machine_the_usual_cause_is_named() -> None:
    """The command `train MODEL` names its own option, which other commands do not have."""
    plan = Plan.load(CALIBRATED.parent / "plan.toml")
    for recalibrates, advice in (
        (False, "measure this machine again with `megatrain calibrate`, and plan again"),
        (True, "a run with `--recalibrate` measures it again"),
    ):
        training = Watched(plan, str(CALIBRATED))
        training.run(RangeWatch(recalibrates=recalibrates), *[9.0] * 40)
        (note,) = training.notes
        assert "20 of the last 20 steps were longer than the predicted range of" in note
        cause = "other programs may be running now, or ran when this machine was measured"
        assert note.endswith(f": {cause}; {advice}"), note
        assert "\n" not in note


@pytest.mark.parametrize("recalibrates", [False, True])
def test_layers_that_were_not_measured_are_the_cause(recalibrates: bool) -> None:
    """The calibration is that of another model. Other programs are not named then."""
    plan = Plan.load(CALIBRATED.parent / "plan.toml")
    model = ModelSpec.load("mistral-7b").with_layers(2)
    unmeasured = Watched(msgspec.structs.replace(plan, model=model), str(CALIBRATED))
    other = Watched(plan, str(CALIBRATED))
    for training in (unmeasured, other):
        training.run(RangeWatch(recalibrates=recalibrates), *[9.0] * 40)
    said = "the layers of this model were not measured on this machine; "
    (note,) = unmeasured.notes
    assert f": {said}" in note
    assert "other programs" not in note
    assert said not in other.notes[0]


@pytest.mark.usefixtures("workplace")
def test_the_first_steps_name_layers_that_were_not_measured(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        step_comparison, "unmeasured_layers", lambda machine, model: f"{machine.name} {model.name}"
    )
    outcome = command(*TRAIN, "--steps", 6, "--out", "run")
    assert (outcome.status, outcome.err) == (0, "")
    assert "\nh200 tiny\n" in outcome.out
    assert "the plan is for a machine of the library" not in outcome.out
