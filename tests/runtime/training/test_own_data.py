"""Tests of training and evaluation data that are objects of the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.training.config import Config, EvaluationSettings, Saving, TrainingSettings
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.runtime.training.trainer import Fitted, Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan, Prediction

CPU = torch.device("cpu")


NOTHING = Saving(every_minutes=0)


def gone(_: object) -> None:
    raise ConnectionError("the server is gone")


class Drawn:
    """Training data. The batches of step `failing` are what `spoil` returns for them."""

    def __init__(
        self, plan: Plan, failing: int = 0, spoil: Callable[[list[Batch]], Any] = gone
    ) -> None:
        self.work, self.vocabulary = plan.workload, plan.model.vocabulary
        self.failing, self.spoil = failing, spoil
        self.document_length: int | None = None

    def step(self, number: int) -> list[Batch]:
        batches = [self.batch(100 * number + micro) for micro in range(self.work.accumulation)]
        if number == self.failing:
            spoiled: list[Batch] = self.spoil(batches)
            return spoiled
        return batches

    def batch(self, seed: int) -> Batch:
        shape = (self.work.batch, self.work.sequence)
        generator = torch.Generator().manual_seed(seed)
        ids, labels = (torch.randint(self.vocabulary, shape, generator=generator) for _ in range(2))
        return Batch(ids, labels)


class HeldOut:
    """Evaluation data, whose call with the number `failing` fails."""

    def __init__(self, drawn: Drawn, failing: int = 0) -> None:
        self.drawn, self.failing, self.calls = drawn, failing, 0

    def batches(self) -> list[Batch]:
        self.calls += 1
        if self.calls == self.failing:
            raise OSError("the disk is gone")
        return [self.drawn.batch(1)]


def config(**training: Any) -> Config:
    return Config(
        training=TrainingSettings(steps=4, **training),
        evaluation=EvaluationSettings(every_steps=2),
        saving=Saving(every_minutes=0),
    )


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def changed(**change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list[Batch]], Any]:
    """Returns a function that changes tensors of the last of some batches."""

    def spoil(batches: list[Batch]) -> list[Batch]:
        *others, last = batches
        return [
            *others,
            last._replace(**{name: make(getattr(last, name)) for name, make in change.items()}),
        ]

    return spoil


def divided(_: object) -> None:
    """What data may do with NumPy. It says nothing about the weights."""
    raise FloatingPointError("divide by zero")


def all_masked(batches: list[Batch]) -> list[Batch]:
    return [each._replace(labels=torch.full_like(each.labels, IGNORED)) for each in batches]


@pytest.fixture(scope="module")
def whole_runs() -> dict[Path, Fitted]:
    """The folder and the result of a run whose data never failed."""
    return {}


@pytest.mark.parametrize(
    ("data", "spoil", "held_out", "error", "kept"),
    [
        (4, gone, 0, "the server is gone", 3),
        (0, gone, 1, "the disk is gone", 0),
        (0, gone, 2, "the disk is gone", 4),
        (3, all_masked, 0, "data: step 3: found no position that has a label", 2),
        (1, gone, 0, "the server is gone", 0),
        (4, divided, 0, "divide by zero", 3),
        (4, lambda batches: batches[1:], 0, "data: found 1 micro-batches; allowed: 2", 3),
        (4, lambda _: [], 0, "data: found 0 micro-batches; allowed: 2", 3),
        (4, lambda _: None, 0, "data: micro-batches: found a NoneType; allowed: a list", 3),
        (4, iter, 0, "data: micro-batches: found a list_iterator; allowed: a list", 3),
        (4, lambda batches: [*batches[1:], 7], 0, "data: micro-batch 2: found a int", 3),
        (4, changed(ids=lambda ids: ids[:, 1:]), 0, "data: micro-batch 2: ids: found", 3),
        (4, changed(ids=lambda ids: ids.int()), 0, r"data: .*: ids: found .* int32", 3),
        (4, changed(labels=lambda ids: ids + 300), 0, "data: micro-batch 2: labels: found ids", 3),
        (
            4,
            changed(documents=lambda _: torch.zeros(2, 16).long()),
            0,
            "data: found rows of several doc",
            3,
        ),
    ],
)
def test_data_that_fails_loses_no_step(
    place: Path,
    whole_runs: dict[Path, Fitted],
    data: int,
    spoil: Callable[[Any], Any],
    held_out: int,
    error: str,
    kept: int,
) -> None:
    """A checkpoint of the last step is written, and the resumed run ends as one that never failed.

    Nothing is written if the first step has no data, or if the first call for evaluation data
    fails, before the first step.
    """
    file = place / "plan.toml"
    plan = Plan.load(file)
    options: dict[str, Any] = {"config": config(), "device": CPU, "progress": False}
    if not whole_runs:
        out, held = place / "whole", HeldOut(Drawn(plan))
        whole = Trainer(file, data=Drawn(plan), evaluation_data=held, out=out, **options).fit()
        whole_runs[out] = whole
    ((out, whole),) = whole_runs.items()
    trainer = Trainer(
        file,
        data=Drawn(plan, data, spoil),
        evaluation_data=HeldOut(Drawn(plan), held_out),
        out=place / "run",
        **options,
    )
    with pytest.raises((OSError, UserError, FloatingPointError), match=error):
        trainer.fit()
    assert trainer.saved_step == (kept or None)
    if not kept:
        return
    again = Trainer(
        file,
        data=Drawn(plan),
        evaluation_data=HeldOut(Drawn(plan)),
        out=place / "run",
        resume="newest",
        **options,
    ).fit()
    assert weights(place / "run") == weights(out)
    assert again.evaluation
    assert whole.evaluation
    assert again.evaluation.loss == whole.evaluation.loss


def test_the_error_of_an_evaluation_is_reported_even_if_no_checkpoint_can_be_written(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation may fail because the executor has failed. Then its weights cannot be read."""

    def fails(*_: object) -> None:
        raise RuntimeError("CUDA error")

    file = place / "plan.toml"
    drawn = Drawn(Plan.load(file))
    trainer = Trainer(
        file,
        data=drawn,
        config=config(),
        evaluation_data=HeldOut(drawn, 2),
        out=place / "run",
        device=CPU,
        progress=False,
    )
    notes: list[str] = []
    monkeypatch.setattr(trainer, "note", notes.append)
    monkeypatch.setattr(trainer._checkpoints, "save", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        trainer.fit()
    assert trainer.saved_step is None
    assert "the evaluation failed, and then no checkpoint could be written: CUDA error" in notes


@pytest.mark.parametrize(("used_up", "over_steps"), [(False, 0), (True, 0), (False, 1)])
def test_an_evaluation_without_labels_is_an_error(
    place: Path, used_up: bool, over_steps: int
) -> None:
    """Its loss would be 0, the best of all."""
    file = place / "plan.toml"
    drawn = Drawn(Plan.load(file))
    batch = drawn.batch(1)
    without = batch._replace(labels=torch.full_like(batch.labels, IGNORED))
    left = [] if used_up else [without, without, *[batch] * over_steps]

    class Unlabelled:
        def batches(self) -> Any:
            return iter(left)

    settings = msgspec.structs.replace(
        config(), evaluation=EvaluationSettings(every_steps=2, over_steps=over_steps)
    )
    trainer = Trainer(
        file, data=drawn, config=settings, evaluation_data=Unlabelled(), device=CPU, progress=False
    )
    groups = "0 groups" if used_up else "1 group"
    more = ", or a larger over_steps" if over_steps else ""
    with pytest.raises(
        UserError,
        match=rf"evaluation data: found {groups} of micro-batches, without a position that has a"
        rf" label; .*; fix: use data with labels{more}; a method",
    ):
        trainer.fit()


def test_evaluation_data_that_says_it_is_empty_is_evaluated(place: Path) -> None:
    """Only `batches` decides. Another attribute, such as a length, may mean something else."""

    class Sized(HeldOut):
        def __len__(self) -> int:
            return 0

    file = place / "plan.toml"
    for data in (Drawn(Plan.load(file)), place / "corpus"):
        held_out = Sized(Drawn(Plan.load(file)))
        fitted = Trainer(
            file, None, data, config(), evaluation_data=held_out, device=CPU, progress=False
        ).fit()
        assert held_out.calls == 2
        assert fitted.evaluation
        assert fitted.evaluation.number == 4


@pytest.mark.parametrize("ended", ["data", "evaluation"])
def test_an_iterator_that_has_ended_is_named(place: Path, ended: str) -> None:
    """A StopIteration has no text, and callers of an iterator take it for its end."""

    def stop(*_: object) -> Any:
        return next(iter(()))

    file = place / "plan.toml"
    drawn = Drawn(Plan.load(file), 3 if ended == "data" else 0, stop)
    held_out = HeldOut(drawn)
    if ended == "evaluation":
        held_out.batches = stop  # type: ignore[method-assign]
    trainer = Trainer(
        file,
        data=drawn,
        config=config(),
        evaluation_data=held_out,
        out=place / "run",
        device=CPU,
        progress=False,
    )
    with pytest.raises(
        UserError, match=rf"^training: the {ended}: found a StopIteration: an iterator has ended; "
    ):
        trainer.fit()
    assert trainer.saved_step == (2 if ended == "data" else None)


def test_a_micro_batch_without_labels_is_trained_if_another_has_some(place: Path) -> None:
    file = place / "plan.toml"
    drawn = Drawn(Plan.load(file), 3, changed(labels=lambda labels: labels * 0 + IGNORED))
    held_out, quiet = HeldOut(drawn), {"device": CPU, "progress": False}
    fitted = Trainer(file, None, drawn, config(), evaluation_data=held_out, **quiet).fit()
    assert fitted.steps == 4
    assert fitted.loss


def test_the_check_of_evaluation_data_takes_no_micro_batch_from_it(place: Path) -> None:
    """The parts of one stream are all evaluated, although the first are checked before a step."""
    file = place / "plan.toml"
    drawn = Drawn(Plan.load(file))
    left = iter([drawn.batch(seed) for seed in range(7)])

    class Stream:
        def batches(self) -> Any:
            return (batch for batch in left)

    settings = msgspec.structs.replace(config(), evaluation=EvaluationSettings())
    fitted = Trainer(
        file, None, drawn, settings, evaluation_data=Stream(), device=CPU, progress=False
    ).fit()
    work = drawn.work
    assert fitted.evaluation
    assert fitted.evaluation.tokens == 7 * work.batch * work.sequence


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (lambda batch: [[batch]], "evaluation data: micro-batch 1: found a list; allowed: Batch"),
        (lambda batch: [batch, 7], "evaluation data: micro-batch 2: found a int; allowed: Batch"),
        (
            lambda batch: [batch._replace(ids=batch.ids[:, 1:])],
            "evaluation data: micro-batch 1: ids",
        ),
        (
            lambda _: None,
            r"evaluation data: found a NoneType from batches\(\); allowed: an iterable",
        ),
        (lambda _: [], "evaluation data: found 0 groups of micro-batches, without a position"),
    ],
)
def test_a_mistake_in_evaluation_data_costs_no_step(
    place: Path, monkeypatch: pytest.MonkeyPatch, returned: Callable[[Batch], Any], error: str
) -> None:
    file = place / "plan.toml"
    drawn = Drawn(Plan.load(file))
    held_out = HeldOut(drawn)
    monkeypatch.setattr(held_out, "batches", lambda: returned(drawn.batch(1)))
    trainer = Trainer(
        file,
        data=drawn,
        config=config(),
        evaluation_data=held_out,
        out=place / "run",
        device=CPU,
        progress=False,
    )
    with pytest.raises(UserError, match=f"^{error}"):
        trainer.fit()
    assert trainer.saved_step is None


