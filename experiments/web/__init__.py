"""The web page of `megatrain serve`: the verdict of `check` for a model on a machine. It is served
or written as a static site.
"""
