"""Tests of checkpoint tensors that are stored in parts in several files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.runtime.checkpoint.manifest import Shard
from megatrain.runtime.checkpoint.stored_parts import StoredParts
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.files.tensor_stream import TensorSource, write_tensors
from megatrain.simulator.base.errors import UserError

WHOLE = torch.arange(22, dtype=torch.float32).view(2, 11)


def stored(folder: Path, *parts: tuple[int, int]) -> Any:
    """Writes these ranges of the last dimension of `WHOLE` into files, and returns the files."""
    shards = []
    for number, (first, end) in enumerate(parts, 1):
        path = folder / f"state-{number:05d}.safetensors"
        part = TensorSource.of(WHOLE[:, first:end])
        size, checksum = write_tensors(path, {"0.moments": part})
        shards.append(
            Shard(
                file=path.name,
                bytes=size,
                checksum=checksum,
                tensors=("0.moments",),
                firsts=(first,),
            )
        )
    return SimpleNamespace(shards=tuple(shards))


def test_parts_are_read_as_one_tensor(tmp_path: Path) -> None:
    """Files may be in any order, and ranges may cross the end of a row."""
    parts = StoredParts(tmp_path, stored(tmp_path, (7, 11), (0, 4), (4, 7)))
    assert list(parts) == ["0.moments"]
    assert (parts.shape("0.moments"), parts.dtype("0.moments")) == ((2, 11), torch.float32)
    flat = WHOLE.view(-1)
    for first in range(22):
        for end in range(first + 1, 23):
            assert torch.equal(parts.read("0.moments", first, end), flat[first:end])
    for first, count in ((0, 11), (3, 5), (10, 1)):
        target = torch.zeros(2, count)
        parts.fill("0.moments", target, first)
        assert torch.equal(target, WHOLE[:, first : first + count])


def test_one_file_may_have_the_whole(tmp_path: Path) -> None:
    parts = StoredParts(tmp_path, stored(tmp_path, (0, 11)))
    assert (parts.shape("0.moments"), parts.dtype("0.moments")) == ((2, 11), torch.float32)


@pytest.mark.parametrize("ranges", [((0, 4), (5, 11)), ((0, 5), (4, 11)), ((1, 11),)])
def test_parts_that_are_not_the_whole_are_refused(tmp_path: Path, ranges: Any) -> None:
    with pytest.raises(MalformedFile, match=r"allowed: parts that make up 0\.moments"):
        StoredParts(tmp_path, stored(tmp_path, *ranges))


def test_a_file_names_the_first_element_of_each_tensor_or_of_none() -> None:
    fields: dict[str, Any] = {"file": "state-00001.safetensors", "bytes": 1, "checksum": ""}
    with pytest.raises(UserError, match="found 1 numbers; allowed: none, or 2"):
        Shard(**fields, tensors=("a", "b"), firsts=(0,))
