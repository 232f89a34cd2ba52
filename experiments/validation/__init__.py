"""Compares published figures with the policies' predictions: the rows, their predictions, and the
report.
"""
