"""Tests of callbacks: they are called for every event in order.

Evaluations, checkpoints and requests of callbacks come between steps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.runtime.checkpoint import checkpoint
from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.training import trainer as trainer_module
from megatrain.runtime.training.callback import Callback, CallbackError, EvaluationResult, Step
from megatrain.runtime.training.config import Config, TrainingSettings
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import Interrupted, RunError, UserError
from megatrain.simulator.schedule.plan import Plan

CPU = torch.device("cpu")
TEXT = "".join(
    f"def function_{index}(argument):\n    return argument + {index}\n\n" for index in range(200)
)


class Recorder(Callback):
    """Records all events in order."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.loaded: list[int] = []
        self.events: list[tuple[str, Any]] = []

    def on_load(self, parameters: int) -> None:
        self.loaded.append(parameters)

    def on_start(self, trainer: Trainer) -> None:
        self.events.append(("start", trainer.first_step))

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self.steps.append(step)
        self.events.append(("step", step.number))

    def on_evaluation(self, trainer: Trainer, evaluation: EvaluationResult) -> None:
        self.events.append(("evaluation", evaluation.number))

    def on_save(self, trainer: Trainer, number: int) -> None:
        self.events.append(("save", number))

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        self.events.append(("end", error))


def test_training_from_python_needs_few_lines(place: Path) -> None:
    config = Config(
        training=TrainingSettings(steps=3), schedule=LearningRate(kind="cosine", warm_up_steps=1)
    )
    recorder = Recorder()
    fitted = Trainer(
        place / "plan.toml",
        place / "small",
        place / "corpus",
        config,
        callbacks=[recorder],
        device=CPU,
    ).fit()
    assert (fitted.steps, fitted.loss, fitted.evaluation, fitted.stopped) == (
        3,
        recorder.steps[-1].loss,
        None,
        "",
    )
    assert recorder.events == [("start", 1), ("step", 1), ("step", 2), ("step", 3), ("end", None)]
    assert sorted(path.name for path in place.iterdir()) == ["corpus", "plan.toml", "small"], (
        "a folder was made although no run folder was asked for"
    )


def test_evaluation_and_saving_come_every_n_steps_and_at_the_end_and_change_nothing(
    place: Path, prepare: Any, run: Any
) -> None:
    (place / "held-out.txt").write_text(TEXT[:3000])
    straight = run(place, "straight")
    recorder = Recorder()
    held_out = str(place / "held-out.txt")
    trainer = prepare(
        place,
        "both",
        callbacks=[recorder],
        evaluation_data=held_out,
        **{"evaluation.every_steps": 2, "over_steps": 3, "saving.every_steps": 3},
    )
    fitted = trainer.fit()
    between = [
        ("evaluation", 2),
        ("step", 3),
        ("save", 3),
        ("step", 4),
        ("evaluation", 4),
        ("step", 5),
        ("evaluation", 5),
        ("save", 5),
        ("end", None),
    ]
    assert recorder.events == [("start", 1), ("step", 1), ("step", 2), *between]
    rows = [
        json.loads(line) for line in (place / "both" / "metrics.jsonl").read_text().splitlines()
    ]
    found = [row for row in rows if "evaluation_loss" in row]
    assert [row["step"] for row in found] == [2, 4, 5]
    assert all(
        row["perplexity"] == pytest.approx(math.exp(row["evaluation_loss"])) for row in found
    )
    assert fitted.evaluation is not None
    assert (fitted.evaluation.loss, fitted.evaluation.tokens) == (
        found[-1]["evaluation_loss"],
        3 * straight.plan.workload.step_tokens,
    )
    assert found[-1]["evaluation_loss"] < found[0]["evaluation_loss"] < math.log(300)
    exported = [
        (place / name / "model" / "model.safetensors").read_bytes() for name in ("straight", "both")
    ]
    assert exported[0] == exported[1]
    assert sorted(path.name for path in (place / "both" / "checkpoints").iterdir()) == [
        "step-00000003",
        "step-00000005",
    ]
    assert not (place / "straight" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("evaluate", "evaluated"),
    [(0, "only after the last step"), (2, "every 6 steps and after the last step"), (3, "")],
)
def test_a_note_says_which_checkpoints_can_be_the_best(
    place: Path, prepare: Any, evaluate: int, evaluated: str
) -> None:
    """A note says which checkpoints `keep_best` can choose from.

    A checkpoint without an evaluation at its step has no loss to compare.
    """
    (place / "held-out.txt").write_text(TEXT[:300])
    notes: list[str] = []
    recorder = Recorder()
    recorder.on_note = notes.append  # type: ignore[method-assign]
    every = {"evaluation.every_steps": evaluate, "saving.every_steps": 3}
    prepare(
        place,
        callbacks=[recorder],
        evaluation_data=str(place / "held-out.txt"),
        keep_best=1,
        export=False,
        **every,
    ).fit()
    said = [note for note in notes if note.startswith("keep_best")]
    assert said == (
        [
            "keep_best chooses only among checkpoints with an evaluation at the same step:"
            f" {evaluated}"
        ]
        if evaluated
        else []
    )


