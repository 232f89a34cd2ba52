"""Linear layers whose three matrix products are in fp8: output, gradient of the input, gradient of
the weight.

An operand X is stored as fp8 values Q and scales s with X ~ Q s. Scales are powers of two, so that
scaling and its inverse are exact and only the cast to fp8 rounds. With input X [tokens, in],
weight W [out, in] and the output's gradient G [tokens, out]:

* `rowwise`: each row of X and of W has a scale, s and t. The products are Q_X Q_W^T s t for the
  output, (G t) Q_W for the gradient of the input, and (G s)^T Q_X for that of the weight. Here G t
  has a scale for each token and G s one for each output. So X and W are rounded once, and both
  passes use the same values. All are E4M3 (4 bits of exponent, 3 of mantissa).
* `tensorwise`: X, W and G have one scale each. X and W are E4M3. G is E5M2 (5 bits of exponent, 2
  of mantissa).

The multiplication is PyTorch's `torch._scaled_mm`. Its result is bf16. On tensor cores, sums over
`in` or `out` keep fewer bits than fp32 ("fast accumulation"). The gradient of the weight is a sum
over all tokens, and is accumulated in fp32.

Autograd saves X and W in bf16. A compiled layer may save the fp8 values of X in place of X.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import FalconLinear

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import FP8_MULTIPLE, Scaling, Workload

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LINEAR = (torch.nn.Linear, FalconLinear)
"""Modules that `Fp8Linear` can replace. The latter computes what the former does, in two ops."""
_EXPONENT = 0x7F80_0000
"""The bits of the exponent of an fp32 number."""
_LEAST = 1e-12
"""A row of numbers that are all smaller than this is scaled as if this were the largest."""
_CAPABILITY = (8, 9)
"""The least compute capability of a GPU with fp8 matrix products."""
_MOST_ERROR = 0.01
"""The most that the products of a device may differ from the definition, relative to their norm.
Rounding to bf16 gives 0.002."""


def rows(scaling: Scaling) -> int | None:
    """Returns the argument `dim` of `quantise` for inputs and weights."""
    return 1 if scaling == "rowwise" else None


def quantise(
    x: torch.Tensor, dtype: torch.dtype, dim: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x` in fp8, and the fp32 scales that multiply it back.

    `x` is multiplied with the largest power of two with which its largest number is at most the
    largest of `dtype`. A NaN or an infinity in `x` makes all products with its row or column NaN.

    Args:
        x: [rows, columns] bf16.
        dtype: E4M3 or E5M2.
        dim: 1 for a scale for each row, [rows, 1]. 0 for a scale for each column, [1, columns].
            None for one scale, 0-dimensional.
    """
    largest = (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)).float()
    factor = torch.finfo(dtype).max / largest.clamp(min=_LEAST)
    # Without its mantissa, a number is the power of two below it.
    factor = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)
    return (x * factor.to(x.dtype)).to(dtype), factor.reciprocal()


def multiply(
    left: torch.Tensor, right: torch.Tensor, s: torch.Tensor, t: torch.Tensor, *, fast: bool = True
) -> torch.Tensor:
    """Returns the product of `left` [rows, inner] and the transpose of `right` [columns, inner],
    [rows, columns] bf16. Both are fp8 and contiguous.

    Args:
        s: the scales of `left`, [rows, 1], or 0-dimensional.
        t: the scales of `right`, [columns, 1], or 0-dimensional as `s`.
        fast: whether sums may keep fewer bits than fp32.
    """
    made: torch.Tensor = torch._scaled_mm(
        left,
        right.t(),
        s,
        t.view(1, -1) if t.dim() else t,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return made


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, scaling: Scaling) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        (left, s), (right, t) = (quantise(each, E4M3, rows(scaling)) for each in (x, weight))
        return multiply(left, right, s, t)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        (left, s), (right, t) = (quantise(each, E4M3, rows(scaling)) for each in (x, weight))
        if scaling == "tensorwise":
            back, u = quantise(gradient, E5M2, None)
            dx = multiply(back, right.t().contiguous(), u, t)
            dw = multiply(back.t().contiguous(), left.t().contiguous(), u, s, fast=False)
            return dx, dw, None
        one = torch.ones(weight.shape[1], 1, dtype=torch.float32, device=x.device)
        back, u = quantise(gradient * t.view(1, -1).to(gradient.dtype), E4M3, 1)
        dx = multiply(back, right.t().contiguous(), u, one)
        del back, right  # before the second cast, which takes the most memory
        back, u = quantise(gradient * s.to(gradient.dtype), E4M3, 0)
        back = back.t().contiguous()
        dw = multiply(back, left.t().contiguous(), u.view(-1, 1), one, fast=False)
        return dx, dw, None


