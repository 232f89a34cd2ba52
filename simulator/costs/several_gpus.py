"""How fast each GPU copies if several GPUs of a host copy at the same time.

The host's DRAM limits the rate of all links together to T GB/s. With N GPUs:

    rate of one GPU with one direction busy:        min(link, T / N)
    rate of each direction with both busy:          min(link, T / 2N)

T is the DRAM rate that the host's cores reach, divided by the DRAM traffic per copied byte. A host
for several GPUs is assumed to sustain 175 GB/s, which four H200 in one host reached (2026-11-21),
but at most N times the T of the machine with one GPU. It never has less than that T. With
NVLink-C2C, each GPU has its own host memory, so there is no limit.
"""

from __future__ import annotations

from typing import NamedTuple

from megatrain.simulator.costs.contention import link_gb_per_s
from megatrain.simulator.hardware.machine import HardwareSpec

DMA_GB_PER_S = 175.0
"""Rate of all copies of four H200 in one host with 64 cores, both directions together. Measured on
2026-11-21."""


class LinkShare(NamedTuple):
    """The rates of each GPU's link while all GPUs copy."""

    alone: float
    """GB/s with one direction busy."""
    together: float
    """GB/s of each direction with both busy."""
    slower: float
    """Factor on the time of a copy, relative to one GPU."""
    both_slower: float
    """Additional factor while both directions are busy."""


def has_own_memory(hardware: HardwareSpec) -> bool:
    """Returns whether each GPU has host memory of its own."""
    return "C2C" in hardware.link


def link_share(hardware: HardwareSpec, gpus: int) -> LinkShare:
    """Returns the rates of each link while `gpus` GPUs of one host copy. `hardware` is the machine
    with one GPU.
    """
    one, both = (
        min(hardware.h2d_gb_per_s, hardware.d2h_gb_per_s) * share
        for share in (1.0, hardware.duplex_fraction)
    )
    memory = hardware.host_memory
    machine = memory.gb_per_s / max(memory.h2d_cost, memory.d2h_cost) if memory else DMA_GB_PER_S
    total = (
        2 * gpus * one
        if has_own_memory(hardware)
        else max(machine, min(gpus * machine, DMA_GB_PER_S))
    )
    alone, together = link_gb_per_s(gpus, one, both, total)
    return LinkShare(alone, together, one / alone, (both / one) / (together / alone))
