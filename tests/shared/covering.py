"""Products of parameters of which the normal tests run a sample."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any], whole: object = None) -> list[Any]:
    """Returns the product of the values of several parameters, most of it marked as nightly.

    The values of the shorter parameters are repeated beside the longest one, so the normal tests
    have each value of each parameter, and every combination with the value `whole`. The other
    combinations run the same lines of code in other orders.
    """
    longest = max(map(len, axes))
    normal = {tuple(number % len(axis) for axis in axes) for number in range(longest)}
    made = []
    for chosen in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[index] for axis, index in zip(axes, chosen, strict=True)]
        marks = [] if chosen in normal or whole in values else [pytest.mark.nightly]
        made.append(pytest.param(*values, marks=marks))
    return made