class Fp8Linear(torch.nn.Linear):
    """A linear layer in fp8, in place of transformers' own."""

    scaling: Scaling

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        """Returns the output, [..., out].

        The products are not in fp8 if the input is not bf16, or if the number of its rows is not a
        multiple of `FP8_MULTIPLE`.

        Args:
            input: [..., in].
        """
        flat = input.reshape(-1, input.shape[-1])
        if input.dtype != torch.bfloat16 or flat.shape[0] % FP8_MULTIPLE:
            return super().forward(input)
        made: torch.Tensor = _Product.apply(flat, self.weight, self.scaling)
        if self.bias is not None:
            made = made + self.bias
        return made.view(*input.shape[:-1], -1)


def install(layer: torch.nn.Module, weights: Iterable[str], scaling: Scaling) -> None:
    """Changes linear layers of a decoder layer to fp8.

    Args:
        layer: transformers' decoder layer.
        weights: names of their weights in the layer (`ModelSpec.fp8_weights`).
        scaling: how operands are scaled.

    Raises ValueError if a weight does not belong to an `nn.Linear`.
    """
    for name in weights:
        module = layer.get_submodule(name.removesuffix(".weight"))
        if type(module) not in _LINEAR:
            raise ValueError(f"{name} belongs to a {type(module).__name__}, not to an nn.Linear")
        module.__class__ = Fp8Linear
        vars(module)["scaling"] = scaling


def refuse_fp8(workload: Workload, device: torch.device | None) -> None:
    """Raises UserError if `device` cannot compute the fp8 products of `workload`.

    A GPU multiplies small matrices first, and the products are compared with those of the
    definition. Without a device, nothing is refused.
    """
    if workload.fp8 is None or device is None:
        return
    found = _obstacle(workload.fp8, device)
    if found:
        raise UserError(
            "workload: fp8",
            found=found,
            allowed="a GPU of compute capability 8.9 or later, or a CPU",
            fix="make the plan with --dtype bf16",
        )


@functools.cache
def _obstacle(scaling: Scaling, device: torch.device) -> str:
    """Returns why `device` cannot compute fp8 products, in words, or nothing if it can."""
    name = "the CPU"
    if device.type == "cuda":
        name, capability = (
            torch.cuda.get_device_name(device),
            torch.cuda.get_device_capability(device),
        )
        if capability < _CAPABILITY or torch.version.hip:
            return f"{name}, which has none"
    try:
        error = _trial_error(scaling, device)
    except Exception as failure:  # a product may fail in any way on a GPU that nobody tried
        reason = str(failure).strip().splitlines() or [type(failure).__name__]
        return f"{name}, where PyTorch's fp8 product fails: {reason[0]}"
    return "" if error <= _MOST_ERROR else f"{name}, whose products differ by {error:.3f}"


def _trial_error(scaling: Scaling, device: torch.device) -> float:
    """Returns the largest difference between the three products on `device` and the products in
    fp32 of the same rounded operands, relative to the norm of the latter.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, torch.bfloat16)

    x, weight, gradient = drawn(64, 128), drawn(96, 128), drawn(64, 96)

    def rounded(tensor: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
        made, scale = quantise(tensor, dtype, dim)
        return made.float() * scale

    left, right = (rounded(each, E4M3, rows(scaling)) for each in (x, weight))
    if scaling == "rowwise":
        s, t = quantise(x, E4M3, 1)[1], quantise(weight, E4M3, 1)[1].view(1, -1)
        back = rounded((gradient * t).bfloat16(), E4M3, 1) / t
        down = rounded((gradient * s).bfloat16(), E4M3, 0) / s
    else:
        back = down = rounded(gradient, E5M2, None)
    wanted = left @ right.t(), back @ right, down.t() @ left
    with torch.enable_grad():
        x, weight = x.requires_grad_(), weight.requires_grad_()
        made = _Product.apply(x, weight, scaling)
        found = made.detach(), *torch.autograd.grad(made, (x, weight), gradient)
    return max(
        float((ours.float() - theirs).norm() / theirs.norm())
        for ours, theirs in zip(found, wanted, strict=True)
    )
