"""Public packages that tests compare with.

`.ci/make-venv` puts some of them into the folder `public` of the virtual environment, which is not
on Python's path: transformers imports torchao in every process that can find it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest


def public(*modules: str) -> list[Any]:
    """Returns modules of public packages. Skips the test if one of them cannot be imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(sys.prefix, "public"))
        return [pytest.importorskip(name, exc_type=ImportError) for name in modules]
