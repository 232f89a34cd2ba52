"""Reads and writes Hugging Face model folders, one tensor at a time."""
