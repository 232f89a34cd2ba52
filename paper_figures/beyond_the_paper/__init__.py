"""Figures that the paper does not have."""
