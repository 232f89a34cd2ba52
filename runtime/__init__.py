"""Executes a plan in PyTorch: host memory holds the training state, the device streams layers through a few buffers."""
