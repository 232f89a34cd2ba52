"""Sweeps: every plan of a grid, simulated or executed; what `megatrain sweep` does."""
