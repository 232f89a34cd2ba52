"""AdamW on masters in two parts, in every state format, with kernels in C and Triton."""
