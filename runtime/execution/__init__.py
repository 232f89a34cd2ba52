"""Executes schedules on CUDA streams and threads."""
