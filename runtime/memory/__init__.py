"""Allocates a plan's pools, and checks that they fit the machine."""
