"""Tests of the lines that a training prints without progress bars."""

from __future__ import annotations

import doctest
import io
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.checkpoint.checkpoint import CheckpointError
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.training import learning_rate, progress
from megatrain.runtime.training.callback import Callback, EvaluationResult, Step
from megatrain.runtime.training.progress import Progress, TimeLeft
from megatrain.runtime.training.training_run import TrainingRun
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.timeline import Timeline


def lines(place: Path, prepare: Any, progress: Progress, *others: Callback, **fields: Any) -> None:
    prepare(place, callbacks=[progress, *others], steps=8, export=False, **fields).fit()


def test_the_first_three_steps_the_last_and_events_between_are_printed(
    place: Path, prepare: Any
) -> None:
    printed_lines: list[str] = []
    every = {"evaluation.every_steps": 6, "over_steps": 1, "saving.every_minutes": 30}
    held_out = str(place / "corpus")
    given = {**every, "evaluation_data": held_out, "rate": 1e-5}
    lines(place, prepare, Progress(every_seconds=3600, write=printed_lines.append), **given)
    steps = [line for line in printed_lines if re.match(r"step \d+/8  ", line)]
    assert [line.partition("/")[0] for line in steps] == [f"step {n}" for n in (1, 2, 3, 8)]
    pattern = r"step 3/8  loss \d\.\d{4}  lr 1e-5  [\d,]+ tokens/s  \d+ s left"
    assert re.fullmatch(pattern, steps[2]), steps
    assert "left" not in steps[-1]
    rest = printed_lines[printed_lines.index(steps[2]) + 1 :]
    assert re.fullmatch(r"step 6  evaluation loss \d\.\d{4}, perplexity [\d.,]+", rest[0])
    assert rest[-1] == "step 8  checkpoint saved"
    assert "learning rate 1e-5, constant, 2 warm-up steps" in printed_lines, "notes are printed too"


def test_the_last_step_and_the_reason_of_a_stop_are_printed(place: Path, prepare: Any) -> None:
    """The callback stops the training after the line of its step could have been printed."""

    class Stop(Callback):
        def on_step(self, trainer: TrainingRun, step: Step) -> None:
            if step.number == last:
                trainer.stop("good enough")

    held_out = str(place / "corpus")
    given = {"evaluation_data": held_out, "over_steps": 1, "export": False, "steps": 6}
    every = {"saving.every_minutes": 30, **given}
    for last in (5, 6):
        printed_lines: list[str] = []
        printed = Progress(every_seconds=3600, write=printed_lines.append)
        prepare(place, f"run-{last}", callbacks=[printed, Stop()], **every).fit()
        if last == 5:
            step, evaluation, saved, reason = printed_lines[-4:]
            assert re.fullmatch(r"step 5/6  loss \d\.\d{4}  lr 1e-3  [\d,]+ tokens/s", step)
            assert evaluation.startswith("step 5  evaluation loss ")
            assert saved == "step 5  checkpoint saved"
            assert reason == "stopped after step 5: good enough"
        else:
            assert not [line for line in printed_lines if "good enough" in line], "not early"


def test_a_stop_that_is_not_the_last_event_is_not_printed_as_one(place: Path, prepare: Any) -> None:
    """The step after a stop in `on_save` is the last. After an error no reason is printed."""

    class Stop(Callback):
        def on_save(self, trainer: TrainingRun, number: int) -> None:
            trainer.stop("good enough")
            if number == 5:
                raise UserError("tracker", found="no key", allowed="a key", fix="log in")

    printed_lines: list[str] = []
    printed = Progress(every_seconds=3600, write=printed_lines.append)
    every = {"evaluation.every_steps": 4, "saving.every_steps": 4, "over_steps": 1}
    with pytest.raises(UserError, match="no key"):
        lines(place, prepare, printed, Stop(), evaluation_data=str(place / "corpus"), **every)
    steps = [line.partition("/")[0] for line in printed_lines if re.match(r"step \d/8  ", line)]
    assert steps == [f"step {number}" for number in (1, 2, 3, 5)]
    assert not [line for line in printed_lines if "good enough" in line]


def owe_an_evaluation(trainer: Any) -> None:
    """Makes the checkpoint that `trainer` restores owe an evaluation."""
    restore = trainer._restore

    def owing() -> bool:
        restored: bool = restore()
        trainer._evaluation_pending = True
        return restored

    trainer._restore = owing


