"""Interruption: lets Ctrl-C, SIGTERM and SIGHUP end a run after the current step.

A second signal ends the run at once. SIGHUP is never a second one: if a terminal is closed, both
its shell and the system may send it. What is printed after that is discarded.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import threading
from collections.abc import Callable
from types import FrameType
from typing import Self

from megatrain.simulator.base.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that are recorded."""


class InterruptedTraining(Interrupted):
    """A signal ended a training. `text` says what happened and how to continue."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number)
        self.args = number, text  # so that it can be pickled

    def __str__(self) -> str:
        return str(self.args[1])


class Interruption:
    """A context manager that records the first signal instead of raising KeyboardInterrupt.

    Test `if interruption:` between steps, save, and raise `interruption.error()`.

    A second signal other than SIGHUP raises Interrupted in the main thread. If SIGHUP is ignored
    when the context is entered, as under `nohup`, it stays ignored. If the context is entered in
    another thread, no signal is recorded, because only the main thread can set signal handlers.
    """

    def __init__(self, progress: Callable[[], str]) -> None:
        """`progress` returns the end of a message for the user: when the run ended, what is saved,
        and how to continue.
        """
        self._progress = progress
        self._signal: int | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {
                number: signal.signal(number, self._record)
                for number in SIGNALS
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
            }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            restored = handler if handler is not None else signal.SIG_DFL
            signal.signal(number, restored)  # type: ignore[arg-type]
        self._before = {}

    def __bool__(self) -> bool:
        """Returns whether a signal was recorded."""
        return self._signal is not None

    def error(self) -> Interrupted:
        """Returns the exception to raise after the run has been saved. If no signal was recorded,
        another rank has received one.

        It contains the exit status: 130 after Ctrl-C, 143 after SIGTERM, and 129 after
        SIGHUP.
        """
        if self._signal is None:
            return self._error(signal.SIGTERM, "a signal to another rank ended the training")
        return self._error(self._signal, f"{_name(self._signal)} ended the training")

    def _error(self, number: int, what: str) -> InterruptedTraining:
        return InterruptedTraining(number, f"{what} {self._progress()}")

    def _record(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_closed_terminal()
        elif self._signal is not None:
            what = f"a second signal, {_name(number)}, ended the training at once,"
            raise self._error(number, what)
        self._signal = self._signal or number


def leave_closed_terminal() -> None:
    """Opens standard output and standard error on `/dev/null` if they are a terminal that was
    closed, because writing to it raises OSError.
    """
    for number in (1, 2):
        with contextlib.suppress(OSError):  # this stream is not open
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, number)
                os.close(null)


def _name(number: int) -> str:
    """Returns the name of a signal."""
    return signal.Signals(number).name
