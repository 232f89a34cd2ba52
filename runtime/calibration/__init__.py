"""Measures a machine: copies, layers, updates, and how much they slow each other."""
