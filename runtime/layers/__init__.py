"""Layers of all model families: transformers' own modules, called as functions of the tensors in a
slot.
"""
