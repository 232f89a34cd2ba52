"""Other systems on the same machine, as their users would run them. A module has `NEEDS` (packages), `DEVICES`, and `prepare(plan, device)`: a step, notes."""
