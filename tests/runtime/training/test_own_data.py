"""Tests of training and evaluation data that are objects of the user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.data.options import DataOptions
from megatrain.runtime.training.config import Config, EvaluationSettings, Saving, TrainingSettings
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.runtime.training.trainer import Trainer
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

CPU = torch.device("cpu")


def gone(_: object) -> None:
    raise ConnectionError("the server is gone")


class Drawn:
    """Training data. The batches of step `failing` are what `spoil` returns for them."""

    def __init__(
        self, plan: Plan, failing: int = 0, spoil: Callable[[list[Batch]], Any] = gone
    ) -> None:
        self.work, self.vocabulary = plan.workload, plan.model.vocabulary
        self.failing, self.spoil = failing, spoil

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


@pytest.mark.parametrize(
    ("data", "spoil", "held_out", "error", "kept"),
    [
        (4, gone, 0, "the server is gone", 3),
        (0, gone, 1, "the disk is gone", 2),
        (0, gone, 2, "the disk is gone", 4),
        (1, gone, 0, "the server is gone", 0),
        (4, lambda batches: batches[1:], 0, "data: found 1 micro-batches; allowed: 2", 3),
        (4, lambda _: [], 0, "data: found 0 micro-batches; allowed: 2", 3),
        (4, lambda _: None, 0, "data: micro-batches: found a NoneType; allowed: a list", 3),
        (4, iter, 0, "data: micro-batches: found a list_iterator; allowed: a list", 3),
        (4, lambda batches: [*batches[1:], 7], 0, "data: micro-batch 2: found a int", 3),
        (4, changed(ids=lambda ids: ids[:, 1:]), 0, "data: micro-batch 2: ids: found", 3),
        (4, changed(ids=lambda ids: ids.int()), 0, r"data: .*: ids: found .* int32", 3),
        (4, changed(labels=lambda ids: ids + 300), 0, "data: micro-batch 2: labels: found ids", 3),
        (4, changed(documents=lambda _: torch.zeros(2, 16).long()), 0, "data: found rows of several doc", 3),
    ],
)
def test_data_that_fails_loses_no_step(
    place: Path, data: int, spoil: Callable[[Any], Any], held_out: int, error: str, kept: int
) -> None:
    """A checkpoint of the last step is written, and the resumed run ends as one that never failed.

    Nothing is written if the first step has no data.
    """
    file = place / "plan.toml"
    plan = Plan.load(file)
    options: dict[str, Any] = {"config": config(), "device": CPU, "progress": False}
    whole = Trainer(
        file, data=Drawn(plan), evaluation_data=HeldOut(Drawn(plan)), out=place / "whole", **options
    ).fit()
    trainer = Trainer(
        file,
        data=Drawn(plan, data, spoil),
        evaluation_data=HeldOut(Drawn(plan), held_out),
        out=place / "run",
        **options,
    )
    with pytest.raises((OSError, UserError), match=error):
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
    assert weights(place / "run") == weights(place / "whole")
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
        evaluation_data=HeldOut(drawn, 1),
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


@pytest.mark.parametrize("used_up", [False, True])
def test_an_evaluation_without_labels_is_an_error(place: Path, used_up: bool) -> None:
    """Its loss would be 0, the best of all."""
    file = place / "plan.toml"
    drawn = Drawn(Plan.load(file))
    batch = drawn.batch(1)
    without = batch._replace(labels=torch.full_like(batch.labels, IGNORED))
    left = iter([batch] if used_up else [without])

    class Once:
        def batches(self) -> Any:
            return left

    trainer = Trainer(
        file, data=drawn, config=config(), evaluation_data=Once(), device=CPU, progress=False
    )
    with pytest.raises(UserError, match=r"evaluation data: found .* without a position that has a"):
        trainer.fit()


@pytest.mark.parametrize("given", ["held-out.txt", ["held-out.txt"], [1]], ids=str)
def test_evaluation_data_that_is_no_object_with_batches_is_refused(place: Path, given: Any) -> None:
    with pytest.raises(UserError, match=r"training: evaluation_data: found a (str|list); allowed"):
        Trainer(place / "plan.toml", data=place / "corpus", evaluation_data=given, device=CPU)


@pytest.mark.parametrize(
    "options",
    [
        DataOptions(evaluation_data="held-out.txt"),
        DataOptions(evaluation_fraction=0.1),
        DataOptions(evaluation_documents=3),
    ],
    ids=["data", "fraction", "documents"],
)
def test_evaluation_data_of_the_config_beside_own_training_data_is_refused(
    place: Path, options: DataOptions
) -> None:
    """The config's data is not read then, so nothing would be evaluated."""
    file = place / "plan.toml"
    data = Drawn(Plan.load(file))
    with pytest.raises(UserError, match="config: data: found evaluation data in the config, and"):
        Trainer(file, data=data, config=Config(data=options), device=CPU)
    Trainer(file, data=place / "corpus", config=Config(data=options), device=CPU)


def test_a_learning_rate_schedule_of_one_s_own_is_refused(place: Path) -> None:
    """It would be stored, and trained with, as its fields."""

    class Mine(LearningRate):
        def at(self, number: int, steps: int) -> float:
            return 1e-3 / (number + steps)

    for schedule in (Mine(), lambda _: 1e-3):
        with pytest.raises(UserError, match=r"config: schedule: found a (Mine|function); allowed"):
            Trainer(
                place / "plan.toml",
                data=place / "corpus",
                config=Config(schedule=schedule),  # type: ignore[arg-type]
                device=CPU,
            )
