"""The cache folder of the user, for tokens, calibrations and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Returns `$MEGATRAIN_CACHE`, or `$XDG_CACHE_HOME/megatrain`, or `~/.cache/megatrain`.

    Its files may be deleted at any time, because all of them can be made again.
    """
    if named := os.environ.get("MEGATRAIN_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain"
