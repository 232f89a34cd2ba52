"""Measures a machine: copies, layers, updates, and the slowdown when they run together."""
