"""Renders conversations with a chat template, and finds the text that has loss."""
