"""Other systems on the same machine, run as their users would run them. A module has `NEEDS`
(packages), `DEVICES`, and `prepare(plan, device)`, which returns a step and notes.
"""
