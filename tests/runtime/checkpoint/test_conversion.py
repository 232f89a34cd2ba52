"""Tests of the sizes of pieces and files when a checkpoint is converted to another state format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.runtime.checkpoint.conversion import _pieces
from megatrain.runtime.files.tensor_stream import TensorSource
from megatrain.runtime.training import converting
from megatrain.simulator.model.state_format import BLOCK


@pytest.mark.parametrize("count", [10**9, 100])
def test_pieces_are_small_and_end_with_a_block(count: int) -> None:
    found = list(_pieces(count))
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == count
    assert all(first % BLOCK == 0 for first, _ in found)
    assert max(4 * (end - first) for first, end in found) <= 64 * 2**20  # bytes in fp32


def test_a_file_holds_as_many_tensors_as_have_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A tensor that is larger than a file may be has one of its own."""
    monkeypatch.setattr(converting, "SHARD_BYTES", 64)
    sizes = {"a": 32, "b": 32, "c": 1, "d": 100, "e": 64}
    tensors = {
        name: TensorSource.of(torch.zeros(size, dtype=torch.uint8)) for name, size in sizes.items()
    }
    shards = converting._write(tensors, tmp_path)
    assert [shard.tensors for shard in shards] == [("a", "b"), ("c",), ("d",), ("e",)]
