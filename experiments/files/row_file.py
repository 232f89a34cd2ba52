"""Files of JSON lines to which a long job appends its results. The job can then be continued.

If the job was interrupted while it wrote the last line, this line is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from megatrain.simulator.base.errors import UserError

T = TypeVar("T", bound=msgspec.Struct)


def parse_rows(text: bytes, kind: type[T], where: str) -> tuple[list[T], int]:
    """Returns the rows of type `kind` in the content `text` of a file, and the number of bytes of
    its complete lines.

    Raises UserError for a complete line that is not a `kind`. `where` names the file in the error.
    """
    whole = text.rfind(b"\n") + 1
    decoder, rows = msgspec.json.Decoder(kind), list[T]()
    for number, line in enumerate(text[:whole].splitlines(), 1):
        place = f"{where}, line {number}"
        try:
            rows.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise UserError(
                place,
                found=f"no row: {error}",
                allowed="rows that this command wrote",
                fix="remove the line, or choose another --out",
            ) from None
        except UserError as error:  # for example a knob out of its range
            raise error.inside(place) from None
    return rows, whole


def write_rows(file: BinaryIO, rows: Iterable[msgspec.Struct]) -> None:
    """Writes each row as one line of JSON, all of them in a single write."""
    file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    file.flush()


def append_row(path: Path, row: msgspec.Struct) -> None:
    """Appends `row` to the file `path`, which is created if it does not exist.

    An incomplete last line is removed first. The row is synced to disk, so it is not lost with the
    process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        write_rows(file, [row])
        os.fsync(file.fileno())
