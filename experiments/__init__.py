"""The `megatrain` command, the demo, and committed results."""
