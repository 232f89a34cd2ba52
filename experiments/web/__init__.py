"""The page on which one asks what a model needs on a machine, served or as a static site."""
