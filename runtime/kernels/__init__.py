"""Fused versions of what `runtime/optimizer.py` defines, with its bits: `host` in C for a CPU, `device` in Triton for a CUDA GPU."""
