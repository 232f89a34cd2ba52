"""Computes what `megatrain check` reports: fit, speed, limits, and changes that would help."""
