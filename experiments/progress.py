"""Progress: what was found, then bars on the terminal: memory, loading and training, with loss, speed and the time that is left."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatrain.experiments.allocation_bar import allocation_bar
from megatrain.runtime.training.callback import Callback, Evaluation, Step

if TYPE_CHECKING:
    from megatrain.runtime.training.trainer import Trainer


class ProgressBars(Callback):
    """Draws from the first layer that is loaded on: by then everything that can be refused has been."""

    def __init__(self, parameters: int, steps: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn())
        self._bars = Progress(*columns)
        self._loading = self._bars.add_task("load ", total=parameters, state="")
        self._training = self._bars.add_task("train", total=steps, state="", start=False)
        self._evaluated = ""
        self._notes: list[str] = []
        self._allocation = ExitStack()
        self._allocated = self._allocation.enter_context(allocation_bar())

    def on_note(self, text: str) -> None:
        self._notes.append(text)
        if self._bars.live.is_started:
            self._begin()

    def on_allocate(self, done: int, total: int) -> None:
        self._allocated(done, total)

    def on_load(self, parameters: int) -> None:
        self._begin()
        self._bars.advance(self._loading, parameters)

    def on_start(self, trainer: Trainer) -> None:
        self._begin()
        self._bars.update(self._training, completed=trainer.first_step - 1)
        self._bars.start_task(self._training)

    def _begin(self) -> None:
        self._allocation.close()
        encoding = self._bars.console.encoding
        for note in self._notes:  # which may quote the data, in characters that the terminal has not
            note = note.encode(encoding, "backslashreplace").decode(encoding)
            self._bars.console.print(note, markup=False, highlight=False, soft_wrap=True)
        self._notes.clear()
        self._bars.start()

    def on_step(self, trainer: Trainer, step: Step) -> None:
        state = f"loss {step.loss:.4f}{self._evaluated}  {step.tokens_per_second:,.0f} tokens/s"
        self._bars.update(self._training, completed=step.number, state=state)
        if step.checksum is not None:
            self._bars.console.print(f"step {step.number}: loss {step.loss!r}, checksum {step.checksum:016x}", markup=False, highlight=False, soft_wrap=True)

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._evaluated = f" (evaluation {evaluation.loss:.4f})"

    def close(self) -> None:
        """Leaves the bars as they are."""
        self._allocation.close()
        if self._bars.live.is_started:
            self._bars.stop()
