"""AdamW on fp32 masters that are stored as two 16-bit halves, and gradient clipping. All results
have the same bits on every device.

The high half of a master is the bf16 weight that layers compute with: the master rounded to
nearest, ties away from zero. The low half is the signed 16-bit residual, so that `master bits =
(high << 16) + low`. With ties to even, a residual could be +0x8000, which does not fit in 16 bits.
With fp32 compute there is one fp32 weight and no low half.

Results do not depend on the device, the number of threads or the block size. Each fp32 operation
rounds its result: there is no fused multiply-add. The order of additions in a reduction is fixed.
The PyTorch code in this module defines the arithmetic and runs on every device. The kernels in
`runtime/optimizer/kernels/` compute the same bits in one pass over memory. They need a C compiler
or Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from megatrain.runtime.optimizer.kernels.choice import Kernels, kernels
from megatrain.runtime.optimizer.kernels.host import BLOCK, HostKernels
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.schedule.arithmetic import NORM_ROW as _ROW
from megatrain.simulator.schedule.arithmetic import RATIO_ROW

_TINY = 2.0**-126
"""The smallest normal fp32 number. As a lower limit, it keeps divisors from being 0."""
_GPU_BLOCK = 2**24
"""Elements of a block on a GPU: a temporary has 64 MiB, and launches take negligible time."""
Share = tuple[int, int]
"""The start and end of a range of elements."""


def split(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Splits `master` [n] fp32 into `high` [n] bf16 and `low` [n] int16. Values must be finite and
    below 3.39e38.

    If `low` is int8, the master is first rounded to 24 bits, ties away from zero, and `low`
    receives the upper 8 bits of the low half. In this case, a NaN stays a NaN.
    """
    bits = master.view(torch.int32)
    if low.dtype == torch.int8:
        rounded = torch.where(master.isnan(), 0x7FC0_0000, bits).add_(0x80).bitwise_right_shift_(8)
        low.copy_(rounded)
        high.view(torch.int16).copy_(rounded.add_(0x80).bitwise_right_shift_(8))
        return
    low.copy_(master.view(torch.int16)[0::2])  # little endian: the low half is first
    high.view(torch.int16).copy_((bits + 0x8000).view(torch.int16)[1::2])


