"""Muon: the update of matrices by their orthogonalised momentum. `simulator/model/muon.py` says
which tensors it updates and what that takes.

With momentum m, gradient g and mu = 0.95, an update of one matrix is

    m = mu m + (1 - mu) g
    X = orthogonal(mu m + (1 - mu) g)
    w = (1 - rate weight_decay) w - 0.2 sqrt(max(rows, columns)) rate X

This is `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`. Everything is fp32, one operation
with its own rounding at a time, except X, which is bf16. The result does not depend on the plan: a
group of matrices always has the same size, and its matrix products always read and write the same
places of one workspace. It depends on the device, as any matrix product does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatrain.runtime.optimizer.adamw import join_into, rounded_sqrt, sums_of_squares
from megatrain.simulator.model.muon import BLOCK, ITERATIONS, Matrices

MOMENTUM = 0.95
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Keller Jordan's, as in torch.optim.Muon
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
    **_: object,
) -> None:
    """Updates a group of matrices in place. If `clip` is NaN, nothing changes.

    Args:
        weights: [n] bf16, the high half of the masters; or fp32, if `low` is None.
        low: [n] int16, the low half of the masters; or None.
        momentum: [n] fp32.
        gradient: [n] bf16 or fp32.
        matrices: The shape and the number of the matrices, which have n elements together.
        rate: The learning rate.
        weight_decay: Decoupled weight decay.
        clip: Factor on the gradient, 0-dimensional fp32 on the same device.
        workspace: Bytes for temporary values, at least the sum of `Matrices.workspace`.
        copy_to: [n] with the dtype of `weights`. Also receives the new weights.
        **_: Arguments that only other updates need.
    """
    count, stop = weights.numel(), clip.isnan()
    first, second, square, other, *blocks = _views(workspace, matrices)
    for start in range(0, count, BLOCK):
        part = slice(start, min(start + BLOCK, count))
        g, t, m = (block[: part.stop - start] for block in blocks)
        g.copy_(gradient[part]).mul_(clip)
        torch.mul(g, 1 - MOMENTUM, out=t)
        torch.mul(momentum[part], MOMENTUM, out=m).add_(t)
        torch.mul(m, MOMENTUM, out=g).add_(t)
        torch.where(stop, momentum[part], m, out=momentum[part])
        second.view(-1)[part] = g
    orthogonal = _orthogonalised(first, second, square, other).view(-1)
    for start in range(0, count, BLOCK):
        part = slice(start, min(start + BLOCK, count))
        master, step, old = (block[: part.stop - start] for block in blocks)
        high = weights[part]
        if low is None:
            master.copy_(high)
        else:
            join_into(high, low[part], master, step)
        old.copy_(master)
        if weight_decay and rate:
            master.mul_(1 - rate * weight_decay)
        master.sub_(step.copy_(orthogonal[part]).mul_(rate * matrices.rate_factor))
        torch.where(stop, old, master, out=master)
        if low is None:
            high.copy_(master)
        else:
            _split(master, high, low[part], step)
        if copy_to is not None:
            copy_to[part] = high


def _views(workspace: torch.Tensor, matrices: Matrices) -> Sequence[torch.Tensor]:
    """Returns the temporary tensors of an update in `workspace`: two of the shape of the matrices
    and two squares in bf16, and three blocks in fp32.
    """
    number, rows, columns = matrices
    shapes: list[tuple[int, ...]] = [(number, rows, columns)] * 2
    shapes += [(number, matrices.side, matrices.side)] * 2
    shapes += [(min(number * matrices.size, BLOCK),)] * 3
    made, start = [], 0
    for shape, size in zip(shapes, matrices.workspace, strict=True):
        dtype = torch.bfloat16 if len(shape) == 3 else torch.float32
        used = torch.Size(shape).numel() * dtype.itemsize
        made.append(workspace[start : start + used].view(dtype).view(shape))
        start += size
    return made


def _orthogonalised(
    first: torch.Tensor, second: torch.Tensor, square: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Returns the orthogonalised matrices of `second`, [matrices, rows, columns] bf16, in `first`.
    All arguments are overwritten.
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
    """Writes the halves of `master` as `adamw.split` does, without allocating memory."""
    low.copy_(master.view(torch.int16)[0::2])
    bits = torch.add(master.view(torch.int32), 0x8000, out=scratch.view(torch.int32))
    high.view(torch.int16).copy_(bits.view(torch.int16)[1::2])