def test_a_step_that_is_saved_already_is_not_saved_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = place / "plan.toml"
    settings = msgspec.structs.replace(
        config(), evaluation=EvaluationSettings(), saving=Saving(every_steps=3, every_minutes=0)
    )
    trainer = Trainer(
        file, data=Drawn(Plan.load(file), 4), config=settings, out=place / "run", device=CPU
    )
    save, saved, notes = Checkpoints.save, list[int](), list[str]()

    def recorded(self: Checkpoints, executor: Any, run: Any) -> None:
        saved.append(run.step)
        save(self, executor, run)

    monkeypatch.setattr(Checkpoints, "save", recorded)
    monkeypatch.setattr(trainer, "note", notes.append)
    with pytest.raises(ConnectionError):
        trainer.fit()
    assert saved == [3]
    assert not [note for note in notes if "failed" in note]


@pytest.mark.parametrize("given", ["held-out.txt", ["held-out.txt"], [1]], ids=str)
def test_evaluation_data_that_is_no_object_with_batches_is_refused(place: Path, given: Any) -> None:
    with pytest.raises(UserError, match=r"training: evaluation_data: found a (str|list); allowed"):
        Trainer(place / "plan.toml", data=place / "corpus", evaluation_data=given, device=CPU)


OPTIONS = {
    "evaluation_data": DataOptions(evaluation_data="held-out.txt"),
    "evaluation_split": DataOptions(evaluation_split="test"),
    "evaluation_fraction": DataOptions(evaluation_fraction=0.5),
    "evaluation_documents": DataOptions(evaluation_documents=3),
    "data": DataOptions(data="nowhere"),
    "data, evaluation_fraction": DataOptions(data="nowhere", evaluation_fraction=0.5),
}


