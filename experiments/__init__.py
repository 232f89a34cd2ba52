"""The `megatrain` command, the demo, the experiments, and their stored results."""
