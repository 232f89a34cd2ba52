"""Code that the figures share: styles, tables, kinds of pictures, and reading stored results."""
