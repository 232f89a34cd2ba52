"""Trains language models larger than a GPU's memory on one GPU, and predicts how it will go.

>>> from megatrain.simulator import judge
>>> from megatrain.runtime import Config, Trainer
"""

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    """Returns the installed version, which takes 50 ms to look up."""
    if name == "__version__":
        from importlib.metadata import version

        return version("megatrain")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