def join(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Returns the fp32 master [n] whose halves are `high` [n] bf16 and `low` [n] int16 or int8."""
    return join_into(
        high, low, *torch.empty(2, high.numel(), dtype=torch.float32, device=high.device)
    )


def join_into(
    high: torch.Tensor, low: torch.Tensor, master: torch.Tensor, scratch: torch.Tensor
) -> torch.Tensor:
    """Joins `high` and `low` as `join` does, writes the result to `master` [n] fp32, and returns
    `master`. Overwrites `scratch` [n] fp32.
    """
    bits, residual = master.view(torch.int32), scratch.view(torch.int32)
    residual.copy_(low)
    if low.dtype == torch.int8:
        residual.bitwise_left_shift_(8)
    bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(residual)
    return master


def round_to_bf16(master: torch.Tensor) -> torch.Tensor:
    """Returns the high half of `master` fp32, as bf16 of the same shape."""
    high, low = (
        torch.empty_like(master, dtype=torch.bfloat16),
        torch.empty_like(master, dtype=torch.int16),
    )
    split(master.reshape(-1), high.view(-1), low.view(-1))
    return high


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns `values` as `dtype`, bf16 or fp32. Rounds to bf16 as `round_to_bf16` does."""
    narrower = (values.dtype, dtype) == (torch.float32, torch.bfloat16)
    return round_to_bf16(values) if narrower else values.to(dtype)


class Workers:
    """Runs elementwise work on the calling thread. The base class of `WorkerThreads`."""

    cpu_block = 2**17
    """Elements of a block on the CPU: three temporaries of 0.5 MiB, which fit in an L2 cache."""
    kernels: HostKernels | None = None
    """The C kernels with threads of their own. None means that work runs on the calling thread."""

    def __call__(self, work: Callable[[Share], object], count: int, block: int) -> None:
        """Calls `work` on ranges that cover `count` elements. The length of each range except the
        last is a multiple of `block`. The results for the ranges must not depend on each other.
        """
        work((0, count))

    def close(self) -> None:
        """Ends the threads, if there are any."""


class WorkerThreads(Workers):
    """Runs elementwise work on several threads. The C kernels have threads of their own. Work
    without kernels runs on Python threads, and PyTorch uses one thread in each.
    """

    cpu_block = 2**20
    """Elements of a block. Smaller blocks make threads wait for the GIL: with 2**17, 16 threads
    reach 0.3 instead of 1.3 G updates/s (Xeon of an H200 machine)."""

    def __init__(self, threads: int, block: int = BLOCK) -> None:
        """`block` is the number of elements that a thread of the C kernels takes at a time."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(
            threads,
            thread_name_prefix="optimizer",
            initializer=torch.set_num_threads,
            initargs=(1,),
        )
        available = kernels(torch.device("cpu"))
        self.kernels = available.on(threads, block) if isinstance(available, HostKernels) else None

    def __call__(self, work: Callable[[Share], object], count: int, block: int) -> None:
        size = -(-count // (block * self._threads)) * block
        list(
            self._pool.map(
                work, [(start, min(start + size, count)) for start in range(0, count, size)]
            )
        )

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        if self.kernels is not None:
            self.kernels.close()


ALONE = Workers()
"""Runs work on the calling thread."""


def workers(threads: int) -> Workers:
    """Returns the workers of a host lane with `threads` threads. Compiles the C kernels if
    necessary, so a timed op does not include the compilation.
    """
    kernels(torch.device("cpu"))
    return WorkerThreads(threads) if threads > 1 else Workers()


class Scalars(NamedTuple):
    """The scalars of an AdamW step. They are rounded to fp32 when combined with a tensor."""

    decay: float
    """1 - learning rate * weight decay"""
    beta1: float
    """Decay rate of the first moment."""
    rest1: float
    """1 - beta1"""
    beta2: float
    """Decay rate of the second moment."""
    rest2: float
    """1 - beta2"""
    root_scale: float
    """Bias correction of the root of the second moment: `unbias**0.5`."""
    epsilon: float
    """Added to the root of the second moment."""
    rate: float
    """Learning rate with the bias correction of the first moment: rate / (1 - beta1**number)."""
    shrink: float
    """Learning rate * weight decay."""
    unbias: float
    """Bias correction of the second moment: 1 / (1 - beta2**number)."""
    floor: float
    """Lower limit of the second moment as a divisor: epsilon**2, or the least normal fp32
    number."""

    @classmethod
    def of(
        cls, settings: AdamW, rate: float, number: int, weight_decay: float | None = None
    ) -> Scalars:
        """Returns the scalars of step `number`, counted from 1, at learning rate `rate`.
        `weight_decay` replaces the weight decay of the settings.

        Tensors are never divided by a scalar, because a GPU would multiply by the reciprocal and a
        CPU would not.
        """
        beta1, beta2 = settings.betas
        shrink, unbias = (
            rate * (settings.weight_decay if weight_decay is None else weight_decay),
            1 / (1 - beta2**number),
        )
        floor = max(settings.epsilon**2, _TINY)
        return cls(
            1 - shrink,
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            unbias**0.5,
            settings.epsilon,
            rate / (1 - beta1**number),
            shrink,
            unbias,
            floor,
        )


def update(
    weights: torch.Tensor,
    low: torch.Tensor | None,
    moments: torch.Tensor | Sequence[torch.Tensor],
    gradient: torch.Tensor,
    *,
    settings: AdamW,
    rate: float,
    number: int,
    clip: torch.Tensor | None,
    workers: Workers = ALONE,
    weight_decay: float | None = None,
    copy_to: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> None:
    """Does one AdamW update in place. The tensors may be any range of the elements of a layer.

    If `clip` or `scale` is NaN, weights and moments do not change.

    Args:
        weights: The high halves of the masters, [n] bf16, or fp32 weights if `low` is None.
        low: The low halves of the masters, [n] int16, or None.
        moments: The first and second moments, [2, n] fp32 or two [n] fp32 tensors.
        gradient: The gradient, [n] bf16 or fp32.
        settings: The hyperparameters.
        rate: The learning rate.
        number: The number of this step, counted from 1.
        clip: Factor on the gradient, 0-dimensional fp32 on the same device. None means 1.
        workers: Threads to use on the CPU.
        weight_decay: Replaces the weight decay of the settings.
        copy_to: Also receives the new weights, [n] with the dtype of `weights`.
        scale: Factor on the learning rate of both the step and the weight decay, 0-dimensional fp32
            on the same device. None means 1.
    """
    count, device = weights.numel(), weights.device
    scalars = Scalars.of(settings, rate, number, weight_decay)
    dtype = torch.float32 if low is None else torch.bfloat16
    runs = [
        (weights, dtype),
        (low, torch.int16),
        (moments[0], torch.float32),
        (moments[1], torch.float32),
        (gradient, None),
        (copy_to, dtype),
    ]
    assert all(tensor is None or tensor.shape == (count,) for tensor, _ in runs), (
        "a kernel would write past the end of the shorter tensors"
    )
    fused = kernels_for(workers, *runs, (clip, torch.float32), (scale, torch.float32))
    if fused is not None:
        fused.adamw(weights, low, moments[0], moments[1], gradient, clip, scale, copy_to, scalars)
        return
    stops = [factor.isnan() for factor in (clip, scale) if factor is not None]
    # a tensor, because reading its value would wait for the GPU
    stop = stops[0] | stops[-1] if stops else None
    block = min(workers.cpu_block if device.type == "cpu" else _GPU_BLOCK, count)

    def in_blocks(share: Share) -> None:
        # Temporaries are allocated once for all blocks, because new memory causes page faults.
        scratch = torch.empty(3, block, dtype=torch.float32, device=device)
        wide = torch.empty(block, dtype=torch.float64, device=device)
        state = [tensor for tensor in (weights, low, *moments) if tensor is not None]
        kept = [
            torch.empty(block if stop is not None else 0, dtype=tensor.dtype, device=device)
            for tensor in state
        ]
        for start in range(*share, block):
            part = slice(start, min(start + block, share[1]))
            length = part.stop - part.start
            if stop is not None:
                for tensor, before in zip(state, kept, strict=True):
                    before[:length] = tensor[part]
            update_block(
                weights[part],
                None if low is None else low[part],
                moments[0][part],
                moments[1][part],
                gradient[part],
                scratch[:, :length],
                wide[:length],
                scalars,
                clip,
                scale,
            )
            if stop is not None:
                for tensor, before in zip(state, kept, strict=True):
                    torch.where(stop, before[:length], tensor[part], out=tensor[part])
            if copy_to is not None:
                copy_to[part] = weights[part]

    on_device(device, workers)(in_blocks, count, block)


def update_block(
    weights: torch.Tensor,
    low: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor,
    temporaries: torch.Tensor,
    wide: torch.Tensor,
    scalars: Scalars,
    clip: torch.Tensor | None,
    scale: torch.Tensor | None,
) -> None:
    """Updates one block in place. This defines the arithmetic of `update`.

    The arguments are those of `update`. `temporaries` [3, n] fp32 and `wide` [n] fp64 are
    overwritten.
    """
    g, scratch, joined = temporaries
    master = weights if low is None else join_into(weights, low, joined, scratch)
    g.copy_(gradient)
    if clip is not None:
        g.mul_(clip)
    if scale is not None:
        master.mul_(1 - scale * scalars.shrink)
    elif scalars.decay != 1:
        master.mul_(scalars.decay)
    first.mul_(scalars.beta1).add_(torch.mul(g, scalars.rest1, out=scratch))
    second.mul_(scalars.beta2).add_(torch.mul(g, g, out=scratch).mul_(scalars.rest2))
    denominator = (
        scratch.copy_(wide.copy_(second).sqrt_()).mul_(scalars.root_scale).add_(scalars.epsilon)
    )
    step = torch.mul(first, scalars.rate, out=g)
    if scale is not None:
        step.mul_(scale)
    master.sub_(step.div_(denominator))
    if low is not None:
        split(master, weights, low)


def accumulate(
    total: torch.Tensor, gradient: torch.Tensor, *, first: bool, workers: Workers | None = None
) -> None:
    """Copies `gradient` [n] to `total` [n] if `first`, and adds it otherwise.

    `total` is fp32, or has the dtype of `gradient` if it receives only one gradient. Without
    `workers`, PyTorch does the work with the threads of the calling thread.
    """
    assert total.shape == gradient.shape
    if workers and (fused := kernels_for(workers, (total, torch.float32), (gradient, None))):
        fused.accumulate(total, gradient, first=first)
        return

    def work(share: Share) -> None:
        part = slice(*share)
        if first:
            total[part] = gradient[part]
        else:
            total[part] += gradient[part]

    on_device(total.device, workers or ALONE)(work, len(total), _ROW)


def sum_parts(total: torch.Tensor, parts: torch.Tensor, *, first: bool) -> None:
    """Adds the rows of `parts` [a, b, n] to `total` [n], in the order of their indices. With
    `first`, the first row is copied to `total` instead, and the others are added.

    `total` and `parts` are as `total` and `gradient` of `accumulate`. The result has the bits of
    `accumulate` for one row after the other.
    """
    fused = kernels_for(ALONE, (total, torch.float32), (parts[0, 0], None))
    if fused is not None:
        fused.sum_parts(total, parts, first=first)
        return
    for number, part in enumerate(part for rows in parts for part in rows):
        accumulate(total, part, first=first and number == 0)


def sum_of_squares(gradient: torch.Tensor, workers: Workers = ALONE) -> torch.Tensor:
    """Returns the sum of squares of `gradient` [n], as a 0-dimensional fp32 tensor.

    Each row of 4096 elements is summed by halving: the second half is added to the first half until
    one value is left. The sums of the rows are added in the same way. So the order of additions
    does not depend on the device, the number of threads or the block size. The rounding error grows
    with log n.
    """
    return _sum(gradient, workers, square=True)


def sums_of_squares(matrices: torch.Tensor) -> torch.Tensor:
    """Returns the `sum_of_squares` of each row of `matrices` [r, n], which must be contiguous. The
    result is [r] fp32.

    If n is a multiple of 4096, the number of launched kernels does not depend on r.
    """
    count, length = matrices.shape
    if length % _ROW:
        return torch.stack([sum_of_squares(matrix) for matrix in matrices])
    parts = _row_sums(matrices.view(-1), ALONE, square=True)[: count * length // _ROW]
    parts = parts.view(count, -1)
    padded = 1 << (parts.shape[1] - 1).bit_length()
    return _fold(torch.nn.functional.pad(parts, (0, padded - parts.shape[1])))


def row_sums(gradient: torch.Tensor, sums: torch.Tensor) -> None:
    """Writes the sum of squares of each row of 4096 elements of `gradient` [n] to the first
    elements of `sums` [rows] fp32. The last row may be shorter.
    """
    rows = -(-gradient.numel() // _ROW)
    sums[:rows].copy_(_row_sums(gradient, ALONE, square=True)[:rows])


def sum_of_rows(sums: torch.Tensor) -> torch.Tensor:
    """Returns the `sum_of_squares` of a gradient whose `row_sums` are `sums` [rows] fp32."""
    rows = len(sums)
    padded = torch.nn.functional.pad(sums, (0, (1 << (rows - 1).bit_length()) - rows))
    return _fold(padded.view(1, -1))[0]


def _sum(gradient: torch.Tensor, workers: Workers, *, square: bool) -> torch.Tensor:
    sums = _row_sums(gradient, workers, square=square)
    fused = kernels_for(workers, (gradient, None))
    return _fold(sums.view(1, -1))[0] if fused is None else fused.fold(sums)


def _row_sums(gradient: torch.Tensor, workers: Workers, *, square: bool) -> torch.Tensor:
    """Returns the sum of each row of 4096 elements of `gradient` [n], or the sum of their squares.
    The result is fp32, and its length is padded with zeros to a power of two.
    """
    count, device = gradient.numel(), gradient.device
    rows = -(-count // _ROW)
    sums = torch.zeros(1 << (rows - 1).bit_length(), dtype=torch.float32, device=device)
    fused = kernels_for(workers, (gradient, None))
    if fused is not None:
        fused.row_sums(gradient, sums, square=square)
        return sums
    # larger blocks than in `update`, because halving takes 24 small ops for each block
    block = min(4 * workers.cpu_block if device.type == "cpu" else _GPU_BLOCK, rows * _ROW)

    def work(share: Share) -> None:
        scratch = torch.empty(block, dtype=torch.float32, device=device)
        for start in range(*share, block):
            part = gradient[start : min(start + block, share[1])]
            squares = scratch[: -(-part.numel() // _ROW) * _ROW]
            squares[part.numel() :].zero_()
            squares[: part.numel()] = part
            folded = _fold((squares.mul_(squares) if square else squares).view(-1, _ROW))
            sums[start // _ROW : start // _ROW + folded.numel()] = folded

    on_device(device, workers)(work, count, block)
    return sums


def ratio_sums(
    gradient: torch.Tensor,
    second: torch.Tensor,
    sums: torch.Tensor,
    *,
    settings: AdamW,
    number: int,
    workers: Workers = ALONE,
) -> None:
    """Writes the sum of g^2 / max(v, epsilon^2) over each row of 64 elements to `sums` [n / 64]
    fp32. Rows are summed by halving. n must be a multiple of 64.

    g is `gradient` [n] bf16 or fp32. v is the bias-corrected second moment after step `number`. It
    is computed from `second` [n] fp32, the second moment before the step, which does not change.
    """
    count, device, scalars = gradient.numel(), gradient.device, Scalars.of(settings, 0.0, number)
    assert count % RATIO_ROW == 0
    assert (second.numel(), sums.numel()) == (count, count // RATIO_ROW), (
        "a kernel would read past the end of the shorter tensors"
    )
    fused = kernels_for(workers, (gradient, None), (second, torch.float32), (sums, torch.float32))
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

    on_device(device, workers)(in_blocks, count, block)


def update_scales(
    sums: Sequence[torch.Tensor], elements: torch.Tensor, workers: Workers = ALONE
) -> torch.Tensor:
    """Returns the factors on the learning rate of each tensor of a layer, [tensors] fp32.

    A factor is 1 / max(1, RMS). RMS is the root of the mean of g^2 / max(v, epsilon^2) over the
    tensor's elements, as in StableAdamW (Wortsman et al., arXiv 2304.13013, algorithm 2). If any
    RMS is not finite, all factors are NaN, which stops the update of the whole layer.

    Args:
        sums: For each tensor, the sums that `ratio_sums` writes, [padded elements / 64] fp32.
            Padding contributes 0. They are added in the order of `sum_of_squares`.
        elements: [tensors] fp32, the number of elements of each tensor without padding.
        workers: Threads to use on the CPU.
    """
    rms = rounded_sqrt(torch.stack([_sum(part, workers, square=False) for part in sums]) / elements)
    return torch.ones_like(rms) / rms.clamp(min=1.0) + (rms * 0).sum()


def kernels_for(
    workers: Workers, *tensors: tuple[torch.Tensor | None, torch.dtype | None]
) -> Kernels | None:
    """Returns the kernels for these tensors, or None if PyTorch has to do the work: there are no
    kernels, a tensor has another dtype, or tensors are not contiguous or not on one device.

    Each tensor comes with its required dtype. A dtype of None means bf16 or fp32. On the CPU, the
    kernels of `workers` are preferred.
    """
    present = [
        (tensor, (torch.bfloat16, torch.float32) if dtype is None else (dtype,))
        for tensor, dtype in tensors
        if tensor is not None
    ]
    device = present[0][0].device
    usable = all(
        tensor.device == device and tensor.is_contiguous() and tensor.dtype in dtypes
        for tensor, dtypes in present
    )
    available = kernels(device) if usable else None
    return workers.kernels or available if isinstance(available, HostKernels) else available


def on_device(device: torch.device, workers: Workers) -> Workers:
    """Returns `workers` for the CPU. For a GPU, returns `ALONE`: one thread launches kernels."""
    return workers if device.type == "cpu" else ALONE


def _fold(values: torch.Tensor) -> torch.Tensor:
    """Returns the sums of the rows of `values` [r, 2^k], by halving: [r]. Overwrites `values`."""
    width = values.shape[1]
    while width > 1:
        width //= 2
        values[:, :width] += values[:, width : 2 * width]
    return values[:, 0]


def rounded_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Returns the correctly rounded square roots of fp32 values. They are computed in fp64, because
    the last bit of PyTorch's fp32 root on a CPU is wrong for 6 of 1,000 values.
    """
    return values.double().sqrt_().float()


def finite_or_nan(losses: list[torch.Tensor]) -> torch.Tensor:
    """Returns 1 if all `losses` (0-dimensional fp32) are finite, and NaN otherwise. As a factor on
    the gradient, NaN stops the update.
    """
    return torch.stack(losses).mul(0).sum() + 1


def clip_coefficient(
    sums: list[torch.Tensor], max_norm: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the factor on the gradients and the norm before clipping, both 0-dimensional fp32.

    The norm is the square root of the total of `sums`, the sums of squares of the layers, which are
    added in this order. The factor is min(1, max_norm / (norm + 1e-6)), as in
    `torch.nn.utils.clip_grad_norm_`. It is NaN if the norm is not finite.
    """
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    norm = rounded_sqrt(total)
    return (max_norm / (norm + 1e-6)).clamp(max=1.0) + norm * 0, norm
