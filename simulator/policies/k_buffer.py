"""`double_buffer` with any number of weight slots: loads run further ahead, and layers stay for the backward pass where slots allow."""

from __future__ import annotations

from megatrain.simulator.policies.streamed import StreamedPolicy


class KBuffer(StreamedPolicy):
    """Any number of weight slots."""

    name = "k_buffer"
