"""CSV and TSV -> rows: the first line names the columns, and every value is text."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatrain.runtime.data.sources import suffix_of
from megatrain.runtime.data.streams import LONGEST_LINE_BYTES, opened
from megatrain.simulator.errors import UserError


def read(file: Path) -> Iterator[tuple[int, dict[str, str] | str]]:
    """The line at which each row begins, from 1, and the row, or why it cannot be used. Raises UserError for a header that is not UTF-8,
    OSError for a file that cannot be read.
    """
    csv.field_size_limit(LONGEST_LINE_BYTES)  # of the whole process: the csv module has no other
    with opened(file) as stream:
        reader = csv.reader(_lines(stream), delimiter="\t" if suffix_of(file) == ".tsv" else ",", strict=True)
        header: list[str] | None = None
        while True:
            line = reader.line_num + 1
            try:
                values = next(reader)
                "".join(values).encode()
            except StopIteration:
                return
            except (csv.Error, UnicodeEncodeError) as error:
                reason = f"invalid CSV: {error}" if isinstance(error, csv.Error) else "invalid UTF-8"
                if header is None:
                    raise UserError(f"data {file}", found=f"{reason} in the header", allowed="CSV in UTF-8", fix="write the file again") from None
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
    """What is not UTF-8 is marked by surrogates: no text in UTF-8 has any."""
    first = True
    while line := stream.readline(LONGEST_LINE_BYTES):
        yield line.decode("utf-8-sig" if first else "utf-8", errors="surrogateescape")
        first = False
