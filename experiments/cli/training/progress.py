"""Progress bars of a training run, on the terminal.

There is one bar each for allocating memory, loading weights, and training. The lines below the
training bar show loss, learning rate, speed, memory, and the error of the predicted step time.
Notes on the data are printed above the bars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from time import monotonic
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from megatrain.experiments.cli.training.allocation_bar import allocation_bar
from megatrain.experiments.cli.verdict.layout import fitted
from megatrain.runtime.training.callback import Callback, EvaluationResult, Step
from megatrain.runtime.training.interruption import leave_closed_terminal
from megatrain.runtime.training.progress import TimeLeft, exact, format_duration, phrases
from megatrain.simulator.base.units import format_bytes

if TYPE_CHECKING:
    from megatrain.runtime.training.training_run import TrainingRun


_WIDE_COLUMNS = 72
"""The time left is to the right of the bar in a terminal of at least this width, otherwise below
the bar."""


class _Bars(Progress):
    """Bars with lines of text below them."""

    details: tuple[Sequence[str], ...] = ()
    """The parts of each line. A line that is too long for the terminal is broken between parts."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for parts in self.details:
            for line in _lines(parts, self.console.width):
                yield Text(line, overflow="fold")


def _lines(parts: Sequence[str], width: int) -> list[str]:
    """Returns the parts on as few lines as they need. A line is broken between parts."""
    lines = [""]
    for part in filter(None, parts):
        joined = f"{lines[-1]}  {part}" if lines[-1] else part
        if len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(part)
    return [line for line in lines if line]


class ProgressBars(Callback):
    """Callback that draws the progress bars.

    The bars appear when the first layer is loaded. By then all checks of the user's input have
    passed, so no error message follows half-drawn bars.
    """

    def __init__(self, parameters: int) -> None:
        """Creates the bars for a model with this number of parameters."""
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[state]}")
        self._bars = _Bars(*columns, console=Console())
        self._parameters, self._loaded = parameters, 0
        self._loading = self._bars.add_task("load ", total=parameters, state="")
        self._training = self._bars.add_task("train", total=None, state="", start=False)
        self._memory = self._evaluated = self._compared = ""
        self._notes: list[str] = []
        self._allocation = ExitStack()
        self._allocated = self._allocation.enter_context(allocation_bar())

    def on_note(self, text: str) -> None:
        """Keeps a note until the bars appear, or prints it above them."""
        self._notes.append(text)
        if self._bars.live.is_started:
            self._begin()

    def on_allocate(self, done: int, total: int) -> None:
        """Updates the bar for allocating memory, in bytes, until the other bars appear."""
        if not self._bars.live.is_started:
            self._allocated(done, total)

    def on_load(self, parameters: int) -> None:
        """Advances the bar for loading weights by a number of parameters."""
        self._begin()
        self._loaded += parameters
        share = self._loaded / max(self._parameters, 1)
        state = f"{share:4.0%} of {self._parameters / 1e6:,.1f} M parameters"
        self._bars.update(self._loading, completed=self._loaded, state=state)

    def on_start(self, trainer: TrainingRun) -> None:
        """Starts the training bar at the first step of this run."""
        self._begin()
        self._left = TimeLeft(trainer.first_step)
        steps = trainer.config.training.steps
        self._bars.update(self._training, total=steps, completed=trainer.first_step - 1)
        self._bars.start_task(self._training)
        self._measure_memory(trainer)

    def on_switch(self, trainer: TrainingRun, seconds: float) -> None:
        self._left = TimeLeft(trainer.first_step)
        self._measure_memory(trainer)

    def _measure_memory(self, trainer: TrainingRun) -> None:
        sizes = [
            f"{format_bytes(trainer.executor.allocated(place))} {place}"
            for place in ("device", "host")
        ]
        self._memory = " + ".join(sizes)

    def _begin(self) -> None:
        """Removes the bar for memory, prints the notes, and shows the other bars."""
        with _terminal_may_be_closed():
            self._allocation.close()
        for note in self._notes:
            self._print(note)
        self._notes.clear()
        with _terminal_may_be_closed():
            self._bars.start()

    def _print(self, text: str) -> None:
        encoding = self._bars.console.encoding
        # A note may quote data in characters that the terminal cannot show.
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        text = fitted(text, self._bars.console.width)
        with _terminal_may_be_closed():
            self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        """Updates the training bar, and prints the checksum of weights if there is one."""
        steps = trainer.config.training.steps
        left = self._left.after(step.number, steps)
        done, times = f"{step.number}/{steps}", ""
        if left:
            now = datetime.now().astimezone()
            ends = now + timedelta(seconds=left)
            day = "" if ends.date() == now.date() else f"{ends:%d %b }"
            times = f"{format_duration(left)} left, until {day}{ends:%H:%M}"
        wide = self._bars.console.width >= _WIDE_COLUMNS
        self._bars.details = (
            ("" if wide else times, *phrases(step), self._evaluated),
            (self._memory, self._compared),
        )
        state = f"{done}  {times}" if wide and times else done
        self._bars.update(self._training, completed=step.number, state=state)
        if step.checksum is not None:
            self._print(exact(step))

    def on_evaluation(self, trainer: TrainingRun, evaluation: EvaluationResult) -> None:
        """Shows the evaluation loss and its step."""
        self._evaluated = f"evaluation {evaluation.loss:.4f} at step {evaluation.number}"

    def compared(self, text: str) -> None:
        """Shows `text`, which compares measured steps with the prediction, below the bar."""
        self._compared = text

    def close(self) -> None:
        """Stops drawing. The bars stay on the terminal as they are."""
        with _terminal_may_be_closed():
            self._allocation.close()
        if self._bars.live.is_started:
            with _terminal_may_be_closed():
                self._bars.stop()


@contextmanager
def _terminal_may_be_closed() -> Iterator[None]:
    """Discards what the block and the rest of the process print, if their terminal was closed. The
    training goes on.
    """
    try:
        yield
    except OSError:
        leave_closed_terminal()


@contextmanager
def measuring() -> Iterator[Callable[[str], None]]:
    """Shows a spinner while this machine is measured.

    Yields a function that prints the time and its argument, the name of the next measurement.
    """
    console, began = Console(), monotonic()

    def progress(what: str) -> None:
        line = fitted(f"{monotonic() - began:6.1f} s  measuring {what}")
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    with console.status("measuring"):
        yield progress