@pytest.mark.parametrize("named", OPTIONS)
def test_data_of_the_config_that_is_not_read_is_refused(place: Path, named: str) -> None:
    """An object replaces the data of the config, or its evaluation data. A part of the data that is
    set apart for evaluation would be evaluated nowhere.
    """
    file = place / "plan.toml"
    drawn, settings = Drawn(Plan.load(file)), Config(data=OPTIONS[named])
    evaluates = named != "data"
    leave = f"leave {'them' if ',' in named else 'it'} out of the config"

    def refused(argument: str, names: str, fix: str, **arguments: Any) -> None:
        with pytest.raises(UserError) as error:
            Trainer(file, config=settings, device=CPU, **arguments)
        found = f"config: data: found {names}, beside an object as the argument `{argument}`; "
        assert str(error.value).startswith(found)
        assert str(error.value).endswith(f"; fix: {fix}")

    instead = f"pass an object as `evaluation_data`, and {leave}" if evaluates else leave
    refused("data", named, instead, data=drawn)
    refused("data", named, leave, data=drawn, evaluation_data=HeldOut(drawn))
    if evaluates:
        only, one = named.removeprefix("data, "), "leave it out of the config"
        file_data: dict[str, Any] = {"data": place / "corpus", "evaluation_data": HeldOut(drawn)}
        refused("evaluation_data", only, one, **file_data)
        refused("evaluation_data", only, one, **{**file_data, "data": None})
    Trainer(file, data=place / "corpus", config=settings, device=CPU)
    Trainer(file, config=settings, device=CPU)


