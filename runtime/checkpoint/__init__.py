"""Checkpoints, from which a run is resumed with the same bits as without interruption."""
