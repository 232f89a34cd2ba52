"""Warm-up: how many steps of a run are unlike those after it. Loads no torch, so that what reads a run's files may ask too."""

WARM_UP_STEPS = 2
"""not counted as steady: memory is touched and may be allocated, libraries start, layers are compiled, and our first step owes no update yet"""
