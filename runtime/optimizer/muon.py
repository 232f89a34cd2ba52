"""Muon: updates matrices by their orthogonalised momentum. `simulator/model/muon.py` has the
tensors that Muon updates and the memory and time of an update.

With momentum m, gradient g and mu = 0.95, an update of one matrix is

    m = mu m + (1 - mu) g
    X = orthogonal(mu m + (1 - mu) g)
    w = (1 - rate weight_decay) w - 0.2 sqrt(max(rows, columns)) rate X

This is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`. X is bf16, and everything else is
fp32 with separately rounded operations. The result does not depend on the plan: a group of matrices
always has the same size, and its matrix products always read and write the same places of a
workspace. The result depends on the device, like every matrix product.

In a state format with 8-bit moments, m is stored as a first moment of `blockwise.py`, and w as a
master of `blockwise.py` with stochastic rounding. X is computed from the new m before m is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.runtime.optimizer.adamw import join_into, rounded_sqrt, sums_of_squares
from megatrain.runtime.optimizer.blockwise import (
    decoded_first,
    encode_first,
    records,
    round_randomly,
    rounding_keys,
    split_randomly,
)
from megatrain.simulator.model.muon import BLOCK, ITERATIONS, Matrices
from megatrain.simulator.model.state_format import GPU_BLOCK

MOMENTUM = 0.95
"""mu in the formula above."""
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Newton-Schulz coefficients, as in torch.optim.Muon
_LEAST_NORM = 1e-7


def update(
    weights: torch.Tensor,
    low: torch.Tensor | None,
    momentum: torch.Tensor,
    gradient: torch.Tensor,
    *,
    matrices: Matrices,
    rate: float,
    weight_decay: float,
    clip: torch.Tensor,
    workspace: torch.Tensor,
    copy_to: torch.Tensor | None = None,
    number: int = 1,
    seed: int = 0,
    index: int = 0,
    **_: object,
) -> None:
    """Updates a group of matrices in place. If `clip` is NaN, nothing changes. n is
    `Matrices.padded`: the elements of the matrices and padding.

    Args:
        weights: [n] bf16, the high halves of the masters; or, if `low` is None, whole masters in
            bf16 with records or fp32 without.
        low: [n] int16 or, if `momentum` has records, int8, the low halves of the masters; or None.
        momentum: [n] fp32, or uint8 records of first moments (`blockwise.py`).
        gradient: [n] bf16 or fp32.
        matrices: The shape and number of the matrices.
        rate: The learning rate.
        weight_decay: Decoupled weight decay.
        clip: Factor on the gradient, 0-dimensional fp32 on the same device.
        workspace: uint8 memory for temporary values, at least the sum of `Matrices.workspace`
            bytes. With records, more memory is allocated (`UPDATE_COSTS`).
        copy_to: Also receives the new weights, [n] with the dtype of `weights`.
        number: The number of the step, for stochastic rounding, which only records need.
        seed: The run's seed, for stochastic rounding.
        index: The index of the first element in the model, a multiple of 32.
        **_: Arguments of other update functions, which are ignored.
    """
    count, elements, stop = weights.numel(), matrices.number * matrices.size, clip.isnan()
    assert count == matrices.padded
    coded = momentum.dtype == torch.uint8
    first, second, square, other, *blocks = _views(workspace, matrices)
    size = min(BLOCK, GPU_BLOCK) if coded else BLOCK
    parts = [
        (slice(start, min(start + size, count)), slice(start, min(start + size, elements)))
        for start in range(0, count, size)
    ]
    for part, inside in parts:
        g, t, m = (block[: part.stop - part.start] for block in blocks)
        g.copy_(gradient[part]).mul_(clip)
        g[inside.stop - part.start :].zero_()
        torch.mul(g, 1 - MOMENTUM, out=t)
        kept = momentum[records(part.start) : records(part.stop)] if coded else momentum[part]
        torch.mul(decoded_first(kept) if coded else kept, MOMENTUM, out=m).add_(t)
        torch.mul(m, MOMENTUM, out=g).add_(t)
        if coded:
            before = kept.clone()
            encode_first(m, kept)
            torch.where(stop, before, kept, out=kept)
        else:
            torch.where(stop, kept, m, out=kept)
        second.view(-1)[inside] = g[: inside.stop - part.start]
    orthogonal = _orthogonalised(first, second, square, other).view(-1)
    key = rounding_keys(seed, number)[0]
    for part, inside in parts:
        master, step, old = (block[: part.stop - part.start] for block in blocks)
        high, rest = weights[part], None if low is None else low[part]
        if rest is None:
            master.copy_(high)
        else:
            join_into(high, rest, master, step)
        old.copy_(master)
        if weight_decay and rate:
            master.mul_(1 - rate * weight_decay)
        length = inside.stop - part.start
        master[:length].sub_(
            step[:length].copy_(orthogonal[inside]).mul_(rate * matrices.rate_factor)
        )
        torch.where(stop, old, master, out=master)
        if coded and rest is None:
            high.copy_(round_randomly(master, key, index + part.start))
        elif coded and rest is not None:
            split_randomly(master, high, rest, key, index + part.start)
        elif rest is None:
            high.copy_(master)
        else:
            _split(master, high, rest, step)
        if copy_to is not None:
            copy_to[part] = high


def _views(workspace: torch.Tensor, matrices: Matrices) -> Sequence[torch.Tensor]:
    """Returns the temporary tensors of an update in `workspace`: two with the shape of the
    matrices, [number, rows, columns] bf16, two [number, side, side] bf16, and three blocks, [block]
    fp32.
    """
    number, rows, columns = matrices
    shapes: list[tuple[int, ...]] = [(number, rows, columns)] * 2
    shapes += [(number, matrices.side, matrices.side)] * 2
    shapes += [(min(matrices.padded, BLOCK),)] * 3
    views, start = [], 0
    for shape, size in zip(shapes, matrices.workspace, strict=True):
        dtype = torch.bfloat16 if len(shape) == 3 else torch.float32
        used = torch.Size(shape).numel() * dtype.itemsize
        views.append(workspace[start : start + used].view(dtype).view(shape))
        start += size
    return views


def _orthogonalised(
    first: torch.Tensor, second: torch.Tensor, square: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Orthogonalises the matrices `second` [matrices, rows, columns] bf16 by Newton-Schulz
    iterations, and returns the result, which is in `first`. Overwrites all arguments.
    """
    norms = rounded_sqrt(sums_of_squares(second.flatten(1)))
    second.div_(norms.clamp_(min=_LEAST_NORM).bfloat16()[:, None, None])
    x, y = second, first
    wide = x.shape[1] <= x.shape[2]
    for _ in range(ITERATIONS):
        pair = (x, x.mT) if wide else (x.mT, x)
        torch.bmm(*pair, out=square)
        torch.baddbmm(square, square, square, beta=_B, alpha=_C, out=other)
        torch.baddbmm(x, *((other, x) if wide else (x, other)), beta=_A, out=y)
        x, y = y, x
    return x


def _split(
    master: torch.Tensor, high: torch.Tensor, low: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Splits `master` as `adamw.split` does, without allocating memory. Overwrites `scratch`."""
    low.copy_(master.view(torch.int16)[0::2])
    bits = torch.add(master.view(torch.int32), 0x8000, out=scratch.view(torch.int32))
    high.view(torch.int16).copy_(bits.view(torch.int16)[1::2])
