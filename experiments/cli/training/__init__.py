"""The parts of `megatrain train` outside the training loop: checks, plan, progress, upload."""
