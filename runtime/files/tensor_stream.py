"""Tensors to and from safetensors files in bounded pieces: from the memory where they lie to the file, and back, with no copy of either in between.

A checksum (xxh3, 128 bits) is taken of the whole file as it passes: 23 GB/s on one core, where blake2b makes 0.6 and sha256 1.4 (measured on the
machine of the test suite), so that the disk decides the speed. It finds accidents, not forgery: who can write a checkpoint can write its checksum.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from megatrain.runtime.files.tensor_file import MalformedFile, make_header, read_entries

PIECE_BYTES = 2**25
"""what is under way at one time: 32 MiB take 1.3 ms over PCIe 5, and a disk needs no larger writes"""


class Source(NamedTuple):
    """A tensor to be written, that need not exist as a whole."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[torch.Tensor]]
    """its elements in order, flat, on any device"""

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Source:
        """A contiguous tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), lambda: iter((tensor,)))


def write_tensors(path: Path, tensors: Mapping[str, Source]) -> tuple[int, str]:
    """Writes `tensors` to a new file and syncs it; its size in bytes and its checksum. Raises OSError."""
    checksum, staging = xxhash.xxh3_128(), _Staging()
    with path.open("xb") as file:
        header = make_header({name: (source.dtype, source.shape) for name, source in tensors.items()})
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
        assert size == len(header) + sum(source.bytes for source in tensors.values()), "a tensor's pieces are not its elements"
        _forget(file.fileno())
    return size, checksum.hexdigest()


def read_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Fills `tensors` from the file, which holds exactly these, in this order; its checksum.

    Raises MalformedFile for another file, before a byte of `tensors` is written, and where it shrinks while it is read.
    """
    entries = read_entries(path)
    expected = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    found = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    if list(found.items()) != list(expected.items()):
        differs = next((name for name in (*expected, *found) if found.get(name) != expected.get(name)), "their order")
        raise MalformedFile(
            f"{path}: {differs}", found=found.get(differs, "no such tensor"), allowed=expected.get(differs, f"{', '.join(expected)}, in this order"),
            fix="use a checkpoint of this run",
        )  # fmt: skip
    checksum, staging = xxhash.xxh3_128(), _Staging()
    with path.open("rb", buffering=0) as file:
        start = next((entry.start for entry in entries.values()), os.fstat(file.fileno()).st_size)
        checksum.update(file.read(start))
        for tensor in tensors.values():
            for piece in _pieces(tensor):
                view = staging.view(piece)
                if not _fill(file.fileno(), view):
                    raise MalformedFile(str(path), found="an end before the last tensor's", allowed="a file that stays as it is", fix="read it again")
                checksum.update(view)
                staging.send(piece)
        _forget(file.fileno())
    return checksum.hexdigest()


def checksum_of(path: Path) -> str:
    """Of a file's bytes. Raises OSError."""
    checksum, buffer = xxhash.xxh3_128(), memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum.update(buffer[:count])
        _forget(file.fileno())
    return checksum.hexdigest()


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from tensor.view(-1).view(torch.uint8).split(PIECE_BYTES)


def _fill(handle: int, view: memoryview) -> bool:
    """Reads until `view` is full; False where the file ends first."""
    while view:
        count = os.readv(handle, [view])
        if not count:
            return False
        view = view[count:]
    return True


def _forget(handle: int) -> None:
    """The system need not cache the file: arenas take nearly all of the host's memory."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def _bytes_of(host: torch.Tensor) -> memoryview:
    array: Any = host.numpy()
    return memoryview(array)


class _Staging:
    """The bytes of a piece, for the system's calls: itself where it is in host memory, else one buffer of a piece's size."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def view(self, piece: torch.Tensor) -> memoryview:
        """Host memory of the piece's size."""
        return _bytes_of(self._host(piece))

    def fetch(self, piece: torch.Tensor) -> memoryview:
        """`view`, with the piece's bytes in it."""
        host = self._host(piece)
        if host is not piece:
            host.copy_(piece)
        return _bytes_of(host)

    def send(self, piece: torch.Tensor) -> None:
        """Writes what is in `view` into the piece."""
        host = self._host(piece)
        if host is not piece:
            piece.copy_(host)

    def _host(self, piece: torch.Tensor) -> torch.Tensor:
        if piece.device.type == "cpu":
            return piece
        if self._buffer is None:
            self._buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=piece.device.type == "cuda")
        return self._buffer[: piece.numel()]
