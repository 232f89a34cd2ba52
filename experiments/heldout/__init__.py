"""The held-out experiment: calibrates a machine once, predicts plans that were not part of the
calibration, and executes them to measure the error of each prediction.
"""
