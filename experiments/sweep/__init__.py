"""Sweeps: simulating or executing every plan of a grid. `megatrain sweep` uses this package.

>>> from megatrain.experiments.sweep import load_sweep
"""

from megatrain.experiments.sweep.flat import load_sweep

__all__ = ["load_sweep"]
