"""Uncollected: the collector rests while a plan is searched, and is as it was afterwards, whatever
happens.
"""

from __future__ import annotations

import gc

import pytest

from megatrain.experiments.uncollected import uncollected


def test_the_collector_is_as_it_was() -> None:
    assert gc.isenabled()
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled(), "it was not this one that stopped it"
    assert gc.isenabled()
    with pytest.raises(KeyboardInterrupt), uncollected():
        raise KeyboardInterrupt
    assert gc.isenabled()
