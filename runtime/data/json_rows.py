"""JSON -> rows: an object a line, or one array of objects. Arrays are read as a stream too: an element at a time."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from megatrain.runtime.data.sources import suffix_of
from megatrain.runtime.data.streams import LONGEST_LINE_BYTES, opened
from megatrain.simulator.errors import UserError

_CHUNK = 2**16
_BLANKS = " \t\r\n"

Columns = tuple[str, ...] | None
Numbered = tuple[int, dict[str, Any] | str]
"""the number of a line or an element, from 1, and a row or why it cannot be used"""


def read(file: Path, columns: Columns) -> Iterator[Numbered]:
    """The rows of `file`. What other columns than `columns` hold does not matter. Raises UserError for a broken array, OSError for a file that cannot be read."""
    with opened(file) as stream:
        if suffix_of(file) == ".json" and _begins_an_array(file):
            yield from _array(stream, columns, file)
        else:
            yield from _lines(stream, columns)


def _begins_an_array(file: Path) -> bool:
    with opened(file) as stream:
        return stream.read(_CHUNK).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _lines(stream: BinaryIO, columns: Columns) -> Iterator[Numbered]:
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
        line = b""  # whoever takes the row need not hold it twice
        yield number, value


def _leniently(line: bytes, columns: Columns, reason: str) -> dict[str, Any] | str:
    """What Python's own reader makes of a line that is no JSON for `reason`: NaN, Infinity and halves of surrogate pairs are accepted."""
    try:
        return _checked(json.loads(line.decode()), columns)
    except (ValueError, RecursionError):
        return f"invalid JSON: {reason}"


def _checked(value: object, columns: Columns) -> dict[str, Any] | str:
    """The `columns` of a row, which must be proper JSON; all others need not be."""
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
    if isinstance(value, dict):
        return value
    return f"{ {list: 'a list', str: 'a string', type(None): 'null', bool: 'a boolean'}.get(type(value), 'a number') }, not an object"


def _array(stream: BinaryIO, columns: Columns, file: Path) -> Iterator[Numbered]:
    """The elements of the array that `stream` holds."""
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
        raise text.broken("something after the array's end")


class _Text:
    """The part of a JSON text that has been read and not been decoded yet."""

    def __init__(self, stream: BinaryIO, file: Path) -> None:
        self._reader, self._file = codecs.getreader("utf-8-sig")(stream), file
        self._decoder = json.JSONDecoder()
        self._text, self._at, self._ended = "", 0, False

    def broken(self, found: str) -> UserError:
        return UserError(f"data {self._file}", found=found, allowed="one array of objects, or an object a line", fix="write the file again")

    def next(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANKS:
                self._at += 1
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._more()

    def take(self, character: str) -> None:
        if self.next() != character:
            raise self.broken(f"invalid JSON: no {character!r} where one is needed")
        self._at += 1

    def value(self, number: int) -> Any:
        """The value that begins here, element `number`. Read as far as a character after it: without, `12` may be the beginning of `123`."""
        self.next()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError:
                raise self.broken(f"JSON nested too deeply, in element {number}") from None
            except ValueError as error:
                if self._ended or len(self._text) - self._at > LONGEST_LINE_BYTES:
                    raise self.broken(f"invalid JSON in element {number}: {getattr(error, 'msg', error)}") from None
            else:
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._more()

    def _more(self) -> None:
        """At least doubles what is there, so that an element of any length is looked through a few times at most."""
        rest = self._text[self._at :]
        try:
            found = self._reader.read(size := max(_CHUNK, len(rest)), size)
        except UnicodeDecodeError:
            raise self.broken("invalid UTF-8") from None
        self._text, self._at, self._ended = rest + found, 0, not found
