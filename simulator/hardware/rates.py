"""Rates: the sizes and rates of a machine that can be measured, and shared with others."""

from __future__ import annotations

import msgspec

from megatrain.simulator.hardware.cost_table import HostMemorySpec, KernelInterleaving
from megatrain.simulator.hardware.limits import Curve


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and rates of one machine. GB are 10^9 bytes. Rates are those of one lane while the
    others are idle.
    """

    cores: int
    """CPU cores of the host."""
    device_bytes: int
    """GPU memory that a process can use. On a unified machine, the part of `host_bytes` that the
    GPU can use."""
    host_bytes: int
    """Host memory. On a unified machine, the whole memory."""
    linear_efficiency: float
    """Share of the peak that the matrix products of a decoder layer reach, (0, 1]."""
    device_gb_per_s: float
    """Rate at which a copy within GPU memory reads and writes, both counted."""
    h2d_gb_per_s: float
    """Rate of large copies from pinned host memory to the device."""
    d2h_gb_per_s: float
    """Rate of large copies from the device to pinned host memory."""
    link_latency_ns: int
    """Fixed time of one copy, used without a curve."""
    h2d_curve: Curve = ()
    """Measured rates of copies to the device, used in place of rate and latency."""
    d2h_curve: Curve = ()
    """Measured rates of copies to the host, used in place of rate and latency."""
    duplex_fraction: float
    """Share of its rate, (0, 1], that each direction of the link keeps while both are busy."""
    duplex_curve: Curve = ()
    """Rate of each direction while both are busy with copies of that size."""
    host_gb_per_s: float
    """Rate at which elementwise ops on all cores (sum of squares, accumulation) read and write."""
    thread_gb_per_s: float
    """Rate at which the copy of one thread reads and writes."""
    cpu_update_per_s: float
    """Parameters per second that the runtime's AdamW updates on the host."""
    cpu_adam_per_s: float
    """Parameters per second that a fused, vectorized AdamW such as DeepSpeed's updates on the host,
    with bf16 weights and gradients and fp32 moments. The host's DRAM limits it."""
    contention: dict[str, dict[str, float]] = {}
    """The field `contention` of CostTable. Between the two directions of the link it overrides
    `duplex_fraction`."""
    host_memory: HostMemorySpec | None = None
    """The host's DRAM. It replaces the contention between the link and the cpu lane."""
    turns: KernelInterleaving | None = None
    """The sharing of the device. It replaces the contention between compute and update."""
    dispatch_ns: dict[str, int] = {}
    """Time from an op being ready to its start, by lane."""
    step_overhead_ns: int = 0
    """Time of a step outside its schedule: the host's, before the first op and after the last."""
