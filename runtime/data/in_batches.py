"""Groups items into batches that are limited in number and in size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

BATCH_ITEMS = 1024
BATCH_SIZE = 2**21

Item = TypeVar("Item")


def in_batches(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Yields lists of up to `BATCH_ITEMS` items.

    A list ends early with the item that brings its total size to `BATCH_SIZE` or more.
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += size(item)
        if len(batch) == BATCH_ITEMS or total >= BATCH_SIZE:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
