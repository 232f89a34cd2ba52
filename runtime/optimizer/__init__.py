"""AdamW on fp32 masters that are stored as two 16-bit halves, with kernels in C and Triton."""
