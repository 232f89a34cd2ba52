"""The `megatrain` command, the demo, and stored results."""
