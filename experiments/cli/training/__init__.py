"""What `megatrain train` does around the training: checks, the plan for a model, progress."""
