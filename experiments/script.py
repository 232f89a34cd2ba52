"""Script: how every `python -m megatrain.experiments...` ends, whatever ended it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from megatrain.simulator.errors import UserError


def ended(name: str, run: Callable[[], int]) -> int:
    """The status of `run`; 2 for a mistake of the user, told in one line that begins with `name`; 130 after Ctrl-C, 141 where nobody reads on."""
    try:
        return run()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
