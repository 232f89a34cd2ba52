"""The error for a damaged file. This module loads no PyTorch."""

from __future__ import annotations

from megatrain.simulator.base.errors import UserError


class MalformedFile(UserError):
    """The error for a file that is truncated, altered, or of another format."""
