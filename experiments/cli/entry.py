"""The entry point of the `megatrain` command. Ctrl-C while it imports the rest causes no traceback.

This module itself imports almost nothing.
"""

import contextlib
import io
import os
import signal
import sys


def main() -> int:
    """Runs one command and returns its exit status (`main.py`)."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as under nohup
    if not ignored:
        signal.signal(signal.SIGINT, _leave)
    _open_streams()
    import gc

    from megatrain.experiments.cli.main import main as run

    if not ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = run()
    if "torch" not in sys.modules:
        # Only memory is left, which the process gives back as a whole. Python would otherwise look
        # for cycles in it, for 0.1 s after `megatrain check` of a 7B model.
        gc.freeze()
    return status


def _leave(*_: object) -> None:
    """Ends the process at once, while nothing has been written yet."""
    with contextlib.suppress(OSError):  # the terminal may have been closed
        os.write(2, b"megatrain: interrupted\n")
    os._exit(130)


def _open_streams() -> None:
    """Opens standard streams that the caller has closed, as `>&-` does, on `/dev/null`.

    Without this, the next file that is opened would get the number of the closed stream, and
    receive what is printed. What standard output cannot encode is printed as an escape sequence,
    as on standard error.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
