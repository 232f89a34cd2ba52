"""Files -> rows, each with its file and line, whatever the format. Files are read as a stream: a row, or a piece of a text, at a time.

One file is one document where it is plain text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.runtime.data import csv_rows, json_rows, tables
from megatrain.runtime.data.sources import COMPRESSIONS, Source
from megatrain.runtime.data.streams import opened
from megatrain.simulator.errors import UserError

_PIECE_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table, or a piece of a text file."""

    file: Path
    line: int
    """from 1: of a JSONL or text file, or the number of the row"""
    value: dict[str, Any] | bytes
    """a row's columns, or UTF-8 text"""
    closes: bool = True
    """False for a piece of a text that the next row continues"""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    file: Path
    line: int
    reason: str
    layout: str = ""
    """that its columns have, where it is not that of the first rows"""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


def rows(source: Source, columns: tuple[str, ...] | None = None) -> Iterator[Row | BadRow]:
    """Every row of every file, in order. Other columns than `columns` are not read where a file's format allows it, and need not be sound.

    Raises UserError for a broken file.
    """
    for file in source.files:
        try:
            if source.kind == "text":
                yield from _text(file)
            else:
                for line, value in _table(source, file, columns):
                    yield BadRow(file, line, value) if isinstance(value, str) else Row(file, line, value)
        except OSError as error:
            found, allowed, fix = (error.strerror or str(error)).lower(), "a readable file", "check the path and its permissions"
            if error.errno is None and (codec := COMPRESSIONS.get(file.suffix.lower())):
                allowed, fix = f"a whole {codec} file", "compress it again"
            raise UserError(f"data {file}", found=found, allowed=allowed, fix=fix) from None


def _table(source: Source, file: Path, columns: tuple[str, ...] | None) -> Iterable[tuple[int, dict[str, Any] | str]]:
    """The rows of one file of a table by their lines or numbers, or why they cannot be used."""
    if source.kind in ("jsonl", "json"):
        return json_rows.read(file, columns)
    if source.kind == "csv":
        return csv_rows.read(file)
    assert source.kind in ("parquet", "arrow")
    return enumerate(tables.read(file, source.kind, columns), 1)


def _text(file: Path) -> Iterator[Row | BadRow]:
    """The file in pieces of about a MiB that end between characters."""
    line = _first_invalid_line(file)
    if line:
        yield BadRow(file, line, "invalid UTF-8")
        return
    with opened(file) as stream:
        number, kept = 1, b""
        while data := stream.read(_PIECE_BYTES):
            kept += data
            end = len(kept) - 1
            while end and kept[end] & 0xC0 == 0x80:
                end -= 1
            yield Row(file, number, kept[:end], closes=False)
            number, kept = number + kept.count(b"\n", 0, end), kept[end:]
        yield Row(file, number, kept)


def _first_invalid_line(file: Path) -> int:
    """0 where the whole file is UTF-8."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with opened(file) as stream:
        while True:
            data = stream.read(_PIECE_BYTES)
            try:
                decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                return line + error.object.count(b"\n", 0, error.start)
            if not data:
                return 0
            line += data.count(b"\n")
