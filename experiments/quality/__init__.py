"""Compares state formats, clipping, optimizers and dtypes by the loss that they reach."""
