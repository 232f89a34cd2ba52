"""Writes one run as one static HTML file, with text, data, style and scripts inline."""
