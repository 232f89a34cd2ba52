"""AdamW on fp32 master weights that are kept as two 16-bit planes, and what clips it: the same bits on any device.

The high plane is the bf16 weight that layers compute with: the master rounded to nearest, ties away from zero. The low plane is the
signed 16-bit residual: `master bits = (high << 16) + low`. (Ties to even would not be invertible: a residual of +0x8000 does not
fit.) In fp32 compute there is one fp32 weight and no low plane.

Every operation is a single rounded fp32 one (no fused multiply-add, no reduction whose order depends on threads), so CPU and GPU,
one block or many, agree bit for bit. What is written out here in PyTorch defines the arithmetic and works everywhere, in blocks that
stay in cache; `runtime/kernels/` does the same in one pass over memory, where there is a C compiler or Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.kernels.choice import Kernels, kernels
from megatrain.runtime.kernels.host import BLOCK, HostKernels
from megatrain.simulator.arithmetic import RATIO_ROW

_ROW = 4096  # elements folded together first in a sum of squares; part of the arithmetic
_TINY = 2.0**-126  # the least normal fp32: what divides is never 0
_GPU_BLOCK = 2**24  # elements: 64 MiB a temporary, launches negligible
Share = tuple[int, int]
"""(first element, one past the last) of a run of blocks"""


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


class Workers:
    """Who does the blocks of an elementwise op: here, the calling thread."""

    cpu_block = 2**17
    """elements: three temporaries of 0.5 MiB, in a core's L2"""
    kernels: HostKernels | None = None
    """the host's, on threads of their own; None: on the calling thread"""

    def __call__(self, work: Callable[[Share], object], count: int, block: int) -> None:
        """Calls `work` on shares of `count` elements, each but the last a multiple of `block`. Shares are independent."""
        work((0, count))

    def close(self) -> None:
        """Ends its threads."""


class WorkerThreads(Workers):
    """Some threads. Kernels have theirs without Python; where there are none, Python's threads call torch, each on one thread."""

    cpu_block = 2**20
    """elements: with 16 threads 1.3 G updates/s; with 2**17 they spend their time on Python's lock, 0.3 (Xeon of an H200 machine, 16 cores)"""

    def __init__(self, threads: int, block: int = BLOCK) -> None:
        """`block`: elements of a kernel that a thread takes at a time."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="optimizer", initializer=torch.set_num_threads, initargs=(1,))
        found = kernels(torch.device("cpu"))
        self.kernels = found.on(threads, block) if isinstance(found, HostKernels) else None

    def __call__(self, work: Callable[[Share], object], count: int, block: int) -> None:
        size = -(-count // (block * self._threads)) * block
        list(self._pool.map(work, [(start, min(start + size, count)) for start in range(0, count, size)]))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self.kernels is not None:
            self.kernels.close()


ALONE = Workers()


def workers(threads: int) -> Workers:
    """For a host lane of `threads` threads. Whoever asks will use the host's kernels: compiled now if they are not yet, rather than inside a timed op."""
    kernels(torch.device("cpu"))
    return WorkerThreads(threads) if threads > 1 else Workers()


class Scalars(NamedTuple):
    """What AdamW multiplies and adds in one step. Each is rounded to fp32 where it meets a tensor."""

    decay: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    root_scale: float
    epsilon: float
    rate: float
    shrink: float
    unbias: float
    floor: float

    @classmethod
    def of(cls, settings: AdamW, rate: float, number: int, weight_decay: float | None = None) -> Scalars:
        """Scalars multiply, never divide: a GPU divides by a scalar as a product with its reciprocal, a CPU does not."""
        beta1, beta2 = settings.betas
        shrink, unbias = rate * (settings.weight_decay if weight_decay is None else weight_decay), 1 / (1 - beta2**number)
        floor = max(settings.epsilon**2, _TINY)
        return cls(1 - shrink, beta1, 1 - beta1, beta2, 1 - beta2, unbias**0.5, settings.epsilon, rate / (1 - beta1**number), shrink, unbias, floor)


