"""Callback: the base class of loggers, progress bars, early stopping, and other code that the
trainer calls during a training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain.simulator.base.errors import RunError
from megatrain.simulator.schedule.timeline import Timeline

if TYPE_CHECKING:
    from megatrain.runtime.training.training_run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class Step:
    """The results of one optimizer step."""

    number: int
    """number of the step, from 1"""
    loss: float
    """mean loss over all labelled tokens, computed with the weights before the update"""
    gradient_norm: float | None
    """gradient norm before clipping; None if the plan does not clip"""
    clip_factor: float | None = None
    """with clipping by `adagc`, the least factor on the gradient of any tensor; otherwise None"""
    rate: float
    """learning rate of the step"""
    seconds: float
    """wall time of the step"""
    tokens_per_second: float
    """tokens of the step divided by `seconds`"""
    timeline: Timeline
    """measured start and end of each op"""
    checksum: int | None = None
    """checksum of the weights in deterministic mode; otherwise None"""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The results of one evaluation."""

    number: int
    """number of the step after which the weights were evaluated"""
    loss: float
    """mean loss over all labelled tokens"""
    tokens: int
    """number of labelled tokens"""
    seconds: float
    """wall time of the evaluation"""

    @property
    def perplexity(self) -> float:
        """Returns exp(loss), or infinity if that is too large for a float."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf


class Callback:
    """Base class of callbacks. Every method does nothing; override those that you need.

    `trainer` gives access to the plan, config, executor and model state. Call `trainer.stop` to end
    the training early.
    """

    def on_note(self, text: str) -> None:
        """Receives one line of text for the user, such as a warning."""

    def on_allocate(self, done: int, total: int) -> None:
        """Called while memory is allocated: `done` of `total` bytes are allocated and touched."""

    def on_load(self, parameters: int) -> None:
        """Called after the weights of one layer, with this many parameters, have been read."""

    def on_start(self, trainer: TrainingRun) -> None:
        """Called before the first step, after the weights have been loaded.

        A callback that restores a checkpoint of its own sets `trainer.first_step` here.
        """

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        """Called after each optimizer step.

        If the plan defers updates, reading `trainer.state` applies the deferred update at once. The
        result is the same bit for bit, but the next step is slower, because that update no longer
        overlaps its forward pass.
        """

    def on_switch(self, trainer: TrainingRun, seconds: float) -> None:
        """Called when another plan is in use (`TrainingRun.switch`), before its first step.

        `seconds` is the time since the last step. It is called again, with 0, if the first step
        fails and the former plan is taken up again.
        """

    def on_evaluation(self, trainer: TrainingRun, evaluation: EvaluationResult) -> None:
        """Called after each evaluation."""

    def on_save(self, trainer: TrainingRun, number: int) -> None:
        """Called when a checkpoint is due after step `number`.

        If there is a run folder, the trainer writes its checkpoint before this call.
        `trainer.saved_step` is `number` if that succeeded. Override this method to save more.
        """

    def on_end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        """Called after the last step, or with the `error` that ended the training.

        The weights are still available, with all updates applied.
        """


class CallbackError(RunError):
    """An error that a callback raised. The text names the callback and its method."""
