"""Errors, units and files, which every other part uses."""
