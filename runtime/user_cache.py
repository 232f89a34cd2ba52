"""The user's cache folder of megatrain, for tokens, calibrations and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Returns `$MEGATRAIN_CACHE`, or `$XDG_CACHE_HOME/megatrain`, or `~/.cache/megatrain`.

    Everything in it can be made again, so its files may be deleted at any time.
    """
    if named := os.environ.get("MEGATRAIN_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatrain"
