"""Trains language models larger than a GPU's memory, and predicts memory and speed beforehand.

>>> from megatrain import Config, Trainer
>>> from megatrain.simulator import judge
"""

import importlib

# Importing `typing` would take longer than the rest of this module.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from megatrain.runtime import Callback, Config, Trainer

    __version__: str

__all__ = ["Callback", "Config", "Trainer", "__version__"]


def __getattr__(name: str) -> object:
    """Returns the public object `name`, which is imported at first use.

    Looking up the version takes 50 ms, and importing a class loads PyTorch. Raises AttributeError
    for any other name.
    """
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("megatrain")
    if name in __all__:
        return getattr(importlib.import_module("megatrain.runtime"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, for completion in a notebook."""
    return __all__
