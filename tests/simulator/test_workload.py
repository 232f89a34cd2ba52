"""Tests of the values that a workload refuses."""

from __future__ import annotations

import pytest

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import Workload


@pytest.mark.parametrize("field", ["batch", "sequence", "accumulation", "loss_chunk"])
@pytest.mark.parametrize("value", [0, -1, 2**40])
def test_a_workload_out_of_range_is_one_line(field: str, value: int) -> None:
    with pytest.raises(
        UserError, match=rf"workload: {field}: found {value}; allowed: .*; fix: set {field} "
    ):
        Workload(**{"batch": 1, "sequence": 8, field: value})
