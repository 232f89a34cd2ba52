"""The policy `sequential`: no overlap, as a baseline for the other policies."""

from __future__ import annotations

from megatrain.simulator.policies.streamed import StreamedPolicy


class Sequential(StreamedPolicy):
    """Streams weights through one slot and runs one op at a time."""

    name = "sequential"
    dominated_by = "k_buffer"
    serial = True
    slots = 1
