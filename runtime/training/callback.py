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
    """The number of the step, from 1."""
    loss: float
    """The mean loss over all labelled tokens, computed with the weights before the update."""
    gradient_norm: float | None
    """The gradient norm before clipping. None with clipping by `update` or `none`."""
    clip_factor: float | None = None
    """With clipping by `adagc`, the smallest clipping factor of any tensor, otherwise None."""
    rate: float
    """The learning rate of the step."""
    seconds: float
    """The wall time of the step in seconds."""
    tokens_per_second: float
    """The tokens of the step divided by `seconds`."""
    timeline: Timeline
    """The measured start and end of each op."""
    checksum: int | None = None
    """A checksum of all weights in deterministic mode, otherwise None."""
    warning: str = ""
    """What has made the step slower, in words for the user, or empty. `on_note` receives it,
    too."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """The results of one evaluation."""

    number: int
    """The number of the step after which the weights were evaluated."""
    loss: float
    """The mean loss over all labelled tokens."""
    tokens: int
    """The number of labelled tokens."""
    seconds: float
    """The wall time of the evaluation in seconds."""

    @property
    def perplexity(self) -> float:
        """exp(loss), or infinity if this is too large for a float."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf


class Callback:
    """Base class of callbacks. Its methods do nothing. Override the methods that you need.

    `trainer` gives access to the plan, config, executor and model state. Call `trainer.stop` to end
    the training early.
    """

    def on_note(self, text: str) -> None:
        """Receives one line of text for the user, such as a warning."""

    def on_allocate(self, done: int, total: int) -> None:
        """Called while memory is allocated: `done` of `total` bytes are allocated and touched."""

    def on_load(self, parameters: int) -> None:
        """Called after the weights of one layer have been read. `parameters` is their number."""

    def on_start(self, trainer: TrainingRun) -> None:
        """Called before the first step, after the weights have been loaded.

        A callback that restores its own checkpoint sets `trainer.first_step` here.
        """

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        """Called after each optimizer step.

        If the plan defers updates, reading `trainer.state` applies the deferred update at once. The
        result is the same bit for bit, but the next step is slower, because the update does not
        overlap its forward pass.
        """

    def on_switch(self, trainer: TrainingRun, seconds: float) -> None:
        """Called after a switch to another plan (`TrainingRun.switch`), before its first step.
        `trainer.executor` and `trainer.state` are new objects.

        `seconds` is the time that the switch took. If the other plan cannot be opened, or if its
        first step fails, the training returns to the former plan with a new executor, and this is
        called with 0.
        """

    def on_evaluation(self, trainer: TrainingRun, evaluation: EvaluationResult) -> None:
        """Called after each evaluation.

        If `trainer.stop` is called here, no further step is done, so the evaluated weights are the
        ones that are saved and exported.
        """

    def on_save(self, trainer: TrainingRun, number: int) -> None:
        """Called when a checkpoint is due after step `number`.

        If there is a run folder, the trainer has written its checkpoint before this call. If this
        succeeded, `trainer.saved_step` is `number`. Override this method to save more.
        """

    def on_end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        """Called when the training ends. `error` is the exception that ended it, or None.

        If `error` is None, the weights are still available, with all updates applied. After an
        error, reading them may raise another one: an op may have failed in an update, or another
        rank may have ended.
        """


class CallbackError(RunError):
    """An error that a callback raised. The message names the callback and its method."""
