"""The error for a damaged file. This module does not import PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatrain.simulator.base.errors import UserError


class MalformedFile(UserError):
    """A file is truncated, altered, or has another format."""


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Raises MalformedFile instead of an OSError of the block. `path` is the file that it reads."""
    try:
        yield
    except OSError as error:
        raise MalformedFile(
            str(path),
            found=(error.strerror or str(error)).lower(),
            allowed="a readable file",
            fix="use another checkpoint",
        ) from None
