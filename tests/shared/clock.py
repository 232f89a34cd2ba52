"""A clock for tests of measurements, so that they do not depend on the machine's speed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Clock(TorchDispatchMode):
    """A clock that only advances while given operators of PyTorch run."""

    def __init__(self, nanoseconds: dict[Any, Callable[[torch.Tensor], int]]) -> None:
        """`nanoseconds` has the duration of each operator, as a function of its first argument."""
        super().__init__()
        self.now, self._nanoseconds = 10**9, nanoseconds

    def __torch_dispatch__(
        self, function: Any, _types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function in self._nanoseconds:
            self.now += self._nanoseconds[function](arguments[0])
        return function(*arguments, **(options or {}))

    def install(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        """Makes `module` read this clock."""
        readings = SimpleNamespace(
            perf_counter=lambda: self.now / 1e9, perf_counter_ns=lambda: self.now
        )
        monkeypatch.setattr(module, "time", readings)