def update(
    weights: torch.Tensor, low: torch.Tensor | None, moments: torch.Tensor, gradient: torch.Tensor, *,
    settings: AdamW, rate: float, number: int, clip: torch.Tensor | None, workers: Workers = ALONE,
    weight_decay: float | None = None, copy_to: torch.Tensor | None = None, scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """One AdamW update in place, of whole tensors or of any run of their elements.

    `weights` [n] bf16 with `low` [n] int16, or fp32 with None; `moments` [2, n] fp32; `gradient` [n] bf16 or fp32; `rate` the learning
    rate; `number` of this step, from 1; `clip` a 0-dimensional fp32 factor on the gradient, on the same device, or None; a NaN leaves
    everything as it is; `weight_decay` instead of the settings' own; `copy_to` [n] as `weights` gets the new weights too; `scale` is like `clip`
    a factor, on the learning rate: of the step and of the decay.
    """
    count, device = weights.numel(), weights.device
    scalars = Scalars.of(settings, rate, number, weight_decay)
    dtype = torch.float32 if low is None else torch.bfloat16
    runs = [(weights, dtype), (low, torch.int16), (moments[0], torch.float32), (moments[1], torch.float32), (gradient, None), (copy_to, dtype)]
    assert all(tensor is None or tensor.shape == (count,) for tensor, _ in runs), "a kernel would write beyond the shorter ones"
    fused = _fused(workers, *runs, (clip, torch.float32), (scale, torch.float32))

    def tensors(part: slice) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor]:
        return weights[part], None if low is None else low[part], moments[0, part], moments[1, part], gradient[part]

    if fused is not None:
        fused.adamw(weights, low, moments[0], moments[1], gradient, clip, scale, copy_to, scalars)
        return
    stops = [factor.isnan() for factor in (clip, scale) if factor is not None]
    stop = stops[0] | stops[-1] if stops else None  # stays on the device: to ask for its value would wait for the GPU
    block = min(workers.cpu_block if device.type == "cpu" else _GPU_BLOCK, count)

    def in_blocks(share: Share) -> None:
        scratch = torch.empty(3, block, dtype=torch.float32, device=device)  # once a share: fresh memory for each block would cost its page faults
        wide = torch.empty(block, dtype=torch.float64, device=device)
        state = [tensor for tensor in (weights, low, *moments) if tensor is not None]
        kept = [torch.empty(block if stop is not None else 0, dtype=tensor.dtype, device=device) for tensor in state]
        for start in range(*share, block):
            part = slice(start, min(start + block, share[1]))
            length = part.stop - part.start
            if stop is not None:
                for tensor, before in zip(state, kept, strict=True):
                    before[:length] = tensor[part]
            _update_block(*tensors(part), scratch[:, :length], wide[:length], scalars, clip, scale)
            if stop is not None:
                for tensor, before in zip(state, kept, strict=True):
                    torch.where(stop, before[:length], tensor[part], out=tensor[part])
            if copy_to is not None:
                copy_to[part] = weights[part]

    _on(device, workers)(in_blocks, count, block)


def _update_block(
    weights: torch.Tensor, low: torch.Tensor | None, first: torch.Tensor, second: torch.Tensor, gradient: torch.Tensor,
    temporaries: torch.Tensor, wide: torch.Tensor, scalars: Scalars, clip: torch.Tensor | None, scale: torch.Tensor | None,
) -> None:  # fmt: skip
    """The arithmetic, an operation at a time."""
    g, scratch, joined = temporaries
    master = weights if low is None else _join(weights, low, joined, scratch)
    g.copy_(gradient)
    if clip is not None:
        g.mul_(clip)
    if scale is not None:
        master.mul_(1 - scale * scalars.shrink)
    elif scalars.decay != 1:
        master.mul_(scalars.decay)
    first.mul_(scalars.beta1).add_(torch.mul(g, scalars.rest1, out=scratch))
    second.mul_(scalars.beta2).add_(torch.mul(g, g, out=scratch).mul_(scalars.rest2))
    denominator = scratch.copy_(wide.copy_(second).sqrt_()).mul_(scalars.root_scale).add_(scalars.epsilon)
    step = torch.mul(first, scalars.rate, out=g)
    if scale is not None:
        step.mul_(scale)
    master.sub_(step.div_(denominator))
    if low is not None:
        split(master, weights, low)


