"""Figures of the paper (arXiv 2604.05091), one file each. They read result files and never simulate while plotting."""
