"""Executes plans in PyTorch. Host memory holds the training state, and layers are streamed through
a few buffers on the GPU.

>>> from megatrain.runtime import Callback, Config, Executor, Trainer
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatrain.runtime.execution.executor import Executor
    from megatrain.runtime.training.callback import Callback
    from megatrain.runtime.training.config import Config
    from megatrain.runtime.training.progress import Progress
    from megatrain.runtime.training.trainer import Trainer
    from megatrain.runtime.training.training_run import TrainingRun

__all__ = ["Callback", "Config", "Executor", "Progress", "Trainer", "TrainingRun"]

_HOMES = {
    "Callback": "training.callback",
    "Config": "training.config",
    "Executor": "execution.executor",
    "Progress": "training.progress",
    "Trainer": "training.trainer",
    "TrainingRun": "training.training_run",
}


def __getattr__(name: str) -> object:
    """Imports the module of the public name `name` at its first use, because importing the package
    must not import PyTorch.
    """
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, for completion in a notebook."""
    return __all__
