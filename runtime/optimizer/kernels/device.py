"""The Triton kernels, for a CUDA GPU. This module imports Triton, which is installed with CUDA
builds of PyTorch.

bf16 elements are loaded as bits and rounded by integer arithmetic. Additions and products are not
fused (`enable_fp_fusion=False`), and divisions and roots are correctly rounded. Each program works
on one block. Only the last block has a mask, so that the loads of all others are wide for every
length. Kernels are not specialized for a length, so layers of different sizes share one compiled
kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # elements per program: eight per thread, which are 16 bytes of each 16-bit half
_ROW = 4096  # elements per row of a sum of squares, as in `adamw.py`
_RATIO_ROWS = 16  # rows of 64 elements per program
_WARPS = 4


@triton.jit
def _load(pointer, offsets, count, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(pointer + offsets)
    return tl.load(pointer + offsets, mask=offsets < count, other=0)


@triton.jit
def _store(pointer, offsets, values, count, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(pointer + offsets, values)
    else:
        tl.store(pointer + offsets, values, mask=offsets < count)


@triton.jit
def _fp32(values):
    """Returns fp32 values from bf16 bits (int16). fp32 values are returned unchanged."""
    if values.dtype == tl.int16:
        values = (values.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _adamw_block(
    weights,
    low,
    first,
    second,
    gradient,
    factor,
    copy_to,
    scale,
    count,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    root_scale,
    epsilon,
    rate,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Updates the block that the pointers point to. `count` elements are left."""
    offsets = tl.arange(0, BLOCK)
    master = _load(weights, offsets, count, WHOLE)
    if low is not None:
        residual = _load(low, offsets, count, WHOLE).to(tl.int32)
        master = ((master.to(tl.int32) << 16) + residual).to(tl.float32, bitcast=True)
    g = _fp32(_load(gradient, offsets, count, WHOLE)) * factor
    master = master * decay
    m = _load(first, offsets, count, WHOLE) * beta1 + g * rest1
    v = _load(second, offsets, count, WHOLE) * beta2 + (g * g) * rest2
    _store(first, offsets, m, count, WHOLE)
    _store(second, offsets, v, count, WHOLE)
    master = master - tl.div_rn(m * rate * scale, tl.sqrt_rn(v) * root_scale + epsilon)
    if low is not None:
        bits = master.to(tl.int32, bitcast=True)
        _store(low, offsets, bits.to(tl.int16), count, WHOLE)
        master = ((bits + 0x8000) >> 16).to(tl.int16)
    _store(weights, offsets, master, count, WHOLE)
    if copy_to is not None:
        _store(copy_to, offsets, master, count, WHOLE)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["clip", "scale"])
def _adamw(
    weights,
    low,
    first,
    second,
    gradient,
    clip,
    scale,
    copy_to,
    count,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    root_scale,
    epsilon,
    rate,
    shrink,
    BLOCK: tl.constexpr,
):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    left = count - start
    factor, part = 1.0, 1.0  # multiplying by 1 changes no bit
    if clip is not None:
        factor = tl.load(clip)
    if scale is not None:
        part = tl.load(scale)
        decay = 1.0 - part * shrink
    weights += start
    if low is not None:
        low += start
    if copy_to is not None:
        copy_to += start
    if factor != factor:
        return
    if part != part:
        return
    if left >= BLOCK:
        _adamw_block(
            weights,
            low,
            first + start,
            second + start,
            gradient + start,
            factor,
            copy_to,
            part,
            left,
            decay,
            beta1,
            rest1,
            beta2,
            rest2,
            root_scale,
            epsilon,
            rate,
            BLOCK,
            True,
        )
    else:
        _adamw_block(
            weights,
            low,
            first + start,
            second + start,
            gradient + start,
            factor,
            copy_to,
            part,
            left,
            decay,
            beta1,
            rest1,
            beta2,
            rest2,
            root_scale,
            epsilon,
            rate,
            BLOCK,
            False,
        )


