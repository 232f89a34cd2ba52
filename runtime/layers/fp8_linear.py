"""Linear layers whose three matrix products are in fp8: output, gradient of the input, gradient of
the weight.

An operand X is stored as fp8 values Q and scales s with X ~ Q s. Scales are powers of two, so that
scaling and its inverse are exact and only the cast to fp8 rounds. With input X [tokens, in],
weight W [out, in] and the output's gradient G [tokens, out]:

* `rowwise`: each row of X and of W has a scale, s and t. The products are Q_X Q_W^T s t for the
  output, (G t) Q_W for the gradient of the input, and (G s)^T Q_X for that of the weight. G t has
  a scale for each token and G s one for each output. X and W are thus rounded once, and both
  passes use the same values. All are E4M3 (4 bits of exponent, 3 of mantissa).
* `tensorwise`: X, W and G have one scale each. X and W are E4M3, and G is E5M2.

Products are summed in fp32 and rounded to bf16. Tensor cores keep fewer bits of a sum in the
products with W ("fast accumulation"), where it is a sum over `in` or `out`. The gradient of the
weight is a sum over all tokens, and does without.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import FP8_MULTIPLE, Scaling

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_EXPONENT = 0x7F80_0000
"""The bits of the exponent of an fp32 number."""
_LEAST = 1e-12
"""Rows of smaller numbers are scaled like a row with this maximum."""


def quantise(
    x: torch.Tensor, dtype: torch.dtype, dims: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x` in fp8, and the fp32 scales that multiply it back.

    A scale is the least power of two with which the largest number fits into `dtype`. A NaN or an
    infinity in `x` makes every product with its row NaN.

    Args:
        x: [rows, columns] bf16.
        dtype: E4M3 or E5M2.
        dims: the dimension whose numbers share a scale: 1 for a scale for each row, [rows, 1], 0
            for one for each column, [1, columns]. None for one scale, 0-dimensional.
    """
    largest = (x.abs().amax() if dims is None else x.abs().amax(dims, keepdim=True)).float()
    factor = torch.finfo(dtype).max / largest.clamp(min=_LEAST)
    factor = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)
    return (x * factor.to(x.dtype)).to(dtype), factor.reciprocal()


def _columns(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` [rows, columns] with each column contiguous, as the second operand must be."""
    return x.t().contiguous().t()


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, rowwise: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rowwise = rowwise
        row = 1 if rowwise else None
        (left, s), (right, t) = quantise(x, E4M3, row), quantise(weight, E4M3, row)
        return torch._scaled_mm(
            left, right.t(), s, t.view(t.shape[::-1]), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        made = _gradients_rowwise if ctx.rowwise else _gradients_tensorwise
        return *made(x, weight, gradient), None


def _gradients_rowwise(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    (left, s), (right, t) = quantise(x, E4M3, 1), quantise(weight, E4M3, 1)
    rows, u = quantise(gradient * t.view(1, -1).to(gradient.dtype), E4M3, 1)
    ones = torch.ones(1, weight.shape[1], dtype=torch.float32, device=x.device)
    dx = torch._scaled_mm(
        rows, _columns(right), u, ones, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    columns, v = quantise(gradient * s.to(gradient.dtype), E4M3, 0)
    dw = torch._scaled_mm(
        columns.t().contiguous(), _columns(left), v.view(-1, 1), ones, out_dtype=torch.bfloat16
    )
    return dx, dw


def _gradients_tensorwise(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    (left, s), (right, t) = quantise(x, E4M3, None), quantise(weight, E4M3, None)
    scaled, u = quantise(gradient, E5M2, None)
    dx = torch._scaled_mm(
        scaled, _columns(right), u, t, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    dw = torch._scaled_mm(scaled.t().contiguous(), _columns(left), u, s, out_dtype=torch.bfloat16)
    return dx, dw


class Fp8Linear(torch.nn.Linear):
    """A linear layer in fp8, in place of transformers' own."""

    rowwise: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the output, [..., out] bf16.

        An input of another dtype, or with a number of rows that fp8 products do not take, is
        multiplied without fp8.

        Args:
            input: [..., in].
        """
        rows = input.reshape(-1, input.shape[-1])
        if input.dtype != torch.bfloat16 or rows.shape[0] % FP8_MULTIPLE:
            return super().forward(input)
        made: torch.Tensor = _Product.apply(rows, self.weight, self.rowwise)
        if self.bias is not None:
            made = made + self.bias
        return made.view(*input.shape[:-1], -1)


def install(layer: torch.nn.Module, names: Iterable[str], scaling: Scaling) -> None:
    """Changes linear layers of a decoder layer to fp8.

    Args:
        layer: transformers' decoder layer.
        names: names of the weights (`ModelSpec.fp8_weights`).
        scaling: how operands are scaled.

    Raises UserError if a weight does not belong to an `nn.Linear`.
    """
    for name in names:
        module = layer.get_submodule(name.removesuffix(".weight"))
        if type(module) is not torch.nn.Linear:
            raise UserError(
                f"fp8: {name}",
                found=f"a weight of {type(module).__name__}",
                allowed="weights of torch.nn.Linear",
                fix="use --dtype bf16",
            )
        module.__class__ = Fp8Linear
        module.rowwise = scaling == "rowwise"  # type: ignore[assignment]
