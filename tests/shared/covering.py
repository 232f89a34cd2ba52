"""Products of parameters of which the normal tests run a sample."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def covering(*axes: Sequence[Any], whole: object = None) -> list[Any]:
    """Returns the product of the values of several parameters, most of it marked as nightly.

    The values of the shorter parameters are repeated beside the longest one, so the normal tests
    have each value of each parameter. They also have every combination with `whole`. The other
    combinations run the same lines of code in other orders.
    """
    others = [[at for at, value in enumerate(axis) if value != whole] for axis in axes]
    longest = max(map(len, others))
    normal = {tuple(each[number % len(each)] for each in others) for number in range(longest)}
    made = []
    for chosen in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[index] for axis, index in zip(axes, chosen, strict=True)]
        marks = [] if chosen in normal or whole in values else [pytest.mark.nightly]
        made.append(pytest.param(*values, marks=marks))
    return made
