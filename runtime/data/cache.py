"""Cache: tokenised documents in one file that is mapped into memory and checked before it is believed.

tokens | padding to 8 bytes | offsets of documents, int64 [documents + 1] | Stored, as JSON | its length and CRC-32 | MAGIC. `Stored` has the CRC-32
of all that stands before it. A file is written aside, synced and renamed; one whose sums are wrong counts as none.
"""

from __future__ import annotations

import os
import struct
import zlib
from array import array
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import msgspec
import numpy as np

from megatrain.runtime.data.documents import Documents
from megatrain.simulator.aside import Aside
from megatrain.simulator.errors import UserError

MAGIC = b"MGTRTOK1"
_FOOT = struct.Struct("<QI8s")
_CHUNK_BYTES = 2**24


class Summary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is known of tokenised data besides its tokens."""

    layout: str
    """what rows were taken for, in words"""
    flagged: bool
    whole: bool
    largest_id: int
    rows: int
    """read, bad ones included"""
    bad: int
    shown: tuple[tuple[str, int], ...]
    """the first bad row of each kind, and how many are of that kind"""
    empty: int
    """rows of text without any"""
    templated: bool = False
    """whether rows went through a chat template"""
    elsewhere: dict[str, int] = {}
    """layout -> bad rows that have its columns, and not those of the first rows"""


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: str
    dtype: str
    tokens: int
    documents: int
    crc: int
    summary: Summary


class CacheWriter:
    """Takes documents piece by piece; `finish` puts the file where `load` finds it. Left without, nothing stays."""

    def __init__(self, folder: Path, key: str, dtype: np.dtype) -> None:
        """`dtype` of the stored tokens. Raises UserError where `folder` cannot be written."""
        self._path, self._key, self._dtype = _path(folder, key), key, dtype
        self._offsets, self._tokens, self._crc = array("q", [0]), 0, 0
        try:
            self._aside = Aside(self._path)
        except OSError as error:
            raise _unwritable(folder, error) from None
        self._file: IO[bytes] = self._aside.path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._aside.__exit__(kind, error, trace)
        try:
            self._file.close()  # which may write what is left in its buffer
        except OSError:
            if kind is None:
                raise

    @property
    def documents(self) -> int:
        """Closed so far."""
        return len(self._offsets) - 1

    def add(self, tokens: np.ndarray, *, closes: bool) -> None:
        """Appends `tokens` to the open document, and ends it; a document without any is none. Raises UserError where the disk is full."""
        self._write(tokens.astype(self._dtype).tobytes())
        self._tokens += len(tokens)
        if closes and self._tokens > self._offsets[-1]:
            self._offsets.append(self._tokens)

    def finish(self, summary: Summary) -> None:
        """Raises UserError where the disk is full."""
        assert self._offsets[-1] == self._tokens, "a document is still open"
        self._write(bytes(-self._tokens * self._dtype.itemsize % 8) + self._offsets.tobytes())
        stored = _Stored(key=self._key, dtype=self._dtype.name, tokens=self._tokens, documents=self.documents, crc=self._crc, summary=summary)
        text = msgspec.json.encode(stored)
        self._write(text + _FOOT.pack(len(text), zlib.crc32(text), MAGIC))
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._aside.path, self._path)
        except OSError as error:
            raise _unwritable(self._path, error) from None

    def _write(self, data: bytes) -> None:
        self._crc = zlib.crc32(data, self._crc)
        try:
            self._file.write(data)
        except OSError as error:
            raise _unwritable(self._path, error) from None


def load(folder: Path, key: str) -> tuple[Documents, Summary] | None:
    """What was stored under `key`, mapped into memory; None where there is nothing, or a damaged file."""
    path = _path(folder, key)
    try:
        with path.open("rb") as file:
            stored = _stored(file, key)
            if stored is None:
                return None
            dtype = np.dtype(stored.dtype)
            tokens = np.memmap(file, dtype=dtype, mode="r", shape=(stored.tokens,))
            file.seek(_aligned(stored.tokens * dtype.itemsize))
            offsets = np.fromfile(file, dtype=np.int64, count=stored.documents + 1)
    except (OSError, ValueError, TypeError, msgspec.MsgspecError):
        return None
    digest = f"{stored.crc:08x}-{stored.tokens}"  # over the documents' borders too
    known = stored.summary
    return Documents(tokens=tokens, begins=offsets[:-1], ends=offsets[1:], flagged=known.flagged, whole=known.whole, digest=digest), known


def _stored(file: IO[bytes], key: str) -> _Stored | None:
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _FOOT.size)
    length, text_crc, magic = _FOOT.unpack(file.read(_FOOT.size))
    file.seek(size - _FOOT.size - length)
    text = file.read(length)
    if magic != MAGIC or zlib.crc32(text) != text_crc:
        return None
    stored = msgspec.json.decode(text, type=_Stored)
    left = size - _FOOT.size - length
    if stored.key != key or left != _aligned(stored.tokens * np.dtype(stored.dtype).itemsize) + 8 * (stored.documents + 1):
        return None
    file.seek(0)
    crc = 0
    while data := file.read(min(_CHUNK_BYTES, left)):
        crc, left = zlib.crc32(data, crc), left - len(data)
    return stored if crc == stored.crc else None


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.tokens"


def _aligned(size: int) -> int:
    return size + -size % 8


def _unwritable(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cache {path}", found=str(error.strerror).lower(), allowed="a folder with room that can be written", fix="name another one as the data's cache"
    )
