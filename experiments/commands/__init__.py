"""The verbs of the `megatrain` command, one module each: its options and what it does."""
