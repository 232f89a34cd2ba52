"""Tests of `without_garbage_collection`: it pauses the garbage collector during a plan search.

Afterwards the collector is on or off as before, even after an exception.
"""

from __future__ import annotations

import gc

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
