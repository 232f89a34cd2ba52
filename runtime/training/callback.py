"""Callback: who wants to hear of a training, or take part in it: loggers, progress bars, checkpoints, early stopping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.simulator.errors import RunError
from megatrain.simulator.timeline import Timeline

if TYPE_CHECKING:
    from megatrain.runtime.training.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, done."""

    number: int
    """from 1"""
    loss: float
    """mean over all labelled tokens, before the update"""
    gradient_norm: float | None
    """before clipping; None where the plan does not clip"""
    rate: float
    """learning rate"""
    seconds: float
    tokens_per_second: float
    timeline: Timeline
    checksum: int | None = None
    """in deterministic mode, of the weights"""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss on the evaluation data by the weights after step `number`."""

    number: int
    loss: float
    """mean over all labelled tokens"""
    tokens: int
    """labelled ones"""
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite beyond what a float holds."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf


class Callback:
    """Does nothing; override what is of interest. `trainer` has the plan, config, executor and state, and may be told to `stop`."""

    def on_note(self, text: str) -> None:
        """Something the user may want to read, one line."""

    def on_allocate(self, done: int, total: int) -> None:
        """Of `total` bytes of memory `done` are allocated and touched."""

    def on_load(self, parameters: int) -> None:
        """A layer's weights have been read."""

    def on_start(self, trainer: Trainer) -> None:
        """Weights are loaded, no step is done. One that restores a checkpoint sets `trainer.first_step`."""

    def on_step(self, trainer: Trainer, step: Step) -> None:
        """After every optimizer step.

        Where the plan leaves a step's update to the next step, reading `trainer.state` applies it at once. The bits stay the same, but
        the next step has nothing to hide behind its forward pass and is slower.
        """

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        """After every evaluation."""

    def on_save(self, trainer: Trainer, number: int) -> None:
        """After step `number` a checkpoint was due, and is written where there is a run folder: the time to save more."""

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        """No further step comes, because of `error` where there is one. The weights, with every update, are still there."""


class CallbackError(RunError):
    """A callback failed; the text names it."""
