"""Layers: transformers' own modules as functions of the bytes in a slot, for every family."""
