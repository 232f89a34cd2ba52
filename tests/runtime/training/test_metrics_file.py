"""Tests of `metrics.jsonl` of runs that are resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.training import metrics_file, trainer
from megatrain.runtime.training.callback import Callback, CallbackError, EvaluationResult
from megatrain.runtime.training.metrics_file import FORMER, METRICS, MetricsFile
from megatrain.simulator.base.errors import UserError

EVERY_2 = {"saving.every_steps": 2, "keep_last": 9, "export": False}


class Fails(Callback):
    """Fails at the start."""

    def on_start(self, trainer: Any) -> None:
        raise ValueError("no connection")


class Kills(Callback):
    """Ends the run after a step, without a checkpoint."""

    def __init__(self, number: int) -> None:
        self._number = number

    def on_step(self, trainer: Any, step: Any) -> None:
        if step.number == self._number:
            raise KeyboardInterrupt


def rows(run: Path) -> list[tuple[int, str]]:
    """Returns the step and the kind of each line of the metrics."""
    lines = (run / METRICS).read_text().splitlines()
    return [
        (row["step"], "evaluation" if "evaluation_loss" in row else "step")
        for row in map(json.loads, lines)
    ]


def steps(last: int) -> list[tuple[int, str]]:
    """Returns the rows of the steps from 1 to `last`."""
    return [(step, "step") for step in range(1, last + 1)]


def test_a_resume_from_an_earlier_step_that_fails_keeps_the_metrics(
    place: Path, prepare: Any
) -> None:
    prepare(place, steps=4, **EVERY_2).fit()
    before = (place / "run" / METRICS).read_bytes()
    with pytest.raises(CallbackError):
        prepare(place, steps=6, resume=2, callbacks=[Fails()], **EVERY_2).fit()
    assert (place / "run" / METRICS).read_bytes() == before
    prepare(place, steps=6, resume="newest", **EVERY_2).fit()
    assert rows(place / "run") == steps(6)


def test_a_resume_from_an_earlier_step_keeps_later_lines_until_a_checkpoint_is_saved(
    place: Path, prepare: Any
) -> None:
    run = place / "run"
    prepare(place, steps=4, **EVERY_2).fit()
    with pytest.raises(KeyboardInterrupt):
        prepare(place, steps=6, resume=2, callbacks=[Kills(3)], **EVERY_2).fit()
    assert rows(run) == steps(3)
    assert (run / FORMER).is_file()
    prepare(place, steps=5, resume=4, **EVERY_2).fit()  # of the run before
    assert rows(run) == steps(5)
    assert not (run / FORMER).exists()
    prepare(place, steps=2, resume=2, **EVERY_2).fit()  # has no step left to do
    assert rows(run) == steps(2)
    prepare(place, steps=3, resume=2, **EVERY_2).fit()
    assert not (run / FORMER).exists(), "the checkpoint of step 3 replaces the later ones"
    prepare(place, steps=3, resume="newest", **EVERY_2).fit()
    assert rows(run) == steps(3)


def test_lines_whose_checkpoints_are_gone_do_not_return(place: Path, prepare: Any) -> None:
    """A kill between the removal of later checkpoints and of the copy leaves the copy."""
    run = place / "run"
    prepare(place, steps=4, **EVERY_2).fit()
    copy = (run / METRICS).read_bytes()
    prepare(place, steps=3, resume=2, **EVERY_2).fit()
    (run / FORMER).write_bytes(copy)
    prepare(place, steps=3, resume="newest", **EVERY_2).fit()
    assert rows(run) == steps(3)


@pytest.fixture
def owing(place: Path, prepare: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Trains a run whose checkpoint of step 2 owes an evaluation, and returns its settings."""
    fields = {**EVERY_2, "evaluation.every_steps": 2, "over_steps": 1}
    fields["evaluation_data"] = str(place / "corpus")
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "evaluate", lambda *_, **__: None)
        prepare(place, steps=2, **fields).fit()
    return fields


def test_an_evaluation_at_the_start_is_written_to_the_checkpoint(
    place: Path, prepare: Any, owing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (1, 0):
        done = prepare(place, steps=2, resume="newest", **owing).fit().evaluation
        assert (done is not None) == count
        assert rows(place / "run") == [*steps(2), (2, "evaluation")]
    (row,) = [json.loads(text) for text in (place / "run" / METRICS).open() if "perplex" in text]
    run = Manifest.load(place / "run" / "checkpoints" / "step-00000002").run
    assert run.loss == row["evaluation_loss"]
    assert run.progress["evaluation_owed"] is False
    assert run.progress["evaluation_data"], "the digest of what was evaluated"

    def worse(*_: Any, number: int, **__: Any) -> EvaluationResult:
        return EvaluationResult(number=number, loss=100.0 + number, tokens=1, seconds=1.0)

    monkeypatch.setattr(trainer, "evaluate", worse)
    few = {**owing, "keep_last": 1, "keep_best": 1}
    prepare(place, steps=6, resume="newest", **few).fit()
    kept = sorted(path.name for path in (place / "run" / "checkpoints").iterdir())
    assert kept == ["step-00000002", "step-00000006"], "the best one, and the newest one"


def test_an_evaluation_that_is_repeated_replaces_its_line(
    place: Path, prepare: Any, owing: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill between the line and the checkpoint, or a full disk, makes the evaluation owed."""

    def full(*_: Any) -> None:
        raise UserError("disk", found="no space", allowed="a disk with room", fix="free some")

    notes = list[str]()

    class Listens(Callback):
        def on_note(self, text: str) -> None:
            notes.append(text)

    monkeypatch.setattr(Checkpoints, "evaluated", full)
    for _ in range(2):
        prepare(place, steps=2, resume="newest", callbacks=[Listens()], **owing).fit()
        assert rows(place / "run") == [*steps(2), (2, "evaluation")]
    assert sum("the next resume from step 2 evaluates again" in text for text in notes) == 2


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("killed", range(3))
def test_a_kill_at_any_write_of_a_cut_loses_no_line(
    killed: int, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of an earlier cut has line 4, and the file has line 3 anew."""
    for step in (2, 4, 6):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    metrics = MetricsFile(tmp_path)
    for step in range(1, 7):
        metrics.append({"step": step})
    metrics.append({"step": 6, "evaluation_loss": 1.0})
    whole = [*steps(6), (6, "evaluation")]
    metrics.cut(3)
    metrics.append({"step": 3})
    left, write = [killed], metrics_file.write_text

    def write_or_die(path: Path, text: str) -> None:
        left[0] -= 1
        if left[0] < 0 and when == "before":
            raise KeyboardInterrupt
        write(path, text)
        if left[0] < 0:
            raise KeyboardInterrupt

    def resume() -> None:
        metrics.mend()
        metrics.cut(5)

    with monkeypatch.context() as patched:
        patched.setattr(metrics_file, "write_text", write_or_die)
        with pytest.raises(KeyboardInterrupt):
            resume()
    assert rows(tmp_path) in (steps(3), steps(4), whole), "never a part of a write"
    assert metrics.mend() == 0
    assert rows(tmp_path) == whole
