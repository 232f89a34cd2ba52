"""Reads rows from files of any supported format, with the file and the line of each row.

Files are read as a stream, one row or one piece of text at a time. A plain text file is one
document.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.runtime.data.rows import csv_rows, json_rows, tables
from megatrain.runtime.data.rows.sources import COMPRESSIONS, DataSource
from megatrain.runtime.data.rows.streams import opened
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import printable

_PIECE_BYTES = 2**20
"""The size of a piece of a text file."""
_SHOWN = 5
"""The maximum number of kinds of bad rows that are shown."""
_KINDS = 1000
"""The maximum number of kinds of bad rows that are kept."""
_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")
"""Parts of a reason in which rows of the same kind differ."""


@dataclass(frozen=True, slots=True)
class TextRow:
    """One row of a table, or a piece of a text file."""

    file: Path
    """The file of the row."""
    line: int
    """The line in a JSONL, CSV or text file, or the number of the row in other files, from 1."""
    value: dict[str, Any] | bytes
    """The row's columns, or UTF-8 text."""
    closes: bool = True
    """Whether the document ends with this row. False if the next row continues the text."""


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used."""

    file: Path
    """The file of the row."""
    line: int
    """The line or the number of the row, from 1 (`TextRow.line`)."""
    reason: str
    """The reason why the row cannot be used."""
    layout: str = ""
    """The layout that the row's columns match, if the first rows have another. Otherwise empty."""

    def __str__(self) -> str:
        return f"{printable(self.file)}:{self.line}: {self.reason}"


class BadRows:
    """Counts bad rows, and keeps one example for each kind of reason.

    Reasons that differ only in numbers and in quoted text are the same kind.
    """

    def __init__(self) -> None:
        self.count = 0
        """Number of bad rows."""
        self._kinds: dict[str, tuple[str, int]] = {}
        """Kind of reason -> the first row of this kind, and the number of rows of this kind."""

    def add(self, row: BadRow) -> None:
        """Counts a bad row. Only the first 1,000 kinds keep an example."""
        self.count += 1
        kind = _VARIES.sub("", row.reason)
        if kind in self._kinds or len(self._kinds) < _KINDS:
            first, count = self._kinds.get(kind, (str(row), 0))
            self._kinds[kind] = (first, count + 1)

    @property
    def shown(self) -> tuple[tuple[str, int], ...]:
        """For each of the first 5 kinds, the first row and the number of rows."""
        return tuple(self._kinds.values())[:_SHOWN]


def encoding_fix(reason: str) -> str:
    """Returns the fix for a row that was left out for `reason`, if its bytes are not UTF-8.
    Otherwise, returns an empty text.
    """
    return "convert it to UTF-8" if reason.endswith(("invalid UTF-8", "not UTF-8")) else ""


def describe_bad_rows(count: int, shown: tuple[tuple[str, int], ...]) -> str:
    """Returns a line that describes `count` bad rows, with the examples `shown`."""
    kinds = [
        f"{row}{f' (and {number - 1:,} more like it)' if number > 1 else ''}"
        for row, number in shown
    ]
    fix = next(filter(None, (encoding_fix(row) for row, _ in shown)), "")
    others = count - sum(number for _, number in shown)
    kinds += [f"{others:,} for other reasons"] if others else []
    return (
        f"{count:,} bad row{'' if count == 1 else 's'} left out, the first of each kind:"
        f" {'; '.join(kinds)}{fix and f'; fix: {fix}'}"
    )


def rows(source: DataSource, columns: tuple[str, ...] | None = None) -> Iterator[TextRow | BadRow]:
    """Yields every row of every file, in order.

    If `columns` is given and the format allows it, only these columns are read, and the others need
    not be valid. Raises UserError for a file that is damaged or cannot be read.
    """
    for file in source.files:
        with _refusing(file):
            if source.kind == "text":
                yield from _text(file)
            else:
                for line, value in _table(source, file, columns):
                    yield (
                        BadRow(file, line, value)
                        if isinstance(value, str)
                        else TextRow(file, line, value)
                    )


def other_separators(source: DataSource) -> list[str]:
    """Returns the separators of columns in CSV files that are not the usual ones, which are commas,
    and tabs in .tsv files.

    Raises UserError for a file that cannot be read.
    """
    found = set()
    for file in source.files if source.kind == "csv" else ():
        with _refusing(file):
            found.add(csv_rows.other_separator(file))
    return sorted(found - {""})


@contextlib.contextmanager
def _refusing(file: Path) -> Iterator[None]:
    """Makes an OSError from the block a UserError that names `file`."""
    try:
        yield
    except OSError as error:
        found, allowed, fix = (
            (error.strerror or str(error)).lower(),
            "a readable file",
            "check the path and its permissions",
        )
        if error.errno is None and (codec := COMPRESSIONS.get(file.suffix.lower())):
            allowed, fix = f"a complete {codec} file", "compress it again"
        raise UserError(f"data {file}", found=found, allowed=allowed, fix=fix) from None


def _table(
    source: DataSource, file: Path, columns: tuple[str, ...] | None
) -> Iterable[tuple[int, dict[str, Any] | str]]:
    """Returns the line or the number of each row of a table, and the row. A string instead of a row
    is the reason why the row is bad.
    """
    if source.kind in ("jsonl", "json"):
        return json_rows.read(file, columns)
    if source.kind == "csv":
        return csv_rows.read(file)
    assert source.kind in ("parquet", "arrow")
    return enumerate(tables.read(file, source.kind, columns), 1)


def _text(file: Path) -> Iterator[TextRow | BadRow]:
    """Yields a text file in pieces of about 1 MiB, which end between two characters.

    A byte order mark at the beginning is not part of the text.
    """
    line = _first_invalid_line(file)
    if line:
        yield BadRow(file, line, "invalid UTF-8")
        return
    with opened(file) as stream:
        number, kept = 1, stream.read(len(codecs.BOM_UTF8)).removeprefix(codecs.BOM_UTF8)
        while data := stream.read(_PIECE_BYTES):
            kept += data
            end = len(kept) - 1
            while end and kept[end] & 0xC0 == 0x80:
                end -= 1
            yield TextRow(file, number, kept[:end], closes=False)
            number, kept = number + kept.count(b"\n", 0, end), kept[end:]
        yield TextRow(file, number, kept)


def _first_invalid_line(file: Path) -> int:
    """Returns the number of the first line that is not UTF-8, or 0 if there is none."""
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
