"""Computes verdicts from command-line options, and formats them as text."""
