"""The paper's pipeline (arXiv 2604.05091): two weight slots, so that a layer loads while the one before it computes; a checkpoint
every K layers; gradients through slots and slabs to the host; AdamW on the CPU after backward.

Where it differs from the paper: the master weights are exact (fp32 in two 16-bit planes), a recomputed layer keeps its activations
until its backward (two forwards a layer, not three), and a layer that is still in a slot is not loaded again.
"""

from __future__ import annotations

from megatrain.simulator.policies.streamed import StreamedPolicy


class DoubleBuffer(StreamedPolicy):
    """Two weight slots."""

    name = "double_buffer"
    dominated_by = "k_buffer"
    slots = 2
