"""Simulates a schedule with a cost model: discrete-event simulation, fast evaluation and bounds."""
