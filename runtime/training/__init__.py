"""The training loop around the executor: config, learning-rate schedule, callbacks, run folder and
resuming.
"""
