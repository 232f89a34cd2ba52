"""Memory: pools of exactly the plan's size, registered once; what does not fit, and what runs out."""
