"""Mixes and packs documents, and makes the micro-batches of each step from them."""
