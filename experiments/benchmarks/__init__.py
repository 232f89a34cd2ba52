"""Scripts that time training systems and the simulator itself."""
