"""Simulations whose data the paper's figures show. Each figure has one module with `simulate() ->
data`, which `megatrain figures NAME --rerun` runs.
"""
