"""Tests of the notes that a run prints about its settings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest

from megatrain.runtime.training.config import Config, Saving, TrainingSettings
from megatrain.runtime.training.learning_rate import LearningRate
from megatrain.runtime.training.notes import learning_rate_notes, little_room_note


@pytest.mark.parametrize(
    ("rate", "init", "warned"),
    [(1e-4, "model", False), (1.1e-4, "model", True), (3e-4, "random", False)],
)
def test_rates_above_1e_4_are_warned_of_with_pretrained_weights(
    rate: float, init: Literal["model", "random"], warned: bool
) -> None:
    """The usual rate of random weights, 3e-4, destroys pretrained ones."""
    schedule = LearningRate(rate=rate, warm_up_steps=3)
    config = Config(training=TrainingSettings(steps=100, init=init), schedule=schedule)
    first, *others = learning_rate_notes(config)
    assert first == f"learning rate {schedule}"
    assert len(others) == warned
    if warned:
        assert others[0].startswith("warning: a learning rate of 1.1e-4 can destroy what")
        assert others[0].endswith("usual is 1e-5 to 2e-5")


def test_a_rate_of_zero_is_allowed_and_warned_of() -> None:
    config = Config(training=TrainingSettings(steps=100), schedule=LearningRate(rate=0.0))
    assert learning_rate_notes(config)[1:] == [
        "warning: a learning rate of 0 changes no weight; --lr sets another one"
    ]


@pytest.mark.parametrize(
    ("free", "saved", "warned"), [(400, 0, False), (399, 0, True), (200, 2, False), (199, 2, True)]
)
def test_a_disk_needs_room_for_one_checkpoint_more_than_are_kept(
    free: int, saved: int, warned: bool
) -> None:
    """The oldest is removed only after the next is written. Those of an interrupted run are on the
    disk already.
    """
    checkpoints: Any = SimpleNamespace(free_bytes=lambda: free, steps=lambda: [1] * saved)
    note = little_room_note(Saving(keep_last=2, keep_best=1), checkpoints, 100)
    assert note.startswith("warning: up to 4 checkpoints of 100 B are on the disk") == warned
    assert bool(note) == warned
