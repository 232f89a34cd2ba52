"""Progress bars of a training run, on the terminal.

There is one bar each for allocating memory, loading weights, and training. The training bar shows
the loss, the speed and the remaining time. Notes on the data are printed above the bars.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatrain.experiments.cli.allocation_bar import allocation_bar
from megatrain.runtime.training.callback import Callback, EvaluationResult, Step

if TYPE_CHECKING:
    from megatrain.runtime.training.training_run import TrainingRun


class ProgressBars(Callback):
    """Callback that draws the progress bars.

    The bars appear when the first layer is loaded. All checks of the user's input have passed by
    then, so that an error message does not follow half-drawn bars.
    """

    def __init__(self, parameters: int) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            TimeRemainingColumn(),
        )
        self._bars = Progress(*columns)
        self._loading = self._bars.add_task("load ", total=parameters, state="")
        self._training = self._bars.add_task("train", total=None, state="", start=False)
        self._evaluated = ""
        self._notes: list[str] = []
        self._allocation = ExitStack()
        self._allocated = self._allocation.enter_context(allocation_bar())

    def on_note(self, text: str) -> None:
        """Keeps a note until the bars appear, or prints it above them."""
        self._notes.append(text)
        if self._bars.live.is_started:
            self._begin()

    def on_allocate(self, done: int, total: int) -> None:
        """Updates the bar for allocating memory, in bytes."""
        self._allocated(done, total)

    def on_load(self, parameters: int) -> None:
        """Advances the bar for loading weights by a number of parameters."""
        self._begin()
        self._bars.advance(self._loading, parameters)

    def on_start(self, trainer: TrainingRun) -> None:
        """Starts the training bar at the first step of this run."""
        self._begin()
        steps = trainer.config.training.steps
        self._bars.update(self._training, total=steps, completed=trainer.first_step - 1)
        self._bars.start_task(self._training)

    def _begin(self) -> None:
        """Removes the bar for memory, prints the notes, and shows the other bars."""
        self._allocation.close()
        encoding = self._bars.console.encoding
        for note in self._notes:
            # A note may quote data in characters that the terminal cannot show.
            note = note.encode(encoding, "backslashreplace").decode(encoding)
            self._bars.console.print(note, markup=False, highlight=False, soft_wrap=True)
        self._notes.clear()
        self._bars.start()

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        """Updates the training bar, and prints the checksum of weights if there is one."""
        state = f"loss {step.loss:.4f}{self._evaluated}  {step.tokens_per_second:,.0f} tokens/s"
        self._bars.update(self._training, completed=step.number, state=state)
        if step.checksum is not None:
            self._bars.console.print(
                f"step {step.number}: loss {step.loss!r}, checksum {step.checksum:016x}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def on_evaluation(self, trainer: TrainingRun, evaluation: EvaluationResult) -> None:
        """Adds the evaluation loss to the training bar."""
        self._evaluated = f" (evaluation {evaluation.loss:.4f})"

    def close(self) -> None:
        """Stops drawing. The bars stay on the terminal as they are."""
        self._allocation.close()
        if self._bars.live.is_started:
            self._bars.stop()
