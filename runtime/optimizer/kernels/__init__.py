"""Fused kernels that compute the same bits as `runtime/optimizer/adamw.py` and `blockwise.py`:
`host` in C for a CPU, and `device` in Triton for a CUDA GPU.
"""
