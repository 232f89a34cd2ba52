"""The machine: its rates and memory sizes, measured or from datasheets."""
