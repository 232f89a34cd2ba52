"""Reads rows from CSV and TSV files. The first line names the columns, and values are strings.

Columns are separated by commas, or in a .tsv file by tabs. If the header is a single column that
another of `SEPARATORS` divides, the file is read with this separator.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatrain.runtime.data.rows.sources import suffix_of
from megatrain.runtime.data.rows.streams import LONGEST_LINE_BYTES, opened
from megatrain.simulator.base.errors import UserError

SEPARATORS = (",", "\t", ";", "|")
"""The separators of columns that are recognized, in the order in which they are tried."""


def other_separator(file: Path) -> str:
    """Returns the separator in the header of `file`, or an empty text if it is the usual one.

    `csv.Sniffer` is not used, because it also finds separators in the quotes of a single column.
    Raises OSError if the file cannot be read.
    """
    csv.field_size_limit(LONGEST_LINE_BYTES)  # csv has only this limit, for the whole process
    for separator in (_usual(file), *SEPARATORS):
        with opened(file) as stream:
            reader = csv.reader(_lines(stream), delimiter=separator, strict=True)
            try:
                header = next(filter(None, reader), [])
            except csv.Error:
                continue
        if len(header) > 1:
            return separator if separator != _usual(file) else ""
    return ""


def _usual(file: Path) -> str:
    return "\t" if suffix_of(file) == ".tsv" else ","


def read(file: Path) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yields the number of the line at which each row begins, from 1, and the row.

    Instead of a bad row, a string with the reason is yielded. Raises UserError for a header that is
    not valid CSV in UTF-8, and OSError if the file cannot be read.
    """
    separator = other_separator(file) or _usual(file)
    with opened(file) as stream:
        reader = csv.reader(_lines(stream), delimiter=separator, strict=True)
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                values = next(reader)
                "".join(values).encode()
            except StopIteration:
                return
            except (csv.Error, UnicodeEncodeError) as error:
                reason = (
                    f"invalid CSV: {error}" if isinstance(error, csv.Error) else "invalid UTF-8"
                )
                if header is None:
                    raise UserError(
                        f"data {file}",
                        found=f"{reason} in the header",
                        allowed="CSV in UTF-8",
                        fix="write the file again"
                        if isinstance(error, csv.Error)
                        else "convert it to UTF-8",
                    ) from None
                yield line, reason
                continue
            if not values:
                continue
            if header is None:
                header = values
            elif len(values) != len(header):
                yield line, f"{len(values)} fields, where the header has {len(header)}"
            else:
                yield line, dict(zip(header, values, strict=True))


def _lines(stream: BinaryIO) -> Iterator[str]:
    """Yields lines. Bytes that are not UTF-8 become surrogates, which valid text cannot contain."""
    first = True
    while line := stream.readline(LONGEST_LINE_BYTES):
        yield line.decode("utf-8-sig" if first else "utf-8", errors="surrogateescape")
        first = False
