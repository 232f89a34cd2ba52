"""The kernel `flash4` as a parameter of tests on a GPU that are skipped without it."""

from __future__ import annotations

import pytest
import torch

from megatrain.runtime.layers import flash4

_DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLASH4 = pytest.param(
    "flash4",
    marks=pytest.mark.skipif(
        flash4.missing(_DEVICE) is not None,
        reason=f"needs {flash4.PACKAGE} and a GPU that has its kernels",
    ),
)
