"""Checkpoints, from which a run can be resumed with the same result bit for bit."""
