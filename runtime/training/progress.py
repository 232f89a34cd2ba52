"""Progress: a callback that prints the notes and the progress of a training as lines of text.

It is for logs, notebooks and Python. On a terminal, `megatrain train` draws bars instead.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from megatrain.runtime.training.callback import Callback, EvaluationResult, Step
from megatrain.runtime.training.learning_rate import format_rate

if TYPE_CHECKING:
    from megatrain.runtime.training.training_run import TrainingRun

_FIRST_STEPS = 3
"""The number of steps at the beginning that are always printed."""


class Progress(Callback):
    """Prints notes, evaluations, checkpoints, and every few seconds a line for a step.

    The first three steps of this process, the last step, and every step with a checksum are always
    printed. If a callback stopped the training early, its reason is printed at the end.
    """

    def __init__(
        self, *, every_seconds: float = 10.0, write: Callable[[str], object] | None = None
    ) -> None:
        """Creates the callback.

        Args:
            every_seconds: the least number of seconds between two lines for steps.
            write: called with each line, or None to print it.
        """
        self._every_seconds, self._write = every_seconds, write or _print
        self._printed = 0.0
        self._number, self._left_out = 0, ""

    def on_note(self, text: str) -> None:
        self._write(text)

    def on_start(self, trainer: TrainingRun) -> None:
        self._left, self._number = TimeLeft(trainer.first_step), trainer.first_step - 1

    def on_switch(self, trainer: TrainingRun, seconds: float) -> None:
        self._left = TimeLeft(trainer.first_step)

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        steps, now = trainer.config.training.steps, time.monotonic()
        left = self._left.after(step.number, steps)
        text = f"step {step.number}/{steps}  {'  '.join(phrases(step))}"
        self._number, self._left_out = step.number, text
        always = step.number == steps or step.number < trainer.first_step + _FIRST_STEPS
        if always or step.checksum is not None or now - self._printed >= self._every_seconds:
            self._printed, self._left_out = now, ""
            self._write(f"{text}  {format_duration(left)} left" if left else text)
            if step.checksum is not None:
                self._write(exact(step))

    def _write_last(self, trainer: TrainingRun) -> None:
        """Prints the last step if it was not printed, because a later callback made it the last."""
        if trainer.stopped and trainer.finished and self._left_out:
            self._write(self._left_out)
            self._left_out = ""

    def on_evaluation(self, trainer: TrainingRun, evaluation: EvaluationResult) -> None:
        self._write_last(trainer)
        self._write(
            f"step {evaluation.number}  evaluation loss {evaluation.loss:.4f}, perplexity"
            f" {evaluation.perplexity:,.2f}"
        )

    def on_save(self, trainer: TrainingRun, number: int) -> None:
        self._write_last(trainer)
        if trainer.saved_step == number:
            self._write(f"step {number}  checkpoint saved")

    def on_end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        if error is None and trainer.stopped:
            self._write_last(trainer)
            self._write(f"stopped after step {self._number}: {trainer.stopped}")


def _print(text: str) -> None:
    """Prints `text`. Characters that the output cannot encode are escaped, and errors of the output
    are ignored, so a training does not fail because of its log.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    with contextlib.suppress(OSError):
        sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")
        sys.stdout.flush()


def phrases(step: Step) -> tuple[str, str, str]:
    """Returns a phrase each for the loss, the learning rate and the throughput of a step."""
    rate, speed = format_rate(step.rate), f"{step.tokens_per_second:,.0f} tokens/s"
    return f"loss {step.loss:.4f}", f"lr {rate}", speed


def exact(step: Step) -> str:
    """Returns the loss and the checksum of a step as text, with all digits."""
    return f"step {step.number}: loss {step.loss!r}, checksum {step.checksum:016x}"


class TimeLeft:
    """Estimates the remaining time of a training.

    The estimate is based on the wall time since the first step, and so includes evaluations and
    checkpoints. The first step itself is left out, because it compiles kernels.
    """

    def __init__(self, first_step: int) -> None:
        """Starts the measurement. `first_step` is the number of the next step."""
        self._first, self._since = first_step, time.monotonic()

    def after(self, number: int, steps: int) -> float:
        """Returns the remaining seconds after step `number` of `steps`, or 0 if not known yet."""
        if number == self._first:
            self._since = time.monotonic()
        done = number - self._first
        return (time.monotonic() - self._since) / done * (steps - number) if done else 0.0


def format_duration(seconds: float) -> str:
    """Returns a duration as text in seconds, minutes, hours or days.

    >>> [format_duration(seconds) for seconds in (12.4, 125, 44_280, 260_000)]
    ['12 s', '2.1 min', '12.3 h', '3.0 days']
    """
    for unit, length in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= (2 * length if unit == "days" else length):
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"
