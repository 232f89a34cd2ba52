"""Progress: two bars on standard error's terminal, loading and training, with loss, speed and the time that is left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatrain.runtime.callback import Callback, Evaluation, Step

if TYPE_CHECKING:
    from megatrain.runtime.trainer import Trainer


class ProgressBars(Callback):
    """Draws from the first layer that is loaded on: by then everything that can be refused has been."""

    def __init__(self, parameters: int, steps: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeRemainingColumn())
        self._bars = Progress(*columns)
        self._loading = self._bars.add_task("load ", total=parameters, state="")
        self._training = self._bars.add_task("train", total=steps, state="", start=False)
        self._evaluated = ""
        self.losses: list[float] = []
        """of every step"""

    def on_note(self, text: str) -> None:
        Console(stderr=True).print(text, markup=False)

    def on_load(self, parameters: int) -> None:
        self._bars.start()
        self._bars.advance(self._loading, parameters)

    def on_start(self, trainer: Trainer) -> None:
        self._bars.update(self._training, completed=trainer.first_step - 1)
        self._bars.start_task(self._training)

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self.losses.append(step.loss)
        state = f"loss {step.loss:.4f}{self._evaluated}  {step.tokens_per_second:,.0f} tokens/s"
        self._bars.update(self._training, completed=step.number, state=state)

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self._evaluated = f" (evaluation {evaluation.loss:.4f})"

    def close(self) -> None:
        """Leaves the bars as they are."""
        if self._bars.live.is_started:
            self._bars.stop()
