"""The text of a verdict: does a model fit, how fast, why, and what to type next."""
