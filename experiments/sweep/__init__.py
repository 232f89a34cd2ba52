"""Sweeps: simulates or executes every plan of a grid, as `megatrain sweep` does.

>>> from megatrain.experiments.sweep import load_sweep
"""

from megatrain.experiments.sweep.flat import load_sweep

__all__ = ["load_sweep"]
