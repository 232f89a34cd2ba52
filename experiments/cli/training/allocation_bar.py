"""Progress bar on standard error for the allocation of a run's memory.

Allocating and pinning a terabyte of host memory takes minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def allocation_bar() -> Iterator[Callable[[int, int], None]]:
    """Yields a callback `on_allocate(done, total)` for the executor. Both arguments are in bytes.

    The bar appears with the first call. It is not shown if standard error is not a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
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
