"""AdamW on fp32 master weights that are kept as two 16-bit planes, and the global gradient norm: the same bits on any device.

The high plane is the bf16 weight that layers compute with: the master rounded to nearest, ties away from zero. The low plane is the
signed 16-bit residual: `master bits = (high << 16) + low`. (Ties to even would not be invertible: a residual of +0x8000 does not
fit.) In fp32 compute there is one fp32 weight and no low plane.

Every operation is a single rounded fp32 one (no fused multiply-add, no reduction whose order depends on threads), so CPU and GPU,
one block or many, agree bit for bit. The work goes in blocks that stay in cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_ROW = 4096  # elements folded together first in a sum of squares; part of the arithmetic
_CPU_BLOCK, _GPU_BLOCK = 2**17, 2**25  # elements: 0.5 MiB a temporary in a core's L2; 128 MiB a temporary, launches negligible


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters; decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), applied to every parameter."""

    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    """global gradient norm above which gradients are scaled down; unused where the workload does not clip"""


def _block(flat: torch.Tensor) -> int:
    return _CPU_BLOCK if flat.device.type == "cpu" else _GPU_BLOCK


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Writes the planes of `master` [n] fp32 into `high` [n] bf16 and `low` [n] int16. Finite values below 3.39e38 only."""
    bits = master.view(torch.int32)
    low.copy_(master.view(torch.int16)[0::2])  # little endian: the lower half of each word
    high.view(torch.int16).copy_((bits + 0x8000).view(torch.int16)[1::2])


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 master [n] of two planes."""
    return ((high.view(torch.int16).to(torch.int32) << 16) + low.to(torch.int32)).view(torch.float32)


def round_to_bf16(master: torch.Tensor) -> torch.Tensor:
    """The high plane of `master`, same shape, bf16."""
    high, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split(master.reshape(-1), high.view(-1), low.view(-1))
    return high


def update(
    weights: torch.Tensor, low: torch.Tensor | None, moments: torch.Tensor, gradient: torch.Tensor, *,
    settings: AdamW, rate: float, number: int, clip: torch.Tensor | None,
) -> None:  # fmt: skip
    """One AdamW update in place.

    `weights` [n] bf16 with `low` [n] int16, or fp32 with None; `moments` [2, n] fp32; `gradient` [n] bf16 or fp32; `rate` the learning
    rate; `number` of this step, from 1; `clip` a 0-dimensional fp32 factor on the gradient, on the same device, or None.
    """
    block = _block(weights)
    for start in range(0, weights.numel(), block):
        part = slice(start, start + block)
        _update_block(weights[part], None if low is None else low[part], moments[0, part], moments[1, part], gradient[part], settings, rate, number, clip)


def _update_block(
    weights: torch.Tensor, low: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor,
    settings: AdamW, rate: float, number: int, clip: torch.Tensor | None,
) -> None:  # fmt: skip
    beta1, beta2 = settings.betas
    master = weights if low is None else join(weights, low)
    g = gradient.float() if clip is None else gradient.float() * clip
    if settings.weight_decay:
        master.mul_(1 - rate * settings.weight_decay)
    first.mul_(beta1).add_(g * (1 - beta1))
    second.mul_(beta2).add_((g * g).mul_(1 - beta2))
    denominator = second.sqrt().div_((1 - beta2**number) ** 0.5).add_(settings.epsilon)
    master.sub_((first * (rate / (1 - beta1**number))).div_(denominator))
    if low is not None:
        split(master, weights, low)


def accumulate(total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
    """`total` [n] = (first) or += `gradient` [n]; `total` is fp32, or of the gradient's dtype where it gets only one."""
    if first:
        total.copy_(gradient)
    else:
        total.add_(gradient)


def sum_of_squares(gradient: torch.Tensor) -> torch.Tensor:
    """Of `gradient` [n], 0-dimensional fp32: rows of 4096 folded in halves, then the rows' sums folded in halves.

    Adding halves elementwise fixes the order of additions whatever the device, the threads or the block; its rounding error grows with log n.
    """
    rows = []
    block = _block(gradient)
    for start in range(0, gradient.numel(), block):
        part = gradient[start : start + block].float()
        part = torch.nn.functional.pad(part * part, (0, -part.numel() % _ROW)).view(-1, _ROW)
        rows.append(_fold(part))
    sums = torch.cat(rows)
    width = 1 << (sums.numel() - 1).bit_length()
    return _fold(torch.nn.functional.pad(sums, (0, width - sums.numel())).view(1, width))[0]


def _fold(values: torch.Tensor) -> torch.Tensor:
    """[r, 2^k] -> [r]: the sum of each row by halving."""
    while values.shape[1] > 1:
        half = values.shape[1] // 2
        values = values[:, :half] + values[:, half:]
    return values[:, 0]


def clip_coefficient(sums: list[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor, norm), 0-dimensional fp32: min(1, max_norm / (norm + 1e-6)) as torch's clip_grad_norm_, the norm over all layers' sums in their order."""
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    norm = total.sqrt()
    return (max_norm / (norm + 1e-6)).clamp(max=1.0), norm
