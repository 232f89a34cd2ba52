"""StoredParts: the tensors of a checkpoint on disk, of which several files may have a part each.

A plan for several GPUs saves the part of each layer that a rank owns to a file of this rank. So any
other number of GPUs can read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.files.malformed_file import MalformedFile, readable
from megatrain.runtime.files.tensor_file import TensorEntry, read_entries

_PIECE = 2**22
"""elements in memory at a time"""


class _Part(NamedTuple):
    """The elements of a tensor that one file has: a range of its last dimension."""

    first: int
    """index of its first element in the last dimension"""
    path: Path
    """the file"""
    entry: TensorEntry
    """its dtype, its shape, and its place in the file"""

    @property
    def length(self) -> int:
        """Returns the number of its elements in the last dimension."""
        return self.entry.shape[-1] if self.entry.shape else 1

    @property
    def end(self) -> int:
        """Returns the index after that of the last element."""
        return self.first + self.length


class StoredParts:
    """Reads tensors by name, one piece at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Reads the headers of the checkpoint's files.

        Raises MalformedFile if the parts of a tensor overlap, do not follow each other, or differ
        in their dtype or in a dimension before the last.
        """
        self._folder = folder
        self._parts: dict[str, list[_Part]] = {}
        for shard in manifest.shards:
            entries = read_entries(folder / shard.file)
            firsts = dict(zip(shard.tensors, shard.firsts or [0] * len(shard.tensors), strict=True))
            if entries.keys() != firsts.keys():
                raise self._malformed(", ".join(entries)[:200], f"{', '.join(firsts)[:200]}")
            for name, entry in entries.items():
                part = _Part(firsts[name], folder / shard.file, entry)
                self._parts.setdefault(name, []).append(part)
        for name, parts in self._parts.items():
            parts.sort()
            end = 0
            for part in parts:
                same = (part.entry.dtype, part.entry.shape[:-1])
                if part.first != end or same != (parts[0].entry.dtype, parts[0].entry.shape[:-1]):
                    raise self._malformed(
                        f"a part of {name} from {part.first} on", f"parts that make up {name}"
                    )
                end = part.end

    def __contains__(self, name: str) -> bool:
        """Returns whether there is a tensor `name`."""
        return name in self._parts

    def __iter__(self) -> Iterator[str]:
        """Yields the names of all tensors."""
        return iter(self._parts)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype of the tensor `name`."""
        return self._parts[name][0].entry.dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the whole tensor `name`."""
        parts = self._parts[name]
        return (*parts[0].entry.shape[:-1], parts[-1].end)

    def read(self, name: str, first: int, end: int) -> torch.Tensor:
        """Returns the elements of a tensor from `first` to before `end`, counted through all of its
        dimensions, in host memory.

        Raises MalformedFile if a file cannot be read.
        """
        length = self.shape(name)[-1]
        found = []
        for row in range(first // max(length, 1), -(-end // max(length, 1))):
            begin, stop = max(first - row * length, 0), min(end - row * length, length)
            for part in self._parts[name]:
                here, there = max(begin, part.first), min(stop, part.end)
                if here < there:
                    place = row * part.length + here - part.first
                    found.append(self._elements(part, place, there - here))
        return found[0] if len(found) == 1 else torch.cat(found or [torch.empty(0)])

    def fill(self, name: str, target: torch.Tensor, first: int) -> None:
        """Fills `target` with the elements of a tensor from `first` on in the last dimension, one
        piece at a time.
        """
        length = self.shape(name)[-1]
        for row, values in enumerate(target.unbind() if target.dim() > 1 else [target]):
            for begin in range(0, len(values), _PIECE):
                piece = values[begin : begin + _PIECE]
                place = row * length + first + begin
                piece.copy_(self.read(name, place, place + len(piece)))

    def _elements(self, part: _Part, first: int, count: int) -> torch.Tensor:
        width = part.entry.dtype.itemsize
        with readable(part.path):
            data = np.fromfile(
                part.path,
                dtype=np.uint8,
                count=count * width,
                offset=part.entry.start + first * width,
            )
        if data.nbytes != count * width:
            raise MalformedFile(
                str(part.path),
                found="an end before that of the last tensor",
                allowed="a file that does not change",
                fix="read it again",
            )
        return torch.from_numpy(data).view(part.entry.dtype)

    def elements(self, name: str) -> int:
        """Returns the number of elements of the tensor `name`."""
        return math.prod(self.shape(name))

    def _malformed(self, found: str, allowed: str) -> MalformedFile:
        return MalformedFile(
            f"{self._folder}: tensors", found=found, allowed=allowed, fix="use another checkpoint"
        )
