"""Checkpoints: everything that a run needs to go on, bit for bit, whole or absent."""
