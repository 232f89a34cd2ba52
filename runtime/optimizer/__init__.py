"""Optimizer updates and gradient clipping, in PyTorch and with kernels in C and Triton."""
