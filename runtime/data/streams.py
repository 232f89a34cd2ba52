"""A file's bytes as a stream, decompressed where its name says that they are compressed."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from megatrain.runtime.data.sources import COMPRESSIONS

LONGEST_LINE_BYTES = 2**28


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Raises OSError where the file cannot be read; one without `errno` where what is compressed is damaged, then also while it is read."""
    codec = COMPRESSIONS.get(file.suffix.lower())
    with file.open("rb") as stream:
        if codec is None:
            yield stream
            return
        import pyarrow

        with io.BufferedReader(pyarrow.CompressedInputStream(stream, codec), 2**16) as inflated:
            yield inflated
