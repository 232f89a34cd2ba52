"""Rates: the sizes and rates of a machine that can be measured and shared with other users."""

from __future__ import annotations

import msgspec

from megatrain.simulator.hardware.cost_table import HostMemorySpec, KernelInterleaving
from megatrain.simulator.hardware.limits import Curve


class Rates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes and rates of one machine. A GB is 10^9 bytes. The rates of a lane were measured while
    the other lanes were idle.
    """

    cores: int
    """CPU cores of the host."""
    device_bytes: int
    """GPU memory that a process can use, in bytes. On a unified machine, it is the part of
    `host_bytes` that the GPU can use."""
    host_bytes: int
    """Host memory that plans can use, in bytes. It is the memory of the machine without what the
    system and the process itself take. On a unified machine, the device's part is included."""
    linear_efficiency: float
    """Share of the peak that the matrix products of a decoder layer reach, (0, 1]."""
    device_gb_per_s: float
    """Rate of a copy within GPU memory, counting the bytes read and the bytes written."""
    h2d_gb_per_s: float
    """Rate of large copies from pinned host memory to the device."""
    d2h_gb_per_s: float
    """Rate of large copies from the device to pinned host memory."""
    link_latency_ns: int
    """Fixed time of one copy, in nanoseconds. It is used if there is no curve."""
    h2d_curve: Curve = ()
    """Measured rates of copies to the device, used instead of rate and latency."""
    d2h_curve: Curve = ()
    """Measured rates of copies to the host, used instead of rate and latency."""
    duplex_fraction: float
    """Share of its rate, (0, 1], that each direction of the link keeps while both are busy."""
    duplex_curve: Curve = ()
    """Rate of each direction while both directions are busy with copies of one size."""
    host_gb_per_s: float
    """Rate of elementwise ops on all cores (sum of squares, accumulation), counting the bytes read
    and the bytes written."""
    thread_gb_per_s: float
    """Rate of a copy in host memory by one thread, counting the bytes read and the bytes
    written."""
    cpu_update_per_s: float
    """Parameters per second that the runtime's AdamW updates on the host."""
    cpu_adam_per_s: float
    """Parameters per second that a fused, vectorized AdamW such as DeepSpeed's updates on the host,
    with bf16 weights and gradients and fp32 moments. The host's DRAM limits it."""
    contention: dict[str, dict[str, float]] = {}
    """The field `contention` of CostTable. Between the two directions of the link it overrides
    `duplex_fraction`."""
    host_memory: HostMemorySpec | None = None
    """The host's DRAM. It replaces the contention between the link and the lane `cpu`."""
    turns: KernelInterleaving | None = None
    """How compute and update share the device. It replaces the contention between them."""
    dispatch_ns: dict[str, int] = {}
    """Lane -> time from an op being ready to its start, in nanoseconds."""
    step_overhead_ns: int = 0
    """Time that the host needs per step before the first op and after the last, in nanoseconds."""
