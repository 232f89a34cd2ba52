"""Opens a file as a stream of bytes, decompressed if its name has the ending of a compression."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatrain.runtime.data.rows.sources import COMPRESSIONS

LONGEST_LINE_BYTES = 2**28
"""The maximum size of a line, a CSV field or a JSON value. A larger one is not read."""


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Yields the file as a stream.

    Raises OSError if the file cannot be read. If compressed data is damaged, the error has no
    `errno`, and reading the stream can raise it later.
    """
    codec = COMPRESSIONS.get(file.suffix.lower())
    with file.open("rb") as stream:
        if codec is None:
            yield stream
            return
        import pyarrow

        with io.BufferedReader(pyarrow.CompressedInputStream(stream, codec), 2**16) as inflated:
            yield inflated
