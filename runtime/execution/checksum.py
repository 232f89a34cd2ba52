"""A 64-bit checksum of all weights, which does not depend on where a plan keeps them.

The weights of each layer and the low parts of its masters are read as 64-bit words. Each word is
mixed with its position by an invertible function, and the results are added modulo 2^64. A single
changed bit always changes the sum, and two exchanged words change it except with probability 2^-64.
Integer addition does not depend on the order, so a CPU and a GPU get the same sum. The data is
read in place, one chunk at a time.
"""

from __future__ import annotations

import torch

from megatrain.runtime.memory.arenas import Arenas
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Plan

_ODD = (0x1E37_79B9_7F4A_7C15, 0x3F58_476D_1CE4_E5B9, 0x14D0_49BB_1331_11EB)
"""Odd factors: multiplying by an odd number is invertible modulo 2^64."""
_CPU_WORDS = 2**17
"""Words in a chunk on the CPU: 1 MiB, which fits in the cache of a core."""
_GPU_WORDS = 2**21
"""Words in a chunk on a GPU: 16 MiB, so kernel launches take about 10 % of the time."""
_MASK = 2**64 - 1


def checksum(plan: Plan, schedule: Schedule, arenas: Arenas) -> int:
    """Returns the checksum of the weights in `arenas`, from 0 to 2^64 - 1. A deferred update is not
    included.

    The checksums of the layers are combined in the order of the model. Layers without a buffer in
    `schedule` are skipped. Waits for the device.
    """
    sums = []
    for layer in plan.model.stack:
        for name in ("weights", "master_low"):
            if buffer := schedule.state.get((name, layer)):
                words = schedule.buffer[buffer].bytes // 8
                sums.append(_mixed_sum(arenas.flat(buffer, torch.int64, words)))
    total = 0
    for part_sum in sums:  # after all sums are enqueued, because `int` waits for the device
        total = (total * _ODD[0] + int(part_sum)) & _MASK
    return total


def _mixed_sum(words: torch.Tensor) -> torch.Tensor:
    """Returns the sum modulo 2^64 of all mixed words, as a 0-dimensional int64 tensor. `words` is
    [n] int64.
    """
    chunk = min(_CPU_WORDS if words.device.type == "cpu" else _GPU_WORDS, len(words))
    positions = torch.arange(chunk, dtype=torch.int64, device=words.device).mul_(_ODD[0])
    mixed, shifted = torch.empty_like(positions), torch.empty_like(positions)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), chunk):
        part = words[start : start + chunk]
        m, s = mixed[: len(part)], shifted[: len(part)]
        torch.add(part, positions[: len(part)], out=m)
        m.add_(_signed(start * _ODD[0]))
        for shift, factor in ((32, _ODD[1]), (29, _ODD[2])):
            m.bitwise_xor_(torch.bitwise_right_shift(m, shift, out=s)).mul_(factor)
        total += m.sum()
    return total


def _signed(value: int) -> int:
    """Returns the int64 number that has the bits of `value` modulo 2^64."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value
