"""The Triton kernels, for a CUDA GPU. This module imports Triton, which is installed with CUDA
builds of PyTorch.

bf16 elements are loaded as bits and rounded by integer arithmetic. Additions and products are not
fused (`enable_fp_fusion=False`), and divisions and roots are correctly rounded. Each program works
on one block. Only the last block is masked, so all other blocks use wide loads. Kernels are not
specialized for a length, so layers of different sizes share a compiled kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # elements per program: eight per thread, which are 16 bytes of each 16-bit half
_RECORDS = 32  # records of 32 parameters per program
_ROW = 4096  # elements per row of a sum of squares, as in `adamw.py`
_RATIO_ROWS = 16  # rows of 64 elements per program
_SUM_BLOCK = 2048  # elements per program of a sum of parts
_WARPS = 4
_ROW_WARPS = 1  # one warp per row of a sum: no exchange between warps


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
    """Updates the block at the pointers. `count` is the number of elements from there on."""
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
def _random_bits(state, RECORDS: tl.constexpr):
    """Returns 16 random bits for each parameter, [records, 32] int32, as in
    `blockwise.random_bits`. `state` is the state of the generator before the first parameter.
    """
    number = tl.arange(0, RECORDS * 8).to(tl.uint64) + 1
    words = state + number * 0x9E3779B97F4A7C15
    words = (words ^ (words >> 30)) * 0xBF58476D1CE4E5B9
    words = (words ^ (words >> 27)) * 0x94D049BB133111EB
    words = words ^ (words >> 31)
    bits = (words[:, None] >> (tl.arange(0, 4).to(tl.uint64) * 16)[None, :]) & 0xFFFF
    return tl.reshape(bits.to(tl.int32), (RECORDS, 32))


@triton.jit
def _scale_of(values):
    """Returns the scales of the records of `values` [records, 32] fp32: their bits as bf16,
    [records, 1] int32, and their values, [records, 1] fp32.
    """
    most = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)[:, None]
    most = (tl.minimum(most, 0x7F800000) + 0xFFFF) >> 16  # could overflow for a NaN
    bits = tl.where(most > 0x7B00, 0x7FC0, tl.where(most < 0x0080, 0, most))
    return bits, (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _blockwise_block(
    weights,
    low,
    first,
    second,
    gradient,
    factor,
    copy_to,
    scale,
    left,
    decay,
    beta1,
    rest1,
    beta2,
    rest2,
    root_scale,
    epsilon,
    rate,
    weights_state,
    second_state,
    RECORDS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Updates the records at the pointers. `left` is the number of records from there on."""
    record, inside = tl.arange(0, RECORDS)[:, None], tl.arange(0, 32)[None, :]
    offsets, count = record * 32 + inside, left * 32
    codes, size = record * 34 + inside, left * 34
    scales = record * 17 + 16  # in 16-bit units
    half = tl.pointer_type(tl.int16)
    first_scales, second_scales = first.to(half), second.to(half)

    code = _load(first, codes, size, WHOLE).to(tl.float32)
    unit = _fp32(_load(first_scales, scales, left * 17, WHOLE))
    m = tl.div_rn(code * unit, 254.0 - tl.abs(code))
    unit = _fp32(_load(second_scales, scales, left * 17, WHOLE)) * (1.0 / 255)
    v = _load(second, codes, size, WHOLE).to(tl.float32) * unit
    v = v * v
    master = _load(weights, offsets, count, WHOLE).to(tl.int32) << 16
    if low is not None:
        master += _load(low, offsets, count, WHOLE).to(tl.int32) << 8
    master = master.to(tl.float32, bitcast=True)

    g = _fp32(_load(gradient, offsets, count, WHOLE)) * factor
    master = master * decay
    m = m * beta1 + g * rest1
    v = v * beta2 + (g * g) * rest2
    root = tl.sqrt_rn(v)
    master = master - tl.div_rn(m * rate * scale, root * root_scale + epsilon)

    bits, unit = _scale_of(m)
    coded = (bits != 0) & (bits != 0x7FC0)
    # after the addition of 1.5 * 2^23, the last bits are the nearest integer
    code = tl.div_rn(m * 254.0, unit + tl.abs(m)) + 12582912.0
    code = tl.where(coded, code.to(tl.int32, bitcast=True), 0)
    _store(first, codes, code.to(tl.int8), size, WHOLE)
    _store(first_scales, scales, bits.to(tl.int16), left * 17, WHOLE)

    bits, unit = _scale_of(root)
    coded = (bits != 0) & (bits != 0x7FC0) & (root > 0)
    random = _random_bits(second_state, RECORDS).to(tl.float32) * (1.0 / 65536)
    code = random + root * tl.div_rn(255.0, unit)
    # The code is clamped first, because the conversion to an integer requires finite numbers.
    code = tl.where(code < 1.0, 1.0, tl.where(code < 255.0, code, 255.0)).to(tl.int32)
    _store(second, codes, tl.where(coded, code, 0).to(tl.uint8), size, WHOLE)
    _store(second_scales, scales, bits.to(tl.int16), left * 17, WHOLE)

    random = _random_bits(weights_state, RECORDS)
    bits = master.to(tl.int32, bitcast=True)
    if low is not None:
        random = random & 0xFF
    # an addition could turn a NaN into another number
    bits = tl.where(master != master, 0x7FC00000, bits + random)
    if low is not None:
        bits = bits >> 8
        _store(low, offsets, bits.to(tl.int8), count, WHOLE)
        high = ((bits + 0x80) >> 8).to(tl.int16)
    else:
        high = (bits >> 16).to(tl.int16)
    _store(weights, offsets, high, count, WHOLE)
    if copy_to is not None:
        _store(copy_to, offsets, high, count, WHOLE)