@pytest.mark.parametrize(("evaluated", "best"), [([], 2), ([3.0, 2.0, 1.0, 4.0], 3)])
def test_the_best_checkpoint_has_the_least_evaluation_loss_or_without_evaluations_the_least_loss(
    place: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch, evaluated: list[float], best: int
) -> None:
    step = Trainer._step

    def scripted_step(self: Trainer, data: Any, number: int, before: Any) -> Step:
        losses = [5.0, 1.5, 4.0, 3.0]
        return dataclasses.replace(step(self, data, number, before), loss=losses[number - 1])

    monkeypatch.setattr(Trainer, "_step", scripted_step)
    monkeypatch.setattr(
        Trainer,
        "_evaluate",
        lambda *given: EvaluationResult(
            number=given[2], loss=evaluated[given[2] - 1], tokens=1, seconds=0.0
        ),
    )
    (place / "held-out.txt").write_text(TEXT[:300])
    fields = (
        {"evaluation_data": str(place / "held-out.txt"), "evaluation.every_steps": 1}
        if evaluated
        else {}
    )
    prepare(
        place,
        steps=4,
        keep_last=1,
        keep_best=1,
        export=False,
        **{"saving.every_steps": 1},
        **fields,
    ).fit()
    kept = {
        path.name: Manifest.load(path).run.loss
        for path in (place / "run" / "checkpoints").iterdir()
    }
    assert kept == {
        f"step-{best:08d}": (evaluated or [5.0, 1.5, 4.0, 3.0])[best - 1],
        "step-00000004": evaluated[-1] if evaluated else 3.0,
    }


def test_callbacks_draw_the_same_random_numbers_with_the_same_seed(
    place: Path, prepare: Any
) -> None:
    class Draw(Callback):
        def on_start(self, trainer: Trainer) -> None:
            self.drawn = torch.rand(3).tolist()

    found = []
    for before, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(before)
        draw = Draw()
        prepare(place, None, callbacks=[draw], seed=seed, steps=1).fit()
        found.append(draw.drawn)
    assert found[0] == found[1] != found[2]


def test_an_evaluation_is_over_all_labels_of_all_its_data(place: Path, prepare: Any) -> None:
    """An evaluation counts all labels of its data, even in rows or steps that are not full."""
    (place / "held-out.txt").write_text(TEXT[:200])
    evaluation = (
        prepare(place, None, evaluation_data=str(place / "held-out.txt"), steps=1, rate=0.0)
        .fit()
        .evaluation
    )
    assert evaluation is not None
    assert evaluation.tokens == 200
    model = AutoModelForCausalLM.from_pretrained(place / "small")
    ids, length, losses = (
        [*TEXT[:200].encode(), 256],
        Plan.load(place / "plan.toml").workload.sequence,
        [],
    )
    for start in range(0, 200, length):
        row = torch.tensor([ids[start : min(start + length, 200) + 1]])
        with torch.no_grad():
            losses.append(
                float(
                    torch.nn.functional.cross_entropy(
                        model(row[:, :-1]).logits[0], row[0, 1:], reduction="sum"
                    )
                )
            )
    assert evaluation.loss == pytest.approx(sum(losses) / 200, rel=1e-5)


