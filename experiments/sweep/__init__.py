"""Sweeps: simulates or executes every plan of a grid, as `megatrain sweep` does."""
