"""AdamW on fp32 master weights that are kept as two 16-bit planes, and the global gradient norm: the same bits on any device.

The high plane is the bf16 weight that layers compute with: the master rounded to nearest, ties away from zero. The low plane is the
signed 16-bit residual: `master bits = (high << 16) + low`. (Ties to even would not be invertible: a residual of +0x8000 does not
fit.) In fp32 compute there is one fp32 weight and no low plane.

Every operation is a single rounded fp32 one (no fused multiply-add, no reduction whose order depends on threads), so CPU and GPU,
one block or many, agree bit for bit. The work goes in blocks that stay in cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

_ROW = 4096  # elements folded together first in a sum of squares; part of the arithmetic
_CPU_BLOCK, _GPU_BLOCK = 2**17, 2**25  # elements: 0.5 MiB a temporary, three of them in a core's L2; on a GPU 128 MiB, launches negligible
_CPU_NORM_BLOCK = 2**20  # elements: folding takes 24 small ops a block, so larger ones; 0.2 -> 0.4 G/s on one core
Blocks = Callable[[Callable[[int], object], Sequence[int]], list[object]]
"""calls a function on the start of each block and returns its results in order; blocks are independent, so it may do so in threads"""


@dataclass(frozen=True)
class AdamW:
    """Hyperparameters; decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), applied to every parameter."""

    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    """global gradient norm above which gradients are scaled down; unused where the workload does not clip"""


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Writes the planes of `master` [n] fp32 into `high` [n] bf16 and `low` [n] int16. Finite values below 3.39e38 only."""
    bits = master.view(torch.int32)
    low.copy_(master.view(torch.int16)[0::2])  # little endian: the lower half of each word
    high.view(torch.int16).copy_((bits + 0x8000).view(torch.int16)[1::2])


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 master [n] of two planes."""
    return _join(high, low, *torch.empty(2, high.numel(), dtype=torch.float32, device=high.device))


def _join(high: torch.Tensor, low: torch.Tensor, master: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    bits, residual = master.view(torch.int32), scratch.view(torch.int32)
    bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(residual.copy_(low))
    return master


def round_to_bf16(master: torch.Tensor) -> torch.Tensor:
    """The high plane of `master`, same shape, bf16."""
    high, low = torch.empty_like(master, dtype=torch.bfloat16), torch.empty_like(master, dtype=torch.int16)
    split(master.reshape(-1), high.view(-1), low.view(-1))
    return high


def one_by_one(work: Callable[[int], object], starts: Sequence[int]) -> list[object]:
    """Blocks one after the other: on a GPU, and where one thread is to be used."""
    return [work(start) for start in starts]


class BlockThreads:
    """Blocks spread over threads. Each thread runs torch on one: a block's ops are too small to share (some 20 us of work each)."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="optimizer", initializer=torch.set_num_threads, initargs=(1,))

    def __call__(self, work: Callable[[int], object], starts: Sequence[int]) -> list[object]:
        return list(self._pool.map(work, starts))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _starts(flat: torch.Tensor, cpu_block: int = _CPU_BLOCK) -> tuple[range, int]:
    block = cpu_block if flat.device.type == "cpu" else _GPU_BLOCK
    return range(0, flat.numel(), block), block


def update(
    weights: torch.Tensor, low: torch.Tensor | None, moments: torch.Tensor, gradient: torch.Tensor, *,
    settings: AdamW, rate: float, number: int, clip: torch.Tensor | None, blocks: Blocks = one_by_one,
) -> None:  # fmt: skip
    """One AdamW update in place.

    `weights` [n] bf16 with `low` [n] int16, or fp32 with None; `moments` [2, n] fp32; `gradient` [n] bf16 or fp32; `rate` the learning
    rate; `number` of this step, from 1; `clip` a 0-dimensional fp32 factor on the gradient, on the same device, or None.
    """
    starts, block = _starts(weights)

    def work(start: int) -> None:
        part = slice(start, start + block)
        _update_block(weights[part], None if low is None else low[part], moments[0, part], moments[1, part], gradient[part], settings, rate, number, clip)

    blocks(work, starts)


def _update_block(
    weights: torch.Tensor, low: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor,
    settings: AdamW, rate: float, number: int, clip: torch.Tensor | None,
) -> None:  # fmt: skip
    """In three temporaries. Scalars multiply, never divide: a GPU divides by a scalar as a product with its reciprocal, a CPU does not."""
    beta1, beta2 = settings.betas
    g, scratch, joined = torch.empty(3, weights.numel(), dtype=torch.float32, device=weights.device)
    master = weights if low is None else _join(weights, low, joined, scratch)
    g.copy_(gradient)
    if clip is not None:
        g.mul_(clip)
    if settings.weight_decay:
        master.mul_(1 - rate * settings.weight_decay)
    first.mul_(beta1).add_(torch.mul(g, 1 - beta1, out=scratch))
    second.mul_(beta2).add_(torch.mul(g, g, out=scratch).mul_(1 - beta2))
    denominator = torch.sqrt(second, out=scratch).mul_((1 - beta2**number) ** -0.5).add_(settings.epsilon)
    master.sub_(torch.mul(first, rate / (1 - beta1**number), out=g).div_(denominator))
    if low is not None:
        split(master, weights, low)


def accumulate(total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
    """`total` [n] = (first) or += `gradient` [n]; `total` is fp32, or of the gradient's dtype where it gets only one."""
    if first:
        total.copy_(gradient)
    else:
        total.add_(gradient)


def sum_of_squares(gradient: torch.Tensor, blocks: Blocks = one_by_one) -> torch.Tensor:
    """Of `gradient` [n], 0-dimensional fp32: rows of 4096 folded in halves, then the rows' sums folded in halves.

    Adding halves elementwise fixes the order of additions whatever the device, the threads or the block; its rounding error grows with log n.
    """
    starts, block = _starts(gradient, _CPU_NORM_BLOCK)
    rows = -(-gradient.numel() // _ROW)
    sums = torch.zeros(1 << (rows - 1).bit_length(), dtype=torch.float32, device=gradient.device)

    def work(start: int) -> None:
        part = gradient[start : start + block]
        squares = torch.zeros(-(-part.numel() // _ROW) * _ROW, dtype=torch.float32, device=gradient.device)
        squares[: part.numel()] = part
        first = start // _ROW
        folded = _fold(squares.mul_(squares).view(-1, _ROW))
        sums[first : first + folded.numel()] = folded

    blocks(work, starts)
    return _fold(sums.view(1, -1))[0]


def _fold(values: torch.Tensor) -> torch.Tensor:
    """[r, 2^k] -> [r]: the sum of each row by halving, in place."""
    width = values.shape[1]
    while width > 1:
        width //= 2
        values[:, :width] += values[:, width : 2 * width]
    return values[:, 0]


def clip_coefficient(sums: list[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor, norm), 0-dimensional fp32: min(1, max_norm / (norm + 1e-6)) as torch's clip_grad_norm_, the norm over all layers' sums in their order."""
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    norm = total.sqrt()
    return (max_norm / (norm + 1e-6)).clamp(max=1.0), norm
