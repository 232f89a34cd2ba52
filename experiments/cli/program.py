"""Turns errors and signals into one line and an exit status, for every program of this package."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from megatrain.experiments.cli.options import OneLineParser
from megatrain.simulator.base.errors import Interrupted, RunError, UserError

_AGAIN_S = 0.02
"""Seconds after which a signal is sent again that arrived in a finalizer."""


def path_error(error: OSError) -> UserError | None:
    """Returns the one-line error for an OSError that a path or a full disk caused, else None.

    These are errors that no earlier check reports, such as a name that is too long or a folder
    that may not be entered.
    """
    if error.strerror is None or (
        error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT)
    ):
        return None
    where = "output" if error.filename is None else str(error.filename)
    return UserError(
        where,
        found=error.strerror.lower(),
        allowed="a usable path",
        fix="check the path, its permissions and the free space on its disk",
    )


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise Interrupted, a KeyboardInterrupt, in the main thread.

    As the exception propagates, half-written files are removed, and further signals are ignored. A
    signal that is already ignored or handled is left alone, so `nohup` works. In another thread
    than the main one, nothing is changed.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if _in_finalizer(frame):
            # Python ignores an exception there, so the signal is sent again.
            again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        for handled in signals:
            signal.signal(handled, signal.SIG_IGN)
        raise Interrupted(number)

    in_main_thread = threading.current_thread() is threading.main_thread()
    signals = [
        candidate
        for candidate in (signal.SIGTERM, signal.SIGHUP)
        if in_main_thread and signal.getsignal(candidate) is signal.SIG_DFL
    ]
    for handled in signals:
        signal.signal(handled, end)
    try:
        yield
    finally:
        for handled in signals:
            signal.signal(handled, signal.SIG_DFL)


def _in_finalizer(frame: FrameType | None) -> bool:
    """Returns whether `frame` or one of its callers is a `__del__` method."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def one_line_warnings(name: str) -> Iterator[None]:
    """Writes each PolicyWarning as one line that begins with `name`."""
    original = warnings.formatwarning

    def line(message: Warning | str, category: type[Warning], *place: Any, **named: Any) -> str:
        from megatrain.simulator.policies.policy import PolicyWarning  # slow

        if issubclass(category, PolicyWarning):
            return f"{name}: {message}\n"
        return original(message, category, *place, **named)

    warnings.formatwarning = line
    try:
        yield
    finally:
        warnings.formatwarning = original


def interrupted(name: str, error: KeyboardInterrupt) -> int:
    """Prints one line, with the notes of `error`, and returns the exit status after a signal.

    The status is 130 after Ctrl-C, 143 after SIGTERM, and 129 after SIGHUP.
    """
    with contextlib.suppress(OSError):  # the terminal may have been closed
        notes: list[str] = getattr(error, "__notes__", [])
        print(f"{name}: {'; '.join(notes) or 'interrupted'}", file=sys.stderr)
    return error.status if isinstance(error, Interrupted) else 130


def run_program(name: str, run: Callable[[], int]) -> int:
    """Calls `run` and returns the exit status of the program `name`.

    The status is the result of `run`. If `run` raises an error, one line on standard error begins
    with `name`, and the status is 1 for a run that failed, 2 for a mistake of the user or an
    unusable path, and 3 for a model or a plan that does not fit in memory. It is 130 after Ctrl-C,
    143 after SIGTERM, 129 after SIGHUP, and 141 if the reader of standard output has closed it.
    """
    try:
        with interruptible(), one_line_warnings(name):
            status = run()
        sys.stdout.flush()
        return status
    except (UserError, RunError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.status
    except BrokenPipeError:
        # The reader has closed the pipe, as in `megatrain ... | head`. Buffered output goes to
        # /dev/null, so Python's final flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if (shown := path_error(error)) is None:
            raise
        print(f"{name}: {shown}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        return interrupted(name, error)


def run_without_options(name: str, description: str | None, run: Callable[[], int]) -> int:
    """Calls `run` as `run_program` does, for a program that has no option but `--help`."""

    def parsed() -> int:
        OneLineParser(prog=name, description=description).parse_args()
        return run()

    return run_program(name, parsed)
