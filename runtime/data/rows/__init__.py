"""Finds files at a path, and reads their rows: JSON, CSV, Parquet, Arrow, and plain text."""