@triton.jit(
    do_not_specialize=["count", "weights_state", "second_state"],
    do_not_specialize_on_alignment=["clip", "scale"],
)
def _blockwise(
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
    weights_state: tl.int64,
    second_state: tl.int64,
    RECORDS: tl.constexpr,
):
    """Updates the RECORDS records of this program, of `count` in total."""
    start = tl.program_id(0).to(tl.int64) * RECORDS
    left = count - start
    factor, part = 1.0, 1.0  # multiplying by 1 changes no bit
    if clip is not None:
        factor = tl.load(clip)
    if scale is not None:
        part = tl.load(scale)
        decay = 1.0 - part * shrink
    weights += start * 32
    if low is not None:
        low += start * 32
    if copy_to is not None:
        copy_to += start * 32
    if factor != factor:
        return
    if part != part:
        return
    passed = start.to(tl.uint64) * 8 * 0x9E3779B97F4A7C15
    if left >= RECORDS:
        _blockwise_block(
            weights,
            low,
            first + start * 34,
            second + start * 34,
            gradient + start * 32,
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
            weights_state.to(tl.uint64) + passed,
            second_state.to(tl.uint64) + passed,
            RECORDS,
            True,
        )
    else:
        _blockwise_block(
            weights,
            low,
            first + start * 34,
            second + start * 34,
            gradient + start * 32,
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
            weights_state.to(tl.uint64) + passed,
            second_state.to(tl.uint64) + passed,
            RECORDS,
            False,
        )