@triton.jit
def _halved(values, WIDTH: tl.constexpr):
    """Adds the second half of `values` to the first, [WIDTH] to [WIDTH / 2]. `tl.sum` has a fixed
    result here, because it adds only two values.
    """
    return tl.sum(tl.reshape(values, (2, WIDTH // 2)), axis=0)


@triton.jit
def _row_sum(values):
    """Returns the sum of `values` [4096] by halving."""
    values = _halved(values, 4096)
    values = _halved(values, 2048)
    values = _halved(values, 1024)
    values = _halved(values, 512)
    values = _halved(values, 256)
    values = _halved(values, 128)
    values = _halved(values, 64)
    values = _halved(values, 32)
    values = _halved(values, 16)
    values = _halved(values, 8)
    values = _halved(values, 4)
    return tl.sum(values)


@triton.jit(do_not_specialize=["count"])
def _row_sums(gradient, sums, count, SQUARE: tl.constexpr):
    """Writes the sum of the row `program_id` of 4096 elements."""
    row = tl.program_id(0)
    start = row.to(tl.int64) * 4096
    offsets, left = tl.arange(0, 4096), count - start
    if left >= 4096:
        values = _fp32(_load(gradient + start, offsets, left, True))
    else:
        values = _fp32(_load(gradient + start, offsets, left, False))
    if SQUARE:
        values = values * values
    tl.store(sums + row, _row_sum(values))


@triton.jit
def _halved_rows(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Adds the second half of each row to the first, [ROWS, WIDTH] to [ROWS, WIDTH / 2]."""
    return tl.sum(tl.reshape(values, (ROWS, 2, WIDTH // 2)), axis=1)


@triton.jit(do_not_specialize=["count"])
def _ratio_sums(gradient, second, sums, count, beta2, rest2, unbias, floor, ROWS: tl.constexpr):
    """Writes the sums of ROWS rows of 64 elements. `count` is a multiple of 64."""
    start = tl.program_id(0).to(tl.int64) * (ROWS * 64)
    offsets, left = tl.arange(0, ROWS * 64), count - start
    g = _fp32(_load(gradient + start, offsets, left, False))
    squares = g * g
    v = (_load(second + start, offsets, left, False) * beta2 + squares * rest2) * unbias
    # `where`, not `maximum`, so that a NaN stays a NaN
    values = tl.reshape(tl.div_rn(squares, tl.where(v < floor, floor, v)), (ROWS, 64))
    values = _halved_rows(values, ROWS, 64)
    values = _halved_rows(values, ROWS, 32)
    values = _halved_rows(values, ROWS, 16)
    values = _halved_rows(values, ROWS, 8)
    values = _halved_rows(values, ROWS, 4)
    rows = tl.arange(0, ROWS)
    tl.store(sums + start // 64 + rows, tl.sum(values, axis=1), mask=rows * 64 < left)


class DeviceKernels:
    """Launches the kernels. Tensors are contiguous, on one CUDA device, and have the dtypes that
    the methods of `Kernels` require.
    """

    def adamw(
        self,
        weights: torch.Tensor,
        low: torch.Tensor | None,
        first: torch.Tensor,
        second: torch.Tensor,
        gradient: torch.Tensor,
        clip: torch.Tensor | None,
        scale: torch.Tensor | None,
        copy_to: torch.Tensor | None,
        scalars: Sequence[float],
    ) -> None:
        """Does the work of `adamw.update`. `scalars` have the order of `Scalars`. Triton passes
        Python's floats as fp32.
        """
        count = weights.numel()
        copy = None if copy_to is None else _bits(copy_to)
        _adamw[(triton.cdiv(count, _BLOCK),)](
            _bits(weights),
            low,
            first,
            second,
            _bits(gradient),
            clip,
            scale,
            copy,
            count,
            *scalars[:9],
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )

    def row_sums(self, gradient: torch.Tensor, sums: torch.Tensor, *, square: bool) -> None:
        """Writes to `sums` [rows] fp32 the sum of each 4096 elements of `gradient` [n] bf16 or
        fp32, or of their squares if `square`, by halving.
        """
        count = gradient.numel()
        _row_sums[(triton.cdiv(count, _ROW),)](
            _bits(gradient), sums, count, SQUARE=square, num_warps=_WARPS, enable_fp_fusion=False
        )

    def ratio_sums(
        self,
        gradient: torch.Tensor,
        second: torch.Tensor,
        sums: torch.Tensor,
        scalars: Sequence[float],
    ) -> None:
        """Does the work of `adamw.ratio_sums`, which writes the first n / 64 elements of `sums`.
        `gradient` is [n] bf16 or fp32 and `second` [n] fp32; n is a multiple of 64.
        """
        count = gradient.numel()
        _ratio_sums[(triton.cdiv(count, 64 * _RATIO_ROWS),)](
            _bits(gradient),
            second,
            sums,
            count,
            *scalars[3:5],
            *scalars[9:],
            ROWS=_RATIO_ROWS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )

    def fold(self, sums: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `sums` [2^k] fp32 by halving, as a 0-dimensional tensor. Overwrites
        `sums`.
        """
        width = sums.numel()
        while width > _ROW:
            width //= 2
            sums[:width] += sums[width : 2 * width]
        total = torch.empty(1, dtype=torch.float32, device=sums.device)
        _row_sums[(1,)](sums, total, width, SQUARE=False, num_warps=_WARPS, enable_fp_fusion=False)
        return total[0]

    def accumulate(self, total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
        """Copies `gradient` [n] bf16 or fp32 to `total` [n] fp32 if `first`, and adds it otherwise.
        PyTorch already does this in one pass.
        """
        if first:
            total.copy_(gradient)
        else:
            total.add_(gradient)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
