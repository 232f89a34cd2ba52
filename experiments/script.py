"""Script: how every `python -m megatrain.experiments...` ends, whatever ended it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from megatrain.simulator.errors import UserError


def path_error(error: OSError) -> UserError | None:
    """In one line, what no check of ours foresaw: a name too long, a folder that may not be entered, a full disk. None for what is no path's fault."""
    if error.strerror is None or (error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT)):
        return None
    where = "output" if error.filename is None else str(error.filename)
    return UserError(where, found=error.strerror.lower(), allowed="a path that can be used", fix="check the path, its permissions and the room on its disk")


def ended(name: str, run: Callable[[], int]) -> int:
    """The status of `run`; 2 for a mistake of the user or a path that cannot be used, told in one line that begins with
    `name`; 130 after Ctrl-C, 141 where nobody reads on.
    """
    try:
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
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
