"""Interruption: Ctrl-C and SIGTERM end a run between two steps, in good order; a second one ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

from megatrain.simulator.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """While it is entered, the first signal is only noted: ask `if interruption:` between steps, save, and raise `interruption.error()`.

    The second signal raises Interrupted where the main thread is. Outside the main thread, where Python delivers no signals, it notes nothing.
    """

    def __init__(self) -> None:
        self._noted: int | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]
        self._before = {}

    def __bool__(self) -> bool:
        """A signal has come."""
        return self._noted is not None

    def error(self) -> Interrupted:
        """What to raise when the run has been saved: it carries the exit status, 130 after Ctrl-C and 143 after SIGTERM."""
        assert self._noted is not None, "no signal has come"
        return Interrupted(self._noted)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self._noted is not None:
            raise Interrupted(number)
        self._noted = number
