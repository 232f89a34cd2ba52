"""Uncollected: the collector rests while a plan is searched, and is as it was afterwards, whatever
happens.
"""

from __future__ import annotations

import gc

import pytest

from megatrain.experiments.cli.without_garbage_collection import without_garbage_collection


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    with without_garbage_collection():
        assert not gc.isenabled()
        with without_garbage_collection():
            pass
        assert not gc.isenabled(), "it was not this one that stopped it"
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt), without_garbage_collection():
        raise KeyboardInterrupt
    assert gc.isenabled()
