"""Draws timelines, errors and memory as pictures, and writes Perfetto traces."""
