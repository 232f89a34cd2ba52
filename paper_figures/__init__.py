"""The figures of the paper (arXiv 2604.05091), one file each. They are drawn from stored results,
without simulations.
"""
