"""Tests of `without_garbage_collection`: it pauses the garbage collector during a plan search.

Afterwards the collector is on or off as before, even after an exception. It does not traverse all
new objects at once, but still frees them.
"""

from __future__ import annotations

import gc
import weakref

import pytest

from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection


def test_the_collector_is_restored() -> None:
    assert gc.isenabled()
    with without_garbage_collection():
        assert not gc.isenabled()
        with without_garbage_collection():
            pass
        assert not gc.isenabled(), "the inner block must leave the collector off"
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt), without_garbage_collection():
        raise KeyboardInterrupt
    assert gc.isenabled()


class _Node:
    """An object that refers to itself, so only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


def test_new_objects_are_old_afterwards_and_still_freed() -> None:
    with without_garbage_collection():
        kept = [[number] for number in range(20_000)]
        node = weakref.ref(_Node())
    assert len(gc.get_objects(generation=0)) < len(kept)
    assert node() is not None
    gc.collect()
    assert node() is None
