"""The training loop: config, learning-rate schedule, callbacks, run folder, and resuming."""
