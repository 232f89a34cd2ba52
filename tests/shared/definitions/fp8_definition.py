"""The plain definition of fp8 linear layers: operands are rounded to fp8 with power-of-two scales,
and multiplied in fp32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Products(NamedTuple):
    """The three products of a linear layer, in fp32."""

    output: torch.Tensor
    input_gradient: torch.Tensor
    weight_gradient: torch.Tensor


def rounded(x: torch.Tensor, dtype: torch.dtype, dim: int | None = None) -> torch.Tensor:
    """Returns `x` in fp32, rounded to the values of the fp8 format `dtype`.

    All numbers along `dim` have one scale, or all numbers of `x` if `dim` is None.
    """
    x = x.double()
    most = torch.finfo(dtype).max
    largest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    steps = [2.0 ** math.floor(math.log2(most / max(each, 1e-12))) for each in largest.flatten()]
    scale = torch.tensor(steps, dtype=torch.float64, device=x.device).view(largest.shape)
    return ((x * scale).float().to(dtype).double() / scale).float()


def scales(x: torch.Tensor) -> torch.Tensor:
    """Returns [rows]: the power of two that divides each row of `x` before rounding to E4M3."""
    rows = x.double().abs().amax(1)
    return torch.tensor(
        [2.0 ** -math.floor(math.log2(448 / max(each, 1e-12))) for each in rows.tolist()],
        device=x.device,
    )


def products(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, scaling: str
) -> Products:
    """Returns the products of `x` [tokens, in], `weight` [out, in] and `gradient` [tokens, out]."""
    if scaling == "tensorwise":
        left, right, back = rounded(x, E4M3), rounded(weight, E4M3), rounded(gradient, E5M2)
        return Products(left @ right.t(), back @ right, back.t() @ left)
    left, right = rounded(x, E4M3, 1), rounded(weight, E4M3, 1)
    s, t, g = scales(x)[:, None], scales(weight)[None, :], gradient.float()
    return Products(
        left @ right.t(),
        (rounded(g * t, E4M3, 1) / t) @ right,
        (rounded(g * s, E4M3, 0) / s).t() @ left,
    )


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Returns the norm of the difference over the norm of `wanted`."""
    with torch.no_grad():
        return float((found.float() - wanted.float()).norm() / wanted.float().norm())
