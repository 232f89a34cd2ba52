"""Compares a predicted timeline with a measured one."""
