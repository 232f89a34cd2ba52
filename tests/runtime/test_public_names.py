"""Tests of the names that the package offers, whose modules are imported at first use."""

from __future__ import annotations

import pytest

import megatrain.runtime


def test_the_runtime_has_its_public_names_and_no_others() -> None:
    for name in megatrain.runtime.__all__:
        assert getattr(megatrain.runtime, name).__name__ == name
    with pytest.raises(AttributeError, match=r"'megatrain.runtime' has no attribute 'Trianer'"):
        _ = megatrain.runtime.Trianer
