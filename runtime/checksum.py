"""Checksum: 64 bits that stand for all weights, wherever a plan keeps them.

Each layer's weights, and their low plane, are read as 64-bit words. A word is mixed with its position, one to one, so that any one changed bit and,
but for one case in 2^64, any two exchanged words change the sum of all; integer addition has no order, so a CPU and a GPU agree. Nothing is copied
but a chunk at a time, where the data lies.
"""

from __future__ import annotations

import torch

from megatrain.runtime.files.model_files import ModelState
from megatrain.runtime.memory.arenas import Arenas
from megatrain.simulator.plan import Plan
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.specs import DTYPE_BYTES

_ODD = (0x1E37_79B9_7F4A_7C15, 0x3F58_476D_1CE4_E5B9, 0x14D0_49BB_1331_11EB)  # any odd numbers with bits everywhere: products with them can be undone
_CPU_WORDS, _GPU_WORDS = 2**17, 2**21  # 1 MiB, in a core's cache; 16 MiB, where launches are some 10 % of the time
_MASK = 2**64 - 1


def checksum(plan: Plan, schedule: Schedule, arenas: Arenas) -> int:
    """Of the weights as they lie in `arenas`, from 0 to 2^64 - 1, in the model's order of layers. What a step still owes is not in them.

    Layers that `schedule` does not keep are left out. Waits for the device.
    """
    state, width = ModelState(plan, schedule, lambda: arenas), DTYPE_BYTES[plan.workload.dtype]
    parts = []
    for layer in plan.model.stack.values():
        for name, size in (("weights", width), ("low", 4 - width)):
            if size and (buffer := state.home(name, layer.name)):
                parts.append(_words(arenas.flat(buffer, torch.int64, size * layer.elements // 8)))
    total = 0
    for part in parts:
        total = (total * _ODD[0] + int(part)) & _MASK
    return total


def _words(words: torch.Tensor) -> torch.Tensor:
    """0-dimensional, of `words` [n] int64: the sum of its words, mixed, modulo 2^64. `>>` keeps the sign, on every device."""
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
    """`value` modulo 2^64, as int64 has it."""
    value &= _MASK
    return value - 2**64 if value >= 2**63 else value
