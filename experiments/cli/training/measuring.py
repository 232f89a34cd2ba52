"""Shows the progress of a calibration on the terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console

from megatrain.experiments.cli.verdict.layout import fitted


@contextlib.contextmanager
def measuring() -> Iterator[Callable[[str], None]]:
    """Shows that this machine is measured. Yields a function that prints what is measured next."""
    console, began = Console(), time.monotonic()

    def progress(what: str) -> None:
        line = fitted(f"{time.monotonic() - began:6.1f} s  measuring {what}")
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    with console.status("measuring"):
        yield progress
