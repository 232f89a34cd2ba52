"""The number of warm-up steps. This module does not import PyTorch, so code that only reads the
files of a run can import it.
"""

WARM_UP_STEPS = 2
"""Number of steps at the start that are not timed. During these steps, memory is touched for the
first time, libraries start, and layers are compiled. A plan that defers updates has no update to
apply in the first step."""
