"""The report of a run: one static HTML file with text, data, style and scripts inline. This package
also has the pictures of `megatrain compare`, and the model card.
"""
