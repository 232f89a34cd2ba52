"""Row files: JSON lines, appended as they are found, so that what is interrupted can go on. A last line that was cut off is dropped."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from megatrain.simulator.errors import UserError

T = TypeVar("T", bound=msgspec.Struct)


def parse_rows(text: bytes, kind: type[T], where: str) -> tuple[list[T], int]:
    """The rows in a file's content, and how many of its bytes are whole lines. Raises UserError for a whole line that is no `kind`."""
    whole = text.rfind(b"\n") + 1
    decoder, rows = msgspec.json.Decoder(kind), list[T]()
    for number, line in enumerate(text[:whole].splitlines(), 1):
        place = f"{where}, line {number}"
        try:
            rows.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            raise UserError(place, found=f"no row: {error}", allowed="rows that this command wrote", fix="remove the line, or name another --out") from None
        except UserError as error:  # a knob out of its range, say
            raise error.inside(place) from None
    return rows, whole


def write_rows(file: BinaryIO, rows: Iterable[msgspec.Struct]) -> None:
    """Whole lines at a time."""
    file.write(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    file.flush()


def append_row(path: Path, row: msgspec.Struct) -> None:
    """After the whole lines of a file, which may be a new one; what is left of a line that was cut off goes. Written through to the disk: a machine that is
    taken away leaves the rows before it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        write_rows(file, [row])
        os.fsync(file.fileno())
