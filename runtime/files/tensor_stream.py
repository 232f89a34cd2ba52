"""Writes and reads tensors of safetensors files in pieces of bounded size, without extra copies.

Also computes a checksum of the whole file (xxh3, 128 bits). One core does this at 23 GB/s
(`docs/lab_notes.md`), which is faster than disks. The checksum detects accidental damage, but not
forgery, because anyone who can write a checkpoint can also write its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.files.tensor_file import make_header, read_entries

PIECE_BYTES = 2**25
"""Size of a piece. Copying 32 MiB over PCIe 5 takes 1.3 ms, and larger writes to disk are not
faster."""


class TensorSource(NamedTuple):
    """A tensor to write to a file. It need not be in memory as a whole."""

    dtype: torch.dtype
    """Dtype of the tensor."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    pieces: Callable[[], Iterator[torch.Tensor]]
    """Yields the elements of the tensor in order, as flat tensors on any device."""

    @property
    def bytes(self) -> int:
        """Returns the size of the tensor in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSource:
        """Returns the source of a tensor. The tensor, or each of its rows, must be contiguous."""
        rows = (tensor,) if tensor.is_contiguous() else tensor.unbind()
        return cls(tensor.dtype, tuple(tensor.shape), lambda: iter(rows))


def write_tensors(path: Path, tensors: Mapping[str, TensorSource]) -> tuple[int, str]:
    """Writes `tensors` to a new file and syncs it to disk.

    Returns the size of the file in bytes and its checksum. Raises OSError if the file exists or
    cannot be written.
    """
    checksum, staging = xxhash.xxh3_128(), _Staging()
    with path.open("xb") as file:
        header = make_header(
            {name: (source.dtype, source.shape) for name, source in tensors.items()}
        )
        file.write(header)
        checksum.update(header)
        for source in tensors.values():
            for tensor in source.pieces():
                for piece in _pieces(tensor):
                    view = staging.fetch(piece)
                    file.write(view)
                    checksum.update(view)
        file.flush()
        os.fsync(file.fileno())
        size = file.tell()
        assert size == len(header) + sum(source.bytes for source in tensors.values()), (
            "a tensor's pieces are not its elements"
        )
        _drop_cache(file.fileno())
    return size, checksum.hexdigest()


def read_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Fills `tensors` from a file that contains exactly these tensors, in this order.

    Returns the checksum of the file. Raises MalformedFile if the file has other tensors, in which
    case `tensors` do not change, or if the file becomes shorter while it is read.
    """
    entries = read_entries(path)
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    if list(found.items()) != list(expected.items()):
        differs = next(
            (name for name in (*expected, *found) if found.get(name) != expected.get(name)),
            "their order",
        )
        raise MalformedFile(
            f"{path}: {differs}",
            found=found.get(differs, "no such tensor"),
            allowed=expected.get(differs, f"{', '.join(expected)}, in this order"),
            fix="use a checkpoint of this run",
        )
    checksum, staging = xxhash.xxh3_128(), _Staging()
    with path.open("rb", buffering=0) as file:
        start = next((entry.start for entry in entries.values()), os.fstat(file.fileno()).st_size)
        checksum.update(file.read(start))
        for tensor in tensors.values():
            for piece in _pieces(tensor):
                view = staging.view(piece)
                if not _fill(file.fileno(), view):
                    raise MalformedFile(
                        str(path),
                        found="fewer bytes than its tensors have",
                        allowed="a file that does not change",
                        fix="read it again",
                    )
                checksum.update(view)
                staging.send(piece)
        _drop_cache(file.fileno())
    return checksum.hexdigest()


def checksum_of(path: Path) -> str:
    """Returns the checksum of the file at `path`. Raises OSError if it cannot be read."""
    checksum, buffer = xxhash.xxh3_128(), memoryview(bytearray(2**20))
    with path.open("rb") as file:
        while count := file.readinto(buffer):
            checksum.update(buffer[:count])
        _drop_cache(file.fileno())
    return checksum.hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from tensor.view(-1).view(torch.uint8).split(PIECE_BYTES)


def _fill(handle: int, view: memoryview) -> bool:
    """Reads from a file until `view` is full. Returns False if the file ends earlier."""
    while view:
        count = os.readv(handle, [view])
        if not count:
            return False
        view = view[count:]
    return True


def _drop_cache(handle: int) -> None:
    """Removes the file from the system's cache, because arenas need nearly all host memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes_of(host: torch.Tensor) -> memoryview:
    array: Any = host.numpy()
    return memoryview(array)


class _Staging:
    """Provides host memory for the bytes of a piece: the piece itself if it is in host memory, and
    otherwise a staging buffer.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def view(self, piece: torch.Tensor) -> memoryview:
        """Returns host memory with the size of the piece."""
        return _bytes_of(self._host(piece))

    def fetch(self, piece: torch.Tensor) -> memoryview:
        """Returns `view(piece)`, filled with the bytes of the piece."""
        host = self._host(piece)
        if host is not piece:
            host.copy_(piece)
        return _bytes_of(host)

    def send(self, piece: torch.Tensor) -> None:
        """Copies the bytes in `view(piece)` to the piece."""
        host = self._host(piece)
        if host is not piece:
            piece.copy_(host)

    def _host(self, piece: torch.Tensor) -> torch.Tensor:
        if piece.device.type == "cpu":
            return piece
        if self._buffer is None:
            self._buffer = torch.empty(
                PIECE_BYTES, dtype=torch.uint8, pin_memory=piece.device.type == "cuda"
            )
        return self._buffer[: piece.numel()]
