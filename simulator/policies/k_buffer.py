"""The policy `k_buffer`: like `double_buffer`, with any number of weight slots.

With more slots, loads run further ahead, and the last layers can stay for the backward pass.
"""

from __future__ import annotations

from megatrain.simulator.policies.streamed import StreamedPolicy


class KBuffer(StreamedPolicy):
    """Streams weights through any number of slots."""

    name = "k_buffer"
