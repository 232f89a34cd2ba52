"""Scripts that time the simulator itself; run by hand, never by the tests."""
