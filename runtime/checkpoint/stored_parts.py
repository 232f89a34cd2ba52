"""StoredParts: reads the tensors of a checkpoint on disk, even if files have parts of tensors.

With several GPUs, each rank saves its part of each layer to files of its own. This module reads any
range of a tensor, so a checkpoint can be restored with any number of GPUs.
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
"""Number of elements in memory at a time."""


class _Part(NamedTuple):
    """The part of a tensor in one file: a range of the tensor's last dimension."""

    first: int
    """Index of the part's first element in the last dimension."""
    path: Path
    """Path of the file."""
    entry: TensorEntry
    """Dtype, shape and position in the file of the part."""

    @property
    def length(self) -> int:
        """Returns the size of the part in the last dimension."""
        return self.entry.shape[-1] if self.entry.shape else 1

    @property
    def end(self) -> int:
        """Returns the end of the part's range in the last dimension."""
        return self.first + self.length


class StoredParts:
    """Reads the tensors of a checkpoint by name, one piece at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Reads the headers of the checkpoint's files.

        Raises MalformedFile if the parts of a tensor overlap or leave gaps, or if their dtypes or
        dimensions before the last differ.
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
        """Returns elements `first` to `end` (exclusive) of the flattened tensor `name`, [end -
        first], in host memory. Raises MalformedFile if a file cannot be read.
        """
        length = self.shape(name)[-1]
        pieces = []
        for row in range(first // max(length, 1), -(-end // max(length, 1))):
            begin, stop = max(first - row * length, 0), min(end - row * length, length)
            for part in self._parts[name]:
                low, high = max(begin, part.first), min(stop, part.end)
                if low < high:
                    place = row * part.length + low - part.first
                    pieces.append(self._elements(part, place, high - low))
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0)])

    def fill(self, name: str, target: torch.Tensor, first: int) -> None:
        """Fills `target`, [elements] or [rows, elements], with the elements of the tensor `name`
        that begin at `first` in the last dimension. Reads one piece at a time.
        """
        length = self.shape(name)[-1]
        for row, values in enumerate(target.unbind() if target.dim() > 1 else [target]):
            for begin in range(0, len(values), _PIECE):
                piece = values[begin : begin + _PIECE]
                place = row * length + first + begin
                piece.copy_(self.read(name, place, place + len(piece)))

    def _elements(self, part: _Part, first: int, count: int) -> torch.Tensor:
        """Returns `count` elements of the flattened `part` from `first` on."""
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
                found="fewer bytes than its tensors have",
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
