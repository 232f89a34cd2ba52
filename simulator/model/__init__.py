"""The model, with the bytes and FLOPs of its layers, and the workload that trains it."""
