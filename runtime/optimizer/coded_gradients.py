"""Gradients that wait in memory for their common norm, in codes of 8 bits.

A gradient is a row of records, one for each block of 32 parameters: 32 signed codes of one byte,
then their scale s in bf16, the largest absolute value of the block rounded up. A gradient g has one
of the two integers next to 127 g / s, the upper one with a probability equal to the distance from
the lower one. It is read as q s / 127. So what an update reads has no error on average, also where
a gradient is smaller than half a code. With the nearest integer, such a gradient would always be
read as zero, and its first moment would never grow.

The random bits depend only on the seed, the step and the index of the parameter in the model, so
codes do not depend on the plan. They differ from those that `blockwise.py` uses.

A block with a value that is not finite, or above 2^119, is stored as NaN. The norm is that of
the gradient before it is encoded, and stops the update of such a step.
"""

from __future__ import annotations

import torch

from megatrain.runtime.optimizer.blockwise import (
    mixed,
    pack,
    random_bits,
    records,
    rounding_keys,
    scale_bits,
    scale_of,
    unpacked,
)
from megatrain.simulator.model.state_format import BLOCK, GPU_BLOCK

CPU_BLOCK = 2**16
"""Elements that are encoded or decoded at a time on the CPU."""


def block_size(device: torch.device) -> int:
    """Returns how many elements are encoded or decoded at a time."""
    return CPU_BLOCK if device.type == "cpu" else GPU_BLOCK


def encode(
    gradient: torch.Tensor, stored: torch.Tensor, seed: int, number: int, index: int
) -> None:
    """Writes `gradient` [n] bf16 or fp32 to `stored`, uint8 records. n is a multiple of 32.

    Args:
        gradient: The gradient of step `number`.
        stored: Receives the records, [n / 32 * 34].
        seed: The run's seed.
        number: The number of the step, from 1.
        index: The index of the first element in the model, a multiple of 32.
    """
    key, count = mixed(rounding_keys(seed, number)[1]), gradient.numel()
    assert stored.shape == (records(count),)
    size = block_size(gradient.device)
    for start in range(0, count, size):
        end = min(start + size, count)
        values = gradient[start:end].float().view(-1, BLOCK)
        bits = scale_bits(values)
        random = random_bits(key, index + start, end - start, values.device)
        codes = random.view(-1, BLOCK) * 2.0**-16
        codes.add_((values * 127).div_(scale_of(bits))).floor_()
        pack(codes, bits, stored[records(start) : records(end)], torch.int8)


def decoded(stored: torch.Tensor) -> torch.Tensor:
    """Returns the gradient [n] fp32 in `stored`, uint8 records."""
    codes, scales = unpacked(stored)
    return codes.view(torch.int8).float().mul_(scales * (1 / 127)).view(-1)
