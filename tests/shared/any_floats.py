"""Numbers as in training, and random bit patterns, for tests of kernels."""

from __future__ import annotations

import torch

SPECIAL = [
    0x0000_0000,
    0x8000_0000,
    0x0000_0001,
    0x8000_0001,
    0x007F_FFFF,
    0x0080_0000,
    0x3F80_0000,
    0x3F80_8000,
    0xBF80_8000,
    0x7F7F_7FFF,
    0x7F7F_FFFF,
    0x7F80_0000,
    0xFF80_0000,
    0x7FC0_0000,
    0x7FFF_FFFF,
    0xFFC1_2345,
]
"""zeros, denormals, the smallest normal value, ties between bf16 values, the largest value,
infinities, NaNs"""


def any_floats(generator: torch.Generator, count: int, *, wild: bool) -> torch.Tensor:
    """Returns a float32 tensor of shape [n].

    If `wild`, a quarter of the values are special and the others are random bit patterns. Otherwise
    all are values as in training.
    """
    if not wild:
        return (
            torch.randn(count, generator=generator)
            * 10.0 ** torch.randint(-6, 2, (count,), generator=generator).float()
        )
    bits = torch.randint(0, 2**32, (count,), generator=generator)
    special = torch.tensor(SPECIAL)[torch.randint(0, len(SPECIAL), (count,), generator=generator)]
    bits = torch.where(torch.rand(count, generator=generator) < 0.25, special, bits)
    return (bits - (bits >> 31 << 32)).to(torch.int32).view(torch.float32)
