"""Script: how every `python -m megatrain.experiments...` ends, whatever ended it."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

from megatrain.simulator.errors import Interrupted, UserError


def path_error(error: OSError) -> UserError | None:
    """In one line, what no check of ours foresaw: a name too long, a folder that may not be entered, a full disk. None for what is no path's fault."""
    if error.strerror is None or (error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT)):
        return None
    where = "output" if error.filename is None else str(error.filename)
    return UserError(where, found=error.strerror.lower(), allowed="a path that can be used", fix="check the path, its permissions and the room on its disk")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """While it is entered, SIGTERM and SIGHUP raise Interrupted in the main thread, as Ctrl-C does, so that what is half written is removed.

    Later ones are ignored while that is done. A signal that is ignored or handled already stays so: `nohup` works.
    """

    def end(number: int, _: FrameType | None) -> None:
        for each in chosen:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    here = threading.current_thread() is threading.main_thread()
    chosen = [each for each in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(each) is signal.SIG_DFL]
    for each in chosen:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in chosen:
            signal.signal(each, signal.SIG_DFL)


def interrupted(name: str, error: KeyboardInterrupt) -> int:
    """The status after a signal, told in one line: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"{name}: interrupted", file=sys.stderr)
    return error.status if isinstance(error, Interrupted) else 130


def ended(name: str, run: Callable[[], int]) -> int:
    """The status of `run`; 2 for a mistake of the user or a path that cannot be used, told in one line that begins with
    `name`; 130 after Ctrl-C and 143 after SIGTERM, 141 where nobody reads on.
    """
    try:
        with interruptible():
            return run()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if (shown := path_error(error)) is None:
            raise
        print(f"{name}: {shown}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        return interrupted(name, error)
