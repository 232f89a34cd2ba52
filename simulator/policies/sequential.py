"""No overlap: one weight slot, every op waits for the one before it. The floor that every other policy has to beat."""

from __future__ import annotations

from megatrain.simulator.policies.streamed import StreamedPolicy


class Sequential(StreamedPolicy):
    """One weight slot, one op at a time."""

    name = "sequential"
    dominated_by = "k_buffer"
    serial = True
    slots = 1