@triton.jit
def _halved(values, WIDTH: tl.constexpr):
    """Returns the first half of `values` [WIDTH] plus the second half: [WIDTH / 2]. The order of
    additions in `tl.sum` does not matter, because each sum has only two terms.
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
    """Writes the sum of the row of this program, which has 4096 elements."""
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
def _sum_parts_block(
    total,
    parts,
    offsets,
    left,
    outer_stride,
    inner_stride,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    FIRST: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Adds one block of all parts in order. The block starts at `total` and `parts`."""
    if FIRST:
        values = _fp32(_load(parts, offsets, left, WHOLE))
    else:
        values = _load(total, offsets, left, WHOLE) + _fp32(_load(parts, offsets, left, WHOLE))
    for number in tl.static_range(1, OUTER * INNER):
        # Triton passes a stride of 1 as a constant, and small strides as 32 bits.
        outer, inner = tl.full((), number // INNER, tl.int64), tl.full((), number % INNER, tl.int64)
        part = parts + outer * outer_stride + inner * inner_stride
        values += _fp32(_load(part, offsets, left, WHOLE))
    _store(total, offsets, values, left, WHOLE)


@triton.jit(do_not_specialize=["count"])
def _sum_parts(
    total,
    parts,
    count,
    outer_stride,
    inner_stride,
    OUTER: tl.constexpr,
    INNER: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds OUTER x INNER parts of `count` elements to `total`, in the order of their indices."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offsets, left = tl.arange(0, BLOCK), count - start
    total, parts = total + start, parts + start
    if left >= BLOCK:
        _sum_parts_block(
            total, parts, offsets, left, outer_stride, inner_stride, OUTER, INNER, FIRST, True
        )
    else:
        _sum_parts_block(
            total, parts, offsets, left, outer_stride, inner_stride, OUTER, INNER, FIRST, False
        )


@triton.jit
def _halved_rows(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns the halves of each row of `values` [ROWS, WIDTH] added: [ROWS, WIDTH / 2]."""
    return tl.sum(tl.reshape(values, (ROWS, 2, WIDTH // 2)), axis=1)


@triton.jit
def _second_moments(stored, offsets, count):
    """Decodes and returns the second moments [n] fp32 of the parameters at `offsets` [n]."""
    record = offsets // 32
    scales = stored.to(tl.pointer_type(tl.int16)) + (record * 17 + 16)
    unit = _fp32(tl.load(scales, mask=offsets < count, other=0)) * (1.0 / 255)
    codes = tl.load(stored + (offsets + record * 2), mask=offsets < count, other=0)
    root = codes.to(tl.float32) * unit
    return root * root


@triton.jit(do_not_specialize=["count"])
def _ratio_sums(gradient, second, sums, count, beta2, rest2, unbias, floor, ROWS: tl.constexpr):
    """Writes the sums of ROWS rows of 64 elements. `count` must be a multiple of 64."""
    start = tl.program_id(0).to(tl.int64) * (ROWS * 64)
    offsets, left = tl.arange(0, ROWS * 64), count - start
    g = _fp32(_load(gradient + start, offsets, left, False))
    squares = g * g
    if second.dtype.element_ty == tl.uint8:
        v = _second_moments(second + start // 32 * 34, offsets, left)
    else:
        v = _load(second + start, offsets, left, False)
    v = (v * beta2 + squares * rest2) * unbias
    # `where` instead of `maximum`, so a NaN stays a NaN
    values = tl.reshape(tl.div_rn(squares, tl.where(v < floor, floor, v)), (ROWS, 64))
    values = _halved_rows(values, ROWS, 64)
    values = _halved_rows(values, ROWS, 32)
    values = _halved_rows(values, ROWS, 16)
    values = _halved_rows(values, ROWS, 8)
    values = _halved_rows(values, ROWS, 4)
    rows = tl.arange(0, ROWS)
    tl.store(sums + start // 64 + rows, tl.sum(values, axis=1), mask=rows * 64 < left)


class DeviceKernels:
    """The `Kernels` in Triton. All tensors of a call must be on one CUDA device. Triton passes
    floats as fp32.
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

    def blockwise_adamw(
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
        states: tuple[int, int],
    ) -> None:
        records = weights.numel() // 32
        _blockwise[(triton.cdiv(records, _RECORDS),)](
            _bits(weights),
            low,
            first.view(torch.int8),
            second,
            _bits(gradient),
            clip,
            scale,
            None if copy_to is None else _bits(copy_to),
            records,
            *scalars[:9],
            *states,
            RECORDS=_RECORDS,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )

    def row_sums(self, gradient: torch.Tensor, sums: torch.Tensor, *, square: bool) -> None:
        count = gradient.numel()
        _row_sums[(triton.cdiv(count, _ROW),)](
            _bits(gradient),
            sums,
            count,
            SQUARE=square,
            num_warps=_ROW_WARPS,
            enable_fp_fusion=False,
        )

    def ratio_sums(
        self,
        gradient: torch.Tensor,
        second: torch.Tensor,
        sums: torch.Tensor,
        scalars: Sequence[float],
    ) -> None:
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
        width = sums.numel()
        while width > _ROW:
            width //= 2
            sums[:width] += sums[width : 2 * width]
        total = torch.empty(1, dtype=torch.float32, device=sums.device)
        _row_sums[(1,)](sums, total, width, SQUARE=False, num_warps=_WARPS, enable_fp_fusion=False)
        return total[0]

    def accumulate(self, total: torch.Tensor, gradient: torch.Tensor, *, first: bool) -> None:
        # PyTorch already does this in one pass over memory
        if first:
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def sum_parts(self, total: torch.Tensor, parts: torch.Tensor, *, first: bool) -> None:
        # One kernel instead of one for each part: beside compute, each kernel waits for a matrix
        # product (experiments/results/h200-x4).
        count = total.numel()
        _sum_parts[(triton.cdiv(count, _SUM_BLOCK),)](
            total,
            _bits(parts),
            count,
            *parts.stride()[:2],
            OUTER=parts.shape[0],
            INNER=parts.shape[1],
            FIRST=first,
            BLOCK=_SUM_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of a bf16 tensor as int16, and any other tensor unchanged."""
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
