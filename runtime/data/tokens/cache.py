"""Stores tokenized documents in a file, which is verified and memory-mapped when it is loaded.

The parts of the file, in order:

* the tokens, padded to a multiple of 8 bytes
* the offsets of documents, int64 [documents + 1]
* `_Stored` as JSON, which includes the CRC-32 of the parts before it
* the length and the CRC-32 of this JSON, and MAGIC

A file is written under a temporary name, synced and renamed. A file with a wrong checksum is
ignored.
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
from megatrain.simulator.base.atomic_files import AtomicWrite
from megatrain.simulator.base.errors import UserError

MAGIC = b"MGTRTOK1"
_FOOT = struct.Struct("<QI8s")
_CHUNK_BYTES = 2**24


class TokenSummary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the rows of a source, stored with its tokens."""

    layout: str
    """The layout of the rows, and which tokens have loss, as a phrase for the user."""
    flagged: bool
    """Whether tokens are flagged (`Documents.flagged`)."""
    whole: bool
    """Whether documents are kept whole (`Documents.whole`)."""
    largest_id: int
    """The largest token id."""
    rows: int
    """Number of rows that were read, including bad ones."""
    bad: int
    """Number of bad rows."""
    shown: tuple[tuple[str, int], ...]
    """For each of the first 5 kinds of bad rows, the first row and the number of rows."""
    empty: int
    """Number of rows whose text is empty."""
    templated: bool
    """Whether rows were rendered by a chat template."""
    elsewhere: dict[str, int] = {}
    """Layout -> the number of bad rows whose columns match it, while the first rows have another
    layout."""


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The metadata at the end of a file of the cache."""

    key: str
    """The key under which the file was stored."""
    dtype: str
    """Name of the dtype of tokens."""
    tokens: int
    """Number of tokens."""
    documents: int
    """Number of documents."""
    crc: int
    """CRC-32 of tokens, padding and offsets."""
    summary: TokenSummary
    """Facts about the rows."""


class CacheWriter:
    """Writes documents piece by piece to a file of the cache.

    It is a context manager. `finish` makes the file available to `load`. If the context ends
    before that, the file is removed.
    """

    def __init__(self, folder: Path, key: str, dtype: np.dtype) -> None:
        """Creates a file in `folder` for `key`, with tokens of dtype `dtype`.

        Raises UserError if `folder` cannot be written.
        """
        self._path, self._key, self._dtype = _path(folder, key), key, dtype
        self._offsets, self._tokens, self._crc = array("q", [0]), 0, 0
        try:
            self._aside = AtomicWrite(self._path)
        except OSError as error:
            raise _unwritable(folder, error) from None
        self._file: IO[bytes] = self._aside.path.open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._aside.__exit__(kind, error, trace)
        try:
            self._file.close()  # can fail, because it may write the rest of the buffer
        except OSError:
            if kind is None:
                raise

    @property
    def documents(self) -> int:
        """The number of documents that were closed."""
        return len(self._offsets) - 1

    def add(self, tokens: np.ndarray, *, closes: bool) -> None:
        """Appends `tokens` to the open document, and closes it if `closes` is set.

        A document without tokens is dropped. Raises UserError if the disk is full.
        """
        self._write(tokens.astype(self._dtype).tobytes())
        self._tokens += len(tokens)
        if closes and self._tokens > self._offsets[-1]:
            self._offsets.append(self._tokens)

    def finish(self, summary: TokenSummary) -> None:
        """Writes the offsets and `summary`, and moves the file to its place in the cache.

        Raises UserError if the disk is full.
        """
        assert self._offsets[-1] == self._tokens, "a document is still open"
        self._write(bytes(-self._tokens * self._dtype.itemsize % 8) + self._offsets.tobytes())
        stored = _Stored(
            key=self._key,
            dtype=self._dtype.name,
            tokens=self._tokens,
            documents=self.documents,
            crc=self._crc,
            summary=summary,
        )
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


def load(folder: Path, key: str) -> tuple[Documents, TokenSummary] | None:
    """Returns the documents that are stored under `key`, with memory-mapped tokens, and their
    summary.

    Returns None if there is no such file, or if it is damaged.
    """
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
    digest = f"{stored.crc:08x}-{stored.tokens}"  # the CRC includes the offsets of documents
    summary = stored.summary
    documents = Documents(
        tokens=tokens,
        begins=offsets[:-1],
        ends=offsets[1:],
        flagged=summary.flagged,
        whole=summary.whole,
        digest=digest,
    )
    return documents, summary


def _stored(file: IO[bytes], key: str) -> _Stored | None:
    """Returns the metadata of a file, or None if the file is damaged or has another key."""
    size = file.seek(0, os.SEEK_END)
    file.seek(size - _FOOT.size)
    length, text_crc, magic = _FOOT.unpack(file.read(_FOOT.size))
    file.seek(size - _FOOT.size - length)
    text = file.read(length)
    if magic != MAGIC or zlib.crc32(text) != text_crc:
        return None
    stored = msgspec.json.decode(text, type=_Stored)
    left = size - _FOOT.size - length
    if stored.key != key or left != _aligned(
        stored.tokens * np.dtype(stored.dtype).itemsize
    ) + 8 * (stored.documents + 1):
        return None
    file.seek(0)
    crc = 0
    while data := file.read(min(_CHUNK_BYTES, left)):
        crc, left = zlib.crc32(data, crc), left - len(data)
    return stored if crc == stored.crc else None


def _path(folder: Path, key: str) -> Path:
    return folder / f"{key}.tokens"


def _aligned(size: int) -> int:
    """Returns `size` rounded up to a multiple of 8."""
    return size + -size % 8


def _unwritable(path: Path, error: OSError) -> UserError:
    """Returns the error for a file of the cache that cannot be written."""
    return UserError(
        f"cache {path}",
        found=str(error.strerror).lower(),
        allowed="a writable folder with enough free space",
        fix="choose another folder with --data-cache",
    )