def refuse_to_write(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_checkpoint_that_cannot_be_written_stops_the_training(
    place: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any
) -> None:
    monkeypatch.setattr(checkpoint, "write_tensors", refuse_to_write)
    recorder = Recorder()
    with pytest.raises(
        RunError,
        match=(
            r"checkpoint .*step-00000002 was not saved: no space left on device; earlier"
            r" checkpoints are unchanged"
        ),
    ):
        prepare(place, callbacks=[recorder], **{"saving.every_steps": 2}).fit()
    assert recorder.events[-2:] == [("step", 2), ("end", recorder.events[-1][1])]


def test_a_last_checkpoint_that_cannot_be_written_does_not_cost_the_model(
    place: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any
) -> None:
    monkeypatch.setattr(checkpoint, "write_tensors", refuse_to_write)
    with pytest.raises(RunError, match=r"checkpoint .*step-00000005 was not saved"):
        prepare(place, **{"saving.every_minutes": 30}).fit()
    assert (place / "run" / "model" / "model.safetensors").exists()


@pytest.mark.parametrize("policy", ["double_buffer", "overlapped"])
def test_a_checkpoint_by_the_clock_changes_no_bit_and_has_every_update(
    place: Path, run: Any, executable: Any, policy: str
) -> None:
    """One run saves after each step, because of the clock. The other saves only at its end."""
    plan = executable(policy, vocabulary=300, dtype="fp32", accumulation=2, clipping="global")
    plan.save(place / "plan.toml")
    every = {"saving.every_minutes": 1e-12, "keep_last": 9}
    run(place, "often", **every)
    run(place, "once", **{"saving.every_minutes": 30})
    run(place, "short", steps=3, **{"saving.every_minutes": 30})
    folders = {name: place / name / "checkpoints" for name in ("often", "once", "short")}
    assert [sorted(path.name[-1] for path in each.iterdir()) for each in folders.values()] == [
        ["1", "2", "3", "4", "5"],
        ["5"],
        ["3"],
    ]
    for step, other in ((5, "once"), (3, "short")):
        states = [
            (folders[name] / f"step-0000000{step}" / "state-00001.safetensors").read_bytes()
            for name in ("often", other)
        ]
        assert states[0] == states[1]
    models = [(place / name / "model/model.safetensors").read_bytes() for name in ("often", "once")]
    assert models[0] == models[1]


def test_with_on_failure_go_on_a_failed_save_is_noted_and_training_continues(
    place: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any
) -> None:
    monkeypatch.setattr(checkpoint, "write_tensors", refuse_to_write)
    notes: list[str] = []
    recorder = Recorder()
    monkeypatch.setattr(recorder, "on_note", notes.append)
    prepare(place, callbacks=[recorder], on_failure="go on", **{"saving.every_steps": 2}).fit()
    assert sum("was not saved: no space left on device" in note for note in notes) == 3
    assert (place / "run" / "model" / "model.safetensors").exists()


def test_a_callback_may_stop_the_training(place: Path, prepare: Any) -> None:
    class Stop(Recorder):
        def on_step(self, trainer: Trainer, step: Step) -> None:
            super().on_step(trainer, step)
            if step.number == 2:
                trainer.stop("enough")

    stop = Stop()
    fitted = prepare(place, callbacks=[stop], **{"saving.every_steps": 10}).fit()
    assert (fitted.steps, fitted.stopped) == (2, "enough")
    assert stop.events[-2:] == [("save", 2), ("end", None)]
    assert (place / "run" / "model" / "model.safetensors").exists()


@pytest.fixture(scope="module")
def short_runs() -> list[bytes]:
    """The exported weights of a run of two steps."""
    return []


@pytest.mark.parametrize("saving", [{}, {"saving.every_steps": 3}, {"saving.every_steps": 2}])
def test_a_stop_in_an_evaluation_ends_the_training_with_the_evaluated_weights(
    place: Path, prepare: Any, short_runs: list[bytes], saving: dict[str, int]
) -> None:
    class Stop(Recorder):
        def on_evaluation(self, trainer: Trainer, evaluation: EvaluationResult) -> None:
            super().on_evaluation(trainer, evaluation)
            if evaluation.number == 2:
                trainer.stop("enough")

    stop = Stop()
    evaluated = {"evaluation.every_steps": 1, "over_steps": 1, **saving}
    held_out = str(place / "corpus")
    trainer = prepare(place, callbacks=[stop], evaluation_data=held_out, **evaluated)
    fitted = trainer.fit()
    assert (fitted.steps, fitted.stopped) == (2, "enough")
    ends = [("step", 2), ("evaluation", 2), ("save", 2), ("end", None)]
    if not saving:
        ends.remove(("save", 2))
    assert stop.events[-len(ends) :] == ends
    assert trainer.saved_step == (2 if saving else None)
    model = Path("model") / "model.safetensors"
    if not short_runs:
        prepare(place, "short", steps=2).fit()
        short_runs.append((place / "short" / model).read_bytes())
    assert (place / "run" / model).read_bytes() == short_runs[0]


def test_a_stop_in_the_last_step_is_not_early_and_a_second_training_forgets_the_first(
    place: Path, prepare: Any
) -> None:
    class Stop(Recorder):
        at = 5

        def on_note(self, text: str) -> None:
            self.events.append(("note", text))

        def on_step(self, trainer: Trainer, step: Step) -> None:
            assert not trainer.finished
            if step.number == self.at:
                trainer.stop("enough")

    stop = Stop()
    trainer = prepare(place, None, callbacks=[stop])
    fitted = []
    for stop.at in (5, 2, 9):
        stop.events.clear()
        fitted.append(trainer.fit())
        assert fitted[-1].stopped == trainer.stopped
        notes = [what for event, what in stop.events if event == "note"]
        assert sum(note.startswith("learning rate") for note in notes) == 1
    assert [(each.steps, each.stopped) for each in fitted] == [(5, ""), (2, "enough"), (5, "")]
    assert fitted[0].loss == fitted[2].loss


CONTINUE = "call `fit` of a new Trainer with the same arguments and resume="


@pytest.mark.parametrize(
    ("out", "signals", "fields", "message"),
    [
        (None, {2: 1}, {}, "after step 2; nothing was saved, since it has no run folder (`out`)"),
        (
            "run",
            {0: 1},
            {},
            f'before the first step; there is no checkpoint; to begin again, {CONTINUE}"scratch"',
        ),
        (
            "run",
            {2: 1},
            {},
            f"after step 2; the newest checkpoint is that of step 2; to continue,"
            f' {CONTINUE}"newest"',
        ),
        (
            "run",
            {3: 2},
            {"saving.every_steps": 2},
            f"after step 3; the newest checkpoint is that of step 2; to continue,"
            f' {CONTINUE}"newest"',
        ),
    ],
    ids=["no folder", "before", "after", "second"],
)
def test_the_text_of_an_interruption_says_what_is_saved(
    place: Path,
    prepare: Any,
    monkeypatch: pytest.MonkeyPatch,
    out: str | None,
    signals: dict[int, int],
    fields: dict[str, Any],
    message: str,
) -> None:
    """The resumed run, if it can be resumed, ends as one that was not interrupted."""

    def send(number: int) -> None:
        for _ in range(signals.get(number, 0)):
            signal.raise_signal(signal.SIGTERM)

    class Sending(Callback):
        def on_step(self, trainer: Trainer, step: Step) -> None:
            send(step.number)

    loop = Trainer._loop

    def begun(self: Trainer, *arguments: Any) -> Any:
        send(0)
        return loop(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_loop", begun)
        with pytest.raises(Interrupted) as error:
            prepare(place, out, callbacks=[Sending()], **fields).fit()
    at_once = 2 in signals.values()
    what = (
        "a second signal, SIGTERM, ended the training at once,"
        if at_once
        else "SIGTERM ended the training"
    )
    assert str(error.value) == f"{what} {message}"
    assert error.value.status == 143
    if out is not None:
        resume = message.rpartition("=")[2].strip('"')
        assert prepare(place, out, resume=resume, **fields).fit().steps == 5


def test_a_callback_sees_whether_a_run_has_finished(place: Path, prepare: Any) -> None:
    seen: list[bool] = []

    class Asking(Callback):
        def on_start(self, trainer: Trainer) -> None:
            seen.append(trainer.finished)

        def on_step(self, trainer: Trainer, step: Step) -> None:
            seen.append(trainer.finished)

        def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
            seen.append(trainer.finished)

    prepare(place, None, callbacks=[Asking()], steps=2).fit()
    assert seen == [False, False, False, True]


def test_a_callback_may_set_the_first_step(place: Path, prepare: Any, run: Any) -> None:
    """A callback may set the first step, for example after it has restored a checkpoint.

    The remaining steps have the same numbers and data as in a whole run.
    """
    whole = Recorder()
    run(place, None, callbacks=[whole], rate=0.0)

    class Resume(Recorder):
        def on_start(self, trainer: Trainer) -> None:
            trainer.first_step = 4

    rest = Resume()
    assert prepare(place, None, callbacks=[rest], rate=0.0).fit().steps == 5
    assert [(step.number, step.loss) for step in rest.steps] == [
        (step.number, step.loss) for step in whole.steps[3:]
    ]


@pytest.mark.parametrize(
    "event", ["on_load", "on_start", "on_step", "on_evaluation", "on_save", "on_end"]
)
def test_a_callback_that_fails_is_named_and_memory_is_released(
    place: Path, event: str, monkeypatch: pytest.MonkeyPatch, prepare: Any
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("oh\nno")

    class Broken(Callback):
        pass

    monkeypatch.setattr(Broken, event, fail)
    recorder = Recorder()
    every = {"evaluation.every_steps": 1, "saving.every_steps": 1, "over_steps": 1}
    trainer = prepare(
        place, callbacks=[Broken(), recorder], evaluation_data=str(place / "corpus"), **every
    )
    threads = threading.active_count()
    with pytest.raises(CallbackError, match=rf"^callback Broken\.{event}: ZeroDivisionError: oh$"):
        trainer.fit()
    assert trainer.executor._arenas._place == {}
    assert threading.active_count() == threads
    assert event == "on_load" or isinstance(recorder.events[-1][1], CallbackError), (
        "the other callbacks must get the end of the run"
    )


class Failing(Callback):
    """Raises `error` in its method `event` at the step `at`."""

    def __init__(self, event: str, at: int, error: Exception) -> None:
        self._at, self._error = at, error
        setattr(self, event, self._fail)

    def _fail(self, _trainer: Trainer, result: Step | EvaluationResult) -> None:
        if result.number == self._at:
            raise self._error


@pytest.mark.parametrize(
    ("event", "at", "error"),
    [
        ("on_step", 3, ZeroDivisionError("oh")),
        ("on_step", 4, RunError("the tracker does not answer")),
        ("on_evaluation", 2, ZeroDivisionError("oh")),
        ("on_evaluation", 5, UserError("tracker", found="no key", allowed="a key", fix="log in")),
    ],
)
def test_a_callback_that_fails_loses_no_step(
    place: Path, prepare: Any, event: str, at: int, error: Exception
) -> None:
    """A checkpoint of the last step is written, also without a regular one. The resumed run gives
    the model of a run that never failed, and each evaluation once.
    """
    (place / "held-out.txt").write_text(TEXT[:300])
    fields = {
        "evaluation_data": str(place / "held-out.txt"),
        "evaluation.every_steps": 2,
        "steps": 5,
    }
    prepare(place, "straight", **fields).fit()
    trainer = prepare(place, "broken", callbacks=[Failing(event, at, error)], **fields)
    with pytest.raises((CallbackError, RunError, UserError)):
        trainer.fit()
    assert trainer.saved_step == at
    prepare(place, "broken", resume="newest", **fields).fit()
    models, evaluations = (
        [make(place / name) for name in ("straight", "broken")]
        for make in (
            lambda run: (run / "model" / "model.safetensors").read_bytes(),
            lambda run: [
                (row["step"], row["evaluation_loss"])
                for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
                if "evaluation_loss" in row
            ],
        )
    )
    assert models[0] == models[1]
    assert evaluations[0] == evaluations[1]
    assert [step for step, _ in evaluations[0]] == [2, 4, 5]


def test_the_error_of_a_callback_is_reported_even_if_the_note_about_it_fails(
    place: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent(Failing):
        def on_note(self, text: str) -> None:
            if text.startswith("a callback failed"):
                raise KeyError(text)

    def full(*_: object) -> None:
        raise checkpoint.CheckpointError("no space left")

    broken = Silent("on_step", 2, ZeroDivisionError("oh"))
    with pytest.raises(CallbackError, match=r"ZeroDivisionError: oh$"):
        prepare(place, "note", callbacks=[broken]).fit()
    recorder, notes = Recorder(), []
    recorder.on_note = notes.append  # type: ignore[method-assign]
    trainer = prepare(place, "full", callbacks=[recorder, broken])
    monkeypatch.setattr(trainer._checkpoints, "save", full)
    with pytest.raises(CallbackError, match=r"ZeroDivisionError: oh$"):
        trainer.fit()
    assert trainer.saved_step is None
    assert "a callback failed, and then no checkpoint could be written: no space left" in notes


@pytest.mark.parametrize("reader", ["evaluation", "callback"])
def test_no_checkpoint_has_a_part_of_an_update(
    place: Path, prepare: Any, executable: Any, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    """An op of the update that step 4 deferred fails, after other layers were updated. The
    checkpoint of step 3 stays, and the run continues from it.
    """

    class Reader(Recorder):
        def on_step(self, trainer: Trainer, step: Step) -> None:
            if reader == "callback" and step.number == 4:
                trainer.state.tensors()

    plan = executable("overlapped", vocabulary=300, dtype="fp32", accumulation=2, clipping="global")
    plan.save(place / "plan.toml")
    fields = {"saving.every_steps": 3, "keep_last": 1, "steps": 5}
    if reader == "evaluation":
        fields |= {"evaluation.every_steps": 4, "over_steps": 1}
        fields |= {"evaluation_data": str(place / "corpus")}
    prepare(place, "straight", **fields).fit()
    run, flush = Executor._run, []

    def breaking(self: Executor, program: Any) -> Any:
        if "flush_update" in self._programs and program is self._programs["flush_update"]:
            flush.append(program)
            if len(flush) == 2:  # the first is that of the checkpoint of step 3
                task = [task for op, task in program.tasks.items() if op.startswith("U")][2]
                monkeypatch.setattr(task, "run", lambda: {}["broken"])
        return run(self, program)

    recorder, notes = Reader(), list[str]()
    recorder.on_note = notes.append  # type: ignore[method-assign]
    trainer = prepare(place, "broken", callbacks=[recorder], **fields)
    with monkeypatch.context() as patch:
        patch.setattr(Executor, "_run", breaking)
        with pytest.raises(RunError, match=r"^U\S+ on lane update: KeyError: 'broken'$"):
            trainer.fit()
    assert [path.name for path in (place / "broken/checkpoints").iterdir()] == ["step-00000003"]
    assert trainer.saved_step == 3
    what = "the evaluation" if reader == "evaluation" else "a callback"
    assert notes[-1] == (
        f"{what} failed, and then no checkpoint could be written: the weights cannot be used,"
        " because an update of them has failed: some layers may be updated, and others not; resume"
        " from the last checkpoint"
    )
    prepare(place, "broken", resume="newest", **fields).fit()
    models = [
        (place / name / "model/model.safetensors").read_bytes() for name in ("straight", "broken")
    ]
    assert models[0] == models[1]


def test_no_rank_alone_writes_a_checkpoint_after_the_error_of_a_callback(
    place: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks do not write their parts, so the checkpoint would never be complete."""
    trainer, save = (
        prepare(place, callbacks=[Failing("on_step", 1, ZeroDivisionError("oh"))]),
        Mock(),
    )
    monkeypatch.setattr(trainer._checkpoints, "save", save)
    monkeypatch.setattr(trainer, "executor", None, raising=False)
    monkeypatch.setattr(trainer, "_ranks", object())
    with pytest.raises(CallbackError):
        trainer._notify_after("on_step", Mock(number=1), Mock(step=1))
    assert save.mock_calls == []
    assert trainer.saved_step is None


def test_a_method_that_is_never_called_is_refused(place: Path, prepare: Any) -> None:
    class Misspelt(Callback):
        def on_steps(self) -> None: ...

    class Foreign(Callback):
        def on_quit_of_the_window(self) -> None: ...

    class OfAnotherLibrary:
        def on_train_begin(self) -> None: ...

    class Both(Callback, OfAnotherLibrary):
        on_disk = "a setting, not a method"

    expected = (
        "training: callback Misspelt: found a method on_steps, which is never called; allowed:"
        " on_note, on_allocate, on_load, on_start, on_step, on_switch, on_evaluation, on_save,"
        " on_end; fix: rename it to on_step"
    )
    with pytest.raises(UserError) as refused:
        prepare(place, callbacks=[Misspelt()])
    assert str(refused.value) == expected
    with pytest.raises(UserError, match=r"fix: give it a name that does not begin with on_$"):
        prepare(place, callbacks=[Foreign()])
    assert not (place / "run").exists()
    prepare(place, callbacks=[Both()])


def test_callbacks_get_the_progress_of_allocation(place: Path, prepare: Any) -> None:
    reports: list[tuple[int, int]] = []
    recorder: Any = Recorder()
    recorder.on_allocate = lambda done, total: reports.append((done, total))
    trainer = prepare(place, None, callbacks=[recorder], steps=1)
    trainer.fit()
    assert [done for done, _ in reports] == sorted(done for done, _ in reports)
    assert reports[-1] == (sum(trainer.executor.pool_bytes.values()),) * 2


@pytest.mark.parametrize("steps", [1, 3])
def test_the_model_and_the_callbacks_have_every_update_whatever_the_policy(
    place: Path, steps: int, executable: Any, prepare: Any
) -> None:
    """The exported model and the weights that callbacks read have every update.

    This holds for plans that defer updates, even if nothing is saved or evaluated.
    """

    class Reader(Callback):
        def __init__(self) -> None:
            self.found: list[torch.Tensor] = []

        def on_step(self, trainer: Trainer, step: Step) -> None:
            if step.number == 2:
                self.found.append(
                    trainer.state.masters(trainer.plan.model.stack["1"])["mlp.up_proj.weight"]
                )

        def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
            self.found.append(
                trainer.state.masters(trainer.plan.model.stack["1"])["mlp.up_proj.weight"]
            )

    readers = {}
    for policy in ("resident", "overlapped"):
        executable(policy, vocabulary=300, dtype="fp32", accumulation=2, clipping="global").save(
            place / "plan.toml"
        )
        readers[policy] = Reader()
        prepare(place, policy, steps=steps, callbacks=[readers[policy]]).fit()
        prepare(place, f"{policy}-unread", steps=steps).fit()
    one, other = readers["resident"].found, readers["overlapped"].found
    assert len(one) == len(other) == 1 + (steps > 1)
    assert all(torch.equal(first, second) for first, second in zip(one, other, strict=True))
    exported = {
        (place / name / "model" / "model.safetensors").read_bytes()
        for name in ("resident", "overlapped", "resident-unread", "overlapped-unread")
    }
    assert len(exported) == 1


def test_a_note_warns_of_too_little_free_memory(
    place: Path, monkeypatch: pytest.MonkeyPatch, prepare: Any
) -> None:
    notes: list[str] = []
    recorder = Recorder()
    monkeypatch.setattr(recorder, "on_note", notes.append)
    monkeypatch.setattr(trainer_module, "free_host_bytes", lambda: 2**10)
    prepare(place, callbacks=[recorder]).fit()
    assert any("are free now: close other programs" in note for note in notes)
