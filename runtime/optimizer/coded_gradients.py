"""Gradients in 8 bits, which are stored until the norm over all gradients is known.

A gradient is stored as records, one for each block of 32 parameters. A record consists of 32 signed
codes of one byte and their scale s in bf16, which is the largest absolute value of the block,
rounded up. The code q of a gradient g is 127 g / s with stochastic rounding (`blockwise.py`). It is
decoded as q s / 127. So the decoded gradient is unbiased, even if it is smaller than half a code.
With rounding to nearest, such a gradient would always be decoded as zero, and its first moment
would never grow.

The random bits depend only on the seed, the step and the index of the parameter in the model, so
codes do not depend on the plan. They are not the bits that `blockwise.py` uses.

If a value of a block is not finite or is above 2^119, the block is stored as NaN. The norm is
computed from gradients before they are encoded, so in such a step it stops the update.
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
"""Number of elements that are encoded or decoded at a time on the CPU."""


def block_size(device: torch.device) -> int:
    """Returns the number of elements that are encoded or decoded at a time on `device`."""
    return CPU_BLOCK if device.type == "cpu" else GPU_BLOCK


def encode(
    gradient: torch.Tensor, stored: torch.Tensor, seed: int, number: int, index: int
) -> None:
    """Encodes `gradient` and writes the records to `stored`. n must be a multiple of 32.

    Args:
        gradient: The gradient of step `number`, [n] bf16 or fp32.
        stored: Receives the records, [n / 32 * 34] uint8.
        seed: The run's seed.
        number: The number of the step, counted from 1.
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
    """Decodes `stored`, uint8 records, and returns the gradient, [n] fp32."""
    codes, scales = unpacked(stored)
    return codes.view(torch.int8).float().mul_(scales * (1 / 127)).view(-1)
