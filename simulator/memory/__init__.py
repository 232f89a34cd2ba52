"""The bytes of every pool of a schedule, and of what the framework allocates."""
