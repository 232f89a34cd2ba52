"""Other training systems, configured as their users would configure them. A module has `NEEDS`
(packages that must be installed), `DEVICES` (types of devices that it supports), and
`prepare(plan, device)`, which returns a step and notes.
"""
