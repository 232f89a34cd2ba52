"""Trains language models larger than a GPU's memory on one GPU, and predicts how it will go.

>>> from megatrain import Config, Trainer
>>> from megatrain.simulator import judge
"""

import importlib

TYPE_CHECKING = False  # as in `typing`, whose import would take longer than the rest of the start
if TYPE_CHECKING:
    from megatrain.runtime import Callback, Config, Trainer

    __version__: str

__all__ = ["Callback", "Config", "Trainer", "__version__"]


def __getattr__(name: str) -> object:
    """Returns a public name, which is looked up at its first use.

    The version takes 50 ms to look up, and a class loads PyTorch.
    """
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("megatrain")
    if name in __all__:
        return getattr(importlib.import_module("megatrain.runtime"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Returns the public names, for completion in a notebook."""
    return __all__
