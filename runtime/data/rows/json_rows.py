"""Reads rows from JSON files: one object per line, or one array of objects.

An array is also read as a stream, one element at a time.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from megatrain.runtime.data.rows.sources import suffix_of
from megatrain.runtime.data.rows.streams import LONGEST_LINE_BYTES, opened
from megatrain.simulator.base.errors import UserError

_CHUNK = 2**16
"""The least number of characters that are read at a time from an array."""
_BLANKS = " \t\r\n"

Columns = tuple[str, ...] | None
"""The columns to read, or None for all."""
Numbered = tuple[int, dict[str, Any] | str]
"""The number of a line or an element, from 1, and the row or a string with the reason why the row
cannot be used."""


def read(file: Path, columns: Columns) -> Iterator[Numbered]:
    """Yields the rows of `file`. The values of other columns than `columns` are not checked.

    Raises UserError for an array that is not valid JSON, and OSError if the file cannot be read.
    """
    with opened(file) as stream:
        if suffix_of(file) == ".json" and _begins_an_array(file):
            yield from _array(stream, columns, file)
        else:
            yield from _lines(stream, columns)


def _begins_an_array(file: Path) -> bool:
    with opened(file) as stream:
        return stream.read(_CHUNK).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _lines(stream: BinaryIO, columns: Columns) -> Iterator[Numbered]:
    """Yields one row for each line that is not blank."""
    decoder = msgspec.json.Decoder()
    number = 0
    while line := stream.readline(LONGEST_LINE_BYTES):
        number += 1
        if len(line) == LONGEST_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(LONGEST_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, f"a line of more than {LONGEST_LINE_BYTES} bytes"
            continue
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            value = _object(decoder.decode(line))
        except UnicodeDecodeError:
            value = "invalid UTF-8"
        except RecursionError:
            value = "JSON nested too deeply"
        except msgspec.DecodeError as error:
            value = _leniently(line, columns, str(error))
        line = b""  # frees the text while the row is in use
        yield number, value


def _leniently(line: bytes, columns: Columns, reason: str) -> dict[str, Any] | str:
    """Returns the row of a line that msgspec rejected for `reason`, read with Python's json.

    Python's json also accepts NaN, Infinity and unpaired surrogates. They are allowed in other
    columns than `columns`.
    """
    if b"\0" in line[:4]:  # UTF-16, because JSON in UTF-8 does not begin with such a byte
        return "text in UTF-16, not UTF-8"
    try:
        return _checked(json.loads(line.decode()), columns)
    except UnicodeDecodeError:
        return "invalid UTF-8"
    except (ValueError, RecursionError):
        return f"invalid JSON: {reason}"


def _checked(value: object, columns: Columns) -> dict[str, Any] | str:
    """Returns the `columns` of a row, or the reason why they are not valid JSON."""
    row = _object(value)
    if isinstance(row, str) or columns is None:
        return row
    row = {name: row[name] for name in columns if name in row}
    try:
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "invalid JSON: half of a surrogate pair"
    except ValueError:
        return "invalid JSON: a number that is not finite"
    return row


def _object(value: object) -> dict[str, Any] | str:
    """Returns `value` if it is an object, otherwise the reason why it is not a row."""
    if isinstance(value, dict):
        return value
    kinds = {list: "a list", str: "a string", type(None): "null", bool: "a boolean"}
    return f"{kinds.get(type(value), 'a number')}, not an object"


def _array(stream: BinaryIO, columns: Columns, file: Path) -> Iterator[Numbered]:
    """Yields the elements of the array in `stream`."""
    text = _Text(stream, file)
    text.take("[")
    number = 0
    if text.next() != "]":
        while True:
            number += 1
            yield number, _checked(text.value(number), columns)
            if text.next() != ",":
                break
            text.take(",")
    text.take("]")
    if text.next():
        raise text.broken("text after the end of the array")


class _Text:
    """A JSON text that is read from a stream and decoded value by value."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self._reader, self._file = codecs.getreader("utf-8-sig")(stream), file
        self._decoder = json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False

    def broken(self, found: str, fix: str = "write the file again") -> UserError:
        """Returns the error for an invalid file, in which `found` was found."""
        return UserError(
            f"data {self._file}",
            found=found,
            allowed="one array of objects, or one object per line",
            fix=fix,
        )

    def next(self) -> str:
        """Returns the next character that is not white space, or an empty string at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANKS:
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more()

    def take(self, character: str) -> None:
        """Skips `character`. Raises UserError if another one comes next."""
        if self.next() != character:
            raise self.broken(f"invalid JSON: {character!r} is missing")
        self._at += 1

    def value(self, number: int) -> Any:
        """Returns the value that begins here, which is element `number` of the array.

        At least one character after the value is read, because `12` may be the beginning of `123`.
        Raises UserError if the value is not valid JSON.
        """
        self.next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError:
                raise self.broken(f"JSON nested too deeply, in element {number}") from None
            except ValueError as error:
                if self._ended or len(self._text) - self._at > LONGEST_LINE_BYTES:
                    raise self.broken(
                        f"invalid JSON in element {number}: {getattr(error, 'msg', error)}"
                    ) from None
            else:
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._more()

    def _more(self) -> None:
        """Reads more text. It doubles the text that is not decoded, so a long element is parsed
        only a few times.
        """
        rest = self._text[self._at :]
        try:
            more = self._reader.read(size := max(_CHUNK, len(rest)), size)
        except UnicodeDecodeError:
            raise self.broken("invalid UTF-8", "convert it to UTF-8") from None
        self._text, self._at, self._ended = rest + more, 0, not more
