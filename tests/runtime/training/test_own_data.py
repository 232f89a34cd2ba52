"""Tests of training and evaluation data that are objects of the user."""

from __future__ import annotations

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


class Drawn:
    """Training data. `failing` is the step whose data cannot be read."""

    def __init__(self, plan: Plan, failing: int = 0) -> None:
        self.work, self.vocabulary, self.failing = plan.workload, plan.model.vocabulary, failing

    def step(self, number: int) -> list[Batch]:
        if number == self.failing:
            raise ConnectionError("the server is gone")
        return [self.batch(100 * number + micro) for micro in range(self.work.accumulation)]

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


@pytest.mark.parametrize(
    ("data", "held_out", "error", "kept"),
    [
        (4, 0, ConnectionError, 3),
        (0, 1, OSError, 2),
        (0, 2, OSError, 4),
        (1, 0, ConnectionError, 0),
    ],
)
def test_data_that_fails_loses_no_step(
    place: Path, data: int, held_out: int, error: type[Exception], kept: int
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
        data=Drawn(plan, data),
        evaluation_data=HeldOut(Drawn(plan), held_out),
        out=place / "run",
        **options,
    )
    with pytest.raises(error, match="gone"):
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
