"""A bar on standard error while a run's memory is allocated, its pages touched and registered: minutes for a terabyte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def allocation_bar() -> Iterator[Callable[[int, int], None]]:
    """Gives what the executor calls `on_allocate`: bytes so far, bytes of all. Nothing shows before its first call, nor where standard error is a file."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    bars = Progress(*columns, console=console, disable=not console.is_terminal)
    task = bars.add_task("memory", total=None)

    def on_allocate(done: int, total: int) -> None:
        bars.start()
        bars.update(task, completed=done, total=total)

    try:
        yield on_allocate
    finally:
        if bars.live.is_started:
            bars.stop()
