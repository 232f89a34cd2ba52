"""The `megatrain` command: its verbs, their options, and what it prints."""
