"""The policy `double_buffer`: the pipeline of the paper (arXiv 2604.05091).

With two weight slots, a layer loads while the layer before it computes. Every K-th layer is a
checkpoint. Gradients go through device slots and pinned staging buffers to host memory. AdamW runs
on the CPU after the backward pass.

It differs from the paper in three points:

* Master weights are exact: fp32, stored as two 16-bit halves.
* A recomputed layer keeps its activations until its backward pass. Each layer runs forward twice,
  not three times.
* A layer that is still in a slot is not loaded again.
"""

from __future__ import annotations

from megatrain.simulator.policies.streamed import StreamedPolicy


class DoubleBuffer(StreamedPolicy):
    """Streams weights through two slots."""

    name = "double_buffer"
    dominated_by = "k_buffer"
    slots = 2