def test_the_reason_of_a_stop_in_an_evaluation_is_printed_with_its_step(
    place: Path, prepare: Any
) -> None:
    """The second run stops in an evaluation that the checkpoint owes, before any step."""

    class Stop(Callback):
        def on_evaluation(self, trainer: TrainingRun, evaluation: EvaluationResult) -> None:
            trainer.stop("good enough")

    fields = {"evaluation.every_steps": 4, "saving.every_steps": 4, "over_steps": 1}
    fields |= {"evaluation_data": str(place / "corpus"), "steps": 6, "export": False}
    for resume in (None, "newest"):
        printed_lines: list[str] = []
        printed = Progress(every_seconds=3600, write=printed_lines.append)
        trainer = prepare(place, callbacks=[printed, Stop()], resume=resume, **fields)
        if resume:
            owe_an_evaluation(trainer)
        fitted = trainer.fit()
        assert (fitted.steps, fitted.stopped) == (4, "good enough")
        assert fitted.evaluation is not None
        assert printed_lines[-1] == "stopped after step 4: good enough"
        steps = [line for line in printed_lines if line.startswith("step 4/6")]
        assert len(steps) == (0 if resume else 1)


def test_every_step_is_printed_if_the_interval_is_zero(place: Path, prepare: Any) -> None:
    printed_lines: list[str] = []
    lines(place, prepare, Progress(every_seconds=0, write=printed_lines.append))
    assert sum(line.startswith("step ") for line in printed_lines) == 8


@pytest.mark.parametrize("printed", [True, False])
def test_a_trainer_prints_its_progress_unless_disabled(
    place: Path, prepare: Any, capsys: pytest.CaptureFixture[str], printed: bool
) -> None:
    capsys.readouterr()
    prepare(place, None, steps=1, progress=printed).fit()
    assert ("step 1/1  loss " in capsys.readouterr().out) == printed


def test_a_log_that_cannot_be_written_or_lacks_a_character_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    Progress().on_note("\u00abo\u00bb")
    assert out.getvalue() == rb"\xabo\xbb" + b"\n"

    class Gone(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    Progress().on_note("lost")


def test_the_time_left_is_that_of_the_steps_after_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step of a process or of another plan takes longer and does not count."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    left, found = TimeLeft(3), list[float]()
    for now[0], number in ((100.0, 3), (104.0, 4), (110.0, 5)):
        found.append(left.after(number, 10))
    assert found == [0.0, 4.0 * 6, 5.0 * 5]


def test_after_another_plan_the_time_left_is_that_of_its_own_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, printed_lines = [0.0], list[str]()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    trainer: Any = types.SimpleNamespace(
        first_step=1, config=types.SimpleNamespace(training=types.SimpleNamespace(steps=9))
    )
    printed = Progress(every_seconds=0, write=printed_lines.append)
    printed.on_start(trainer)
    for number in range(1, 8):
        now[0] += 1000 if number < 5 else 10
        if number == 5:
            trainer.first_step = number
            printed.on_switch(trainer, 0.0)
        printed.on_step(
            trainer,
            Step(
                number=number,
                loss=1.0,
                gradient_norm=None,
                rate=0.0,
                seconds=1.0,
                tokens_per_second=1.0,
                timeline=Timeline(name="measured", digest="", spans=()),
            ),
        )
    assert [line.rpartition("  ")[2] for line in printed_lines[3:]] == [
        "1.4 h left",
        "1 tokens/s",
        "30 s left",
        "20 s left",
    ]


@pytest.mark.parametrize("module", [learning_rate, progress])
def test_the_examples_in_docstrings_are_right(module: types.ModuleType) -> None:
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted


def test_a_duration_has_the_largest_unit_that_it_fills() -> None:
    found = [progress.format_duration(seconds) for seconds in (59, 60, 3600, 172_799, 172_800)]
    assert found == ["59 s", "1.0 min", "1.0 h", "48.0 h", "2.0 days"]


def test_a_checkpoint_that_failed_is_not_called_saved(
    place: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise CheckpointError("step-00000004 was not saved: input/output error")

    printed_lines: list[str] = []
    monkeypatch.setattr(Checkpoints, "save", fail)
    saving = {"saving.every_steps": 4, "saving.on_failure": "go on"}
    lines(place, prepare, Progress(every_seconds=3600, write=printed_lines.append), **saving)
    assert "step-00000004 was not saved: input/output error" in printed_lines
    assert not [line for line in printed_lines if line.endswith("checkpoint saved")]
