"""Tests that the runtime binds every kind of op with typed operands, and exports its classes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import megatrain.runtime
from megatrain.simulator.schedule.operands import OPERANDS
from megatrain.simulator.schedule.plan import Plan


def test_every_kind_with_operands_is_bound(
    executable: Callable[..., Plan], session: Callable[..., Any]
) -> None:
    with session(executable("k_buffer")) as running:
        assert set(running.executor._binder._kinds) == set(OPERANDS)


def test_the_main_classes_are_exported_without_loading_torch() -> None:
    for name in megatrain.runtime.__all__:
        assert getattr(megatrain.runtime, name).__name__ == name
    code = "import sys, megatrain.runtime; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
