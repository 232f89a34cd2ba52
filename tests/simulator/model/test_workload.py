"""Tests of the values that a workload refuses."""

from __future__ import annotations

import msgspec
import pytest

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import Workload, without_pieces


@pytest.mark.parametrize("field", ["batch", "sequence", "accumulation", "loss_chunk"])
@pytest.mark.parametrize("value", [0, -1, 2**40])
def test_a_workload_out_of_range_gives_a_one_line_error(field: str, value: int) -> None:
    with pytest.raises(
        UserError, match=rf"workload: {field}: found {value}; allowed: .*; fix: set {field} "
    ):
        Workload(**{"batch": 1, "sequence": 8, field: value})


@pytest.mark.parametrize("value", [0, -1, 2**24 + 1])
def test_a_piece_out_of_range_gives_a_one_line_error(value: int) -> None:
    message = f"workload: token_piece: found {value}; allowed: 1 to {2**24};"
    with pytest.raises(UserError, match=message):
        Workload(batch=1, sequence=8, token_piece=value)


def test_pieces_with_fp8_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="workload: token_piece: found 4 with fp8 products"):
        Workload(batch=1, sequence=8, token_piece=4, fp8="rowwise")


def test_pieces_are_in_the_shape_if_there_are_several() -> None:
    one, several = (Workload(batch=2, sequence=8, token_piece=size) for size in (16, 5))
    plain = Workload(batch=2, sequence=8)
    assert (one.pieces, several.pieces, plain.pieces) == (1, 4, 1)
    assert one.shape == plain.shape
    assert several.shape == f"{plain.shape}-pieces5"
    packed = msgspec.structs.replace(several, documents=True).shape
    assert without_pieces(packed) == msgspec.structs.replace(plain, documents=True).shape
