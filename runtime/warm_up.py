"""The number of warm-up steps. This module does not import torch, so that code which only reads the
files of a run can import it.
"""

WARM_UP_STEPS = 2
"""First steps that are left out of timings. In them, memory is touched and may be allocated,
libraries start, layers are compiled, and a plan that defers updates has none to apply yet."""