def test_a_learning_rate_schedule_of_one_s_own_is_refused() -> None:
    """It would be stored, and trained with, as its fields."""

    class Mine(LearningRate):
        def at(self, number: int, steps: int) -> float:
            return 1e-3 / (number + steps)

    for steps in (0, 3):
        training = TrainingSettings(steps=steps, epochs=0.0 if steps else 1.0)
        for schedule in (Mine(), lambda _: 1e-3, {"rate": 1e-3}):
            with pytest.raises(
                UserError,
                match=r"^config: schedule: found a (Mine|function|dict); allowed: a LearningRate,"
                r" .* fix: pass schedule=LearningRate\(",
            ):
                Config(training=training, schedule=schedule)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("planned", "predicts", "expected", "seconds"),
    [(None, True, 5, 0.25), (None, False, 5, 1), (7, True, 7, 1)],
)
def test_steps_are_compared_with_a_prediction_for_the_documents_of_the_data(
    place: Path, planned: int | None, predicts: bool, expected: int, seconds: float
) -> None:
    """A plan without a length of documents is for rows of one. Only its step time changes."""
    plan = Plan.load(place / "plan.toml")
    work = msgspec.structs.replace(
        plan.workload, dtype="bf16", documents=True, document_length=planned
    )
    prediction = Prediction(
        step_seconds=1, lower_bound_seconds=1, device_peak_bytes=1, host_peak_bytes=1, binding="cpu"
    )
    plan = msgspec.structs.replace(plan, workload=work, prediction=prediction)
    plan = msgspec.structs.replace(plan, digest=lower(plan).digest)
    data, said = Drawn(plan), list[str]()
    data.document_length = 5

    def predict(plan: Plan, folder: Path) -> float:
        assert (plan.workload.document_length, folder) == (5, Path())
        return 0.25

    options = Config(training=TrainingSettings(steps=2, init="random"), saving=NOTHING)
    trainer = Trainer(
        plan,
        data=data,
        config=options,
        device=CPU,
        progress=False,
        predict=predict if predicts else None,
    )
    trainer.note = said.append
    trainer.fit()
    assert trainer.plan.workload.document_length == expected
    assert trainer.plan.prediction == msgspec.structs.replace(prediction, step_seconds=seconds)
    noted = [note for note in said if "documents of 5 tokens" in note]
    assert len(noted) == (planned is None)
    assert all(
        note.endswith("`megatrain plan --document-length 5` plans for them") for note in noted
    )
    assert all(("predicted to take 250.000 ms" in note) == predicts for note in noted)
