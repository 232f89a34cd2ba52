"""Simulations whose data the paper's figures show. The module of a figure has a function `simulate`
that returns its data. `megatrain figures NAME --rerun` runs it.
"""
