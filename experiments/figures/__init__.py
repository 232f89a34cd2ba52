"""Simulations that the paper's figures are drawn from: one module a figure, each with `simulate() -> data`. `megatrain figures NAME --rerun` runs them."""
