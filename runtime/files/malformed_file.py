"""The error for a damaged file. This module loads no PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatrain.simulator.base.errors import UserError


class MalformedFile(UserError):
    """The error for a file that is truncated, altered, or of another format."""


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turns an OSError of the block, which reads a file of a checkpoint, into a MalformedFile."""
    try:
        yield
    except OSError as error:
        raise MalformedFile(
            str(path),
            found=(error.strerror or str(error)).lower(),
            allowed="a readable file",
            fix="use another checkpoint",
        ) from None