def accumulate(total: torch.Tensor, gradient: torch.Tensor, *, first: bool, workers: Workers | None = None) -> None:
    """`total` [n] = (first) or += `gradient` [n]; `total` is fp32, or of the gradient's dtype where it gets only one.

    Without `workers` it is PyTorch's, on as many threads as the calling one lets PyTorch have.
    """
    assert total.shape == gradient.shape
    if workers and (fused := _fused(workers, (total, torch.float32), (gradient, None))):
        fused.accumulate(total, gradient, first=first)
        return

    def work(share: Share) -> None:
        part = slice(*share)
        if first:
            total[part] = gradient[part]
        else:
            total[part] += gradient[part]

    _on(total.device, workers or ALONE)(work, len(total), _ROW)


def sum_of_squares(gradient: torch.Tensor, workers: Workers = ALONE) -> torch.Tensor:
    """Of `gradient` [n], 0-dimensional fp32: rows of 4096 folded in halves, then the rows' sums folded in halves.

    Adding halves elementwise fixes the order of additions whatever the device, the threads or the block; its rounding error grows with log n.
    """
    return _sum(gradient, workers, square=True)


def _sum(gradient: torch.Tensor, workers: Workers, *, square: bool) -> torch.Tensor:
    count, device = gradient.numel(), gradient.device
    rows = -(-count // _ROW)
    sums = torch.zeros(1 << (rows - 1).bit_length(), dtype=torch.float32, device=device)
    fused = _fused(workers, (gradient, None))
    if fused is not None:
        fused.row_sums(gradient, sums, square=square)
        return fused.fold(sums)
    block = min(4 * workers.cpu_block if device.type == "cpu" else _GPU_BLOCK, rows * _ROW)  # folding takes 24 small ops a block

    def work(share: Share) -> None:
        scratch = torch.empty(block, dtype=torch.float32, device=device)
        for start in range(*share, block):
            part = gradient[start : min(start + block, share[1])]
            squares = scratch[: -(-part.numel() // _ROW) * _ROW]
            squares[part.numel() :].zero_()
            squares[: part.numel()] = part
            folded = _fold((squares.mul_(squares) if square else squares).view(-1, _ROW))
            sums[start // _ROW : start // _ROW + folded.numel()] = folded

    _on(device, workers)(work, count, block)
    return _fold(sums.view(1, -1))[0]


def ratio_sums(gradient: torch.Tensor, second: torch.Tensor, sums: torch.Tensor, *, settings: AdamW, number: int, workers: Workers = ALONE) -> None:
    """Writes into `sums` [n / 64] fp32, for every 64 elements, the sum by halving of g^2 / max(v, epsilon^2): g of `gradient` [n] bf16 or fp32, v the
    second moment after step `number`, debiased, of which `second` [n] fp32 is what stands before. Nothing else is written. n is a multiple of 64.
    """
    count, device, scalars = gradient.numel(), gradient.device, Scalars.of(settings, 0.0, number)
    assert count % RATIO_ROW == 0
    assert (second.numel(), sums.numel()) == (count, count // RATIO_ROW), "a kernel would go beyond the shorter ones"
    fused = _fused(workers, (gradient, None), (second, torch.float32), (sums, torch.float32))
    if fused is not None:
        fused.ratio_sums(gradient, second, sums, scalars)
        return
    block = min(workers.cpu_block if device.type == "cpu" else _GPU_BLOCK, count)

    def in_blocks(share: Share) -> None:
        for start in range(*share, block):
            part = slice(start, min(start + block, share[1]))
            g = gradient[part].float()
            squares = g * g
            v = second[part] * scalars.beta2 + squares * scalars.rest2
            ratios = squares.div_(v.mul_(scalars.unbias).clamp_(min=scalars.floor))
            sums[start // RATIO_ROW : part.stop // RATIO_ROW] = _fold(ratios.view(-1, RATIO_ROW))

    _on(device, workers)(in_blocks, count, block)


def sum_by_rows(values: torch.Tensor) -> torch.Tensor:
    """Of fp32 `values`, 0-dimensional, in the order of additions of `ratio_sums` and `update_scales`."""
    padded = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % RATIO_ROW))
    return _sum(_fold(padded.view(-1, RATIO_ROW)).contiguous(), ALONE, square=False)


def update_scales(sums: Sequence[torch.Tensor], elements: torch.Tensor, workers: Workers = ALONE) -> torch.Tensor:
    """[tensors] fp32: what the learning rate of each of a layer's tensors is multiplied with, 1 / max(1, RMS), RMS the root of the mean of
    g^2 / max(v, epsilon^2) over its elements: StableAdamW (Wortsman et al., arXiv 2304.13013, algorithm 2).

    `sums`: of each tensor, by 64 elements, as `ratio_sums` writes them; what pads it adds 0. They are added as `sum_of_squares` adds. `elements`
    [tensors] fp32: how many it has without its padding. All are NaN where any RMS is not finite: a layer is updated whole or not at all.
    """
    rms = rounded_sqrt(torch.stack([_sum(part, workers, square=False) for part in sums]) / elements)
    return torch.ones_like(rms) / rms.clamp(min=1.0) + (rms * 0).sum()


def _fused(workers: Workers, *tensors: tuple[torch.Tensor | None, torch.dtype | None]) -> Kernels | None:
    """Kernels that take these tensors, each of its dtype (None: bf16 or fp32), if all lie contiguously on one device and there are any; on a host those of
    `workers`.
    """
    given = [(tensor, (torch.bfloat16, torch.float32) if dtype is None else (dtype,)) for tensor, dtype in tensors if tensor is not None]
    device = given[0][0].device
    usable = all(tensor.device == device and tensor.is_contiguous() and tensor.dtype in dtypes for tensor, dtypes in given)
    found = kernels(device) if usable else None
    return workers.kernels or found if isinstance(found, HostKernels) else found


def _on(device: torch.device, workers: Workers) -> Workers:
    """A GPU needs one thread to launch what it does."""
    return workers if device.type == "cpu" else ALONE


def _fold(values: torch.Tensor) -> torch.Tensor:
    """[r, 2^k] -> [r]: the sum of each row by halving, in place."""
    width = values.shape[1]
    while width > 1:
        width //= 2
        values[:, :width] += values[:, width : 2 * width]
    return values[:, 0]


def rounded_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Square roots of fp32 values, correctly rounded, by way of fp64: torch's fp32 root on a CPU is off by one unit for 6 values in 1,000, a GPU's is not."""
    return values.double().sqrt_().float()


def finite_or_nan(losses: list[torch.Tensor]) -> torch.Tensor:
    """1 where all `losses` (0-dimensional fp32) are finite, else NaN: as a factor on the gradient it stops the update."""
    return torch.stack(losses).mul(0).sum() + 1


def clip_coefficient(sums: list[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(factor, norm), 0-dimensional fp32: min(1, max_norm / (norm + 1e-6)) as torch's clip_grad_norm_, the norm over all layers' sums in their
    order. The factor is NaN where the norm is not finite.
    """
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    norm = rounded_sqrt(total)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) + norm * 0, norm
