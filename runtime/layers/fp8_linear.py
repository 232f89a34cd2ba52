"""Linear layers whose three matrix products are in fp8: the output, the gradient of the input, and
the gradient of the weight.

An operand X is stored as fp8 values Q and scales s with X ~ Q s. Scales are powers of two, so
scaling is exact and only the cast to fp8 rounds. With the input X [tokens, in], the weight W [out,
in] and the output's gradient G [tokens, out]:

* `rowwise`: each row of X has a scale s, and each row of W a scale t. The output is Q_X Q_W^T s t.
  The gradient of the input is (G t) Q_W, with a scale for each row of G t. The gradient of the
  weight is (G s)^T Q_X, with a scale for each column of G s. So X and W are rounded once, and both
  passes use the same values. All operands are E4M3 (4 bits of exponent, 3 bits of mantissa).
* `tensorwise`: X, W and G have one scale each. X and W are E4M3. G is E5M2 (5 bits of exponent, 2
  bits of mantissa).

Products are computed by `torch._scaled_mm` with a result in bf16. On tensor cores, sums over `in`
or `out` keep fewer bits than fp32 ("fast accumulation"). The gradient of the weight is a sum over
all tokens, and is accumulated in fp32.

Autograd saves X and W in bf16. A compiled layer may save the fp8 values of X instead of X.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import FalconLinear

from megatrain.runtime.layers.last_products import SkippableLinear, not_computed
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.workload import FP8_MULTIPLE, Scaling, Workload

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_LINEAR = (torch.nn.Linear, FalconLinear)
"""Modules that `Fp8Linear` can replace. FalconLinear is an nn.Linear that runs as two ops."""
_EXPONENT = 0x7F80_0000
"""The bits of the exponent of an fp32 number."""
_LEAST = 1e-12
"""Lower limit of the largest absolute value for computing a scale, so scales are not 0."""
_CAPABILITY = (8, 9)
"""Minimum compute capability of a GPU with fp8 matrix products."""
_MOST_ERROR = 0.01
"""Maximum difference between the products of a device and the definition, relative to their norm.
Rounding to bf16 alone gives 0.002."""


def rows(scaling: Scaling) -> int | None:
    """Returns the argument `dim` of `quantise` for inputs and weights with `scaling`."""
    return 1 if scaling == "rowwise" else None


def quantise(
    x: torch.Tensor, dtype: torch.dtype, dim: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x` in fp8, [rows, columns], and its scales in fp32: the fp8 values times the scales
    are approximately `x`.

    Before the cast, `x` is multiplied by the largest power of two that keeps its largest absolute
    value within the range of `dtype`. If a row or column has a NaN or an infinity, all products
    with this row or column are NaN.

    Args:
        x: [rows, columns] bf16.
        dtype: E4M3 or E5M2.
        dim: 1 for a scale for each row, [rows, 1]. 0 for a scale for each column, [1, columns].
            None for a single scale, 0-dimensional.
    """
    largest = (x.abs().amax() if dim is None else x.abs().amax(dim, keepdim=True)).float()
    factor = torch.finfo(dtype).max / largest.clamp(min=_LEAST)
    # Clears the mantissa, which rounds down to a power of two.
    factor = (factor.view(torch.int32) & _EXPONENT).view(torch.float32)
    return (x * factor.to(x.dtype)).to(dtype), factor.reciprocal()


def multiply(
    left: torch.Tensor, right: torch.Tensor, s: torch.Tensor, t: torch.Tensor, *, fast: bool = True
) -> torch.Tensor:
    """Returns the product of `left` and the transpose of `right`, [rows, columns] bf16.

    Args:
        left: fp8 values, [rows, inner], contiguous.
        right: fp8 values, [columns, inner], contiguous.
        s: the scales of `left`, [rows, 1] or 0-dimensional fp32.
        t: the scales of `right`, [columns, 1] fp32, or 0-dimensional if `s` is 0-dimensional.
        fast: whether sums may keep fewer bits than fp32.
    """
    product: torch.Tensor = torch._scaled_mm(
        left,
        right.t(),
        s,
        t.view(1, -1) if t.dim() else t,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
    return product


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, scaling: Scaling, unread: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        left, s = quantise(x, E4M3, rows(scaling))
        if unread:
            # A compiled layer then saves `left` for the backward pass, as in other passes.
            return not_computed(left[:, :1].to(x.dtype), weight.shape[0])
        right, t = quantise(weight, E4M3, rows(scaling))
        return multiply(left, right, s, t)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        scaling: Scaling = ctx.scaling
        (left, s), (right, t) = (quantise(operand, E4M3, rows(scaling)) for operand in (x, weight))
        if scaling == "tensorwise":
            back, u = quantise(gradient, E5M2, None)
            dx = multiply(back, right.t().contiguous(), u, t)
            dw = multiply(back.t().contiguous(), left.t().contiguous(), u, s, fast=False)
            return dx, dw, None, None
        one = torch.ones(weight.shape[1], 1, dtype=torch.float32, device=x.device)
        back, u = quantise(gradient * t.view(1, -1).to(gradient.dtype), E4M3, 1)
        dx = multiply(back, right.t().contiguous(), u, one)
        del back, right  # before the second cast, which has the peak of memory
        back, u = quantise(gradient * s.to(gradient.dtype), E4M3, 0)
        back = back.t().contiguous()
        dw = multiply(back, left.t().contiguous(), u.view(-1, 1), one, fast=False)
        return dx, dw, None, None


class Fp8Linear(SkippableLinear):
    """A linear layer in fp8, which replaces transformers' module."""

    scaling: Scaling

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        """Returns the output, [..., out].

        The products are not in fp8 if the input is not bf16, or if the number of its rows is not a
        multiple of `FP8_MULTIPLE`.

        Args:
            input: the input, [..., in].
        """
        flat = input.reshape(-1, input.shape[-1])
        if input.dtype != torch.bfloat16 or flat.shape[0] % FP8_MULTIPLE:
            return super().forward(input)
        output: torch.Tensor = _Product.apply(flat, self.weight, self.scaling, self.unread)
        if self.bias is not None:
            output = output + self.bias
        return output.view(*input.shape[:-1], -1)


def install(layer: torch.nn.Module, weights: Iterable[str], scaling: Scaling) -> None:
    """Changes linear layers of a decoder layer to fp8.

    Args:
        layer: transformers' decoder layer.
        weights: names of the weights of these linear layers (`ModelSpec.fp8_weights`).
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
    """Raises UserError if `device` cannot compute the fp8 products of `workload`. Without a device,
    nothing is refused.

    The device multiplies small matrices, and the products are compared with the definition.
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
    """Returns the reason why `device` cannot compute fp8 products, or an empty string."""
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
    except Exception as failure:  # an untested GPU may raise any exception
        reason = str(failure).strip().splitlines() or [type(failure).__name__]
        return f"{name}, where PyTorch's fp8 product fails: {reason[0]}"
    return "" if error <= _MOST_ERROR else f"{name}, whose products differ by {error:.3f}"


def _trial_error(scaling: Scaling, device: torch.device) -> float:
    """Returns the largest relative difference of the three products on `device` from the fp32
    products of the same rounded operands. It is the norm of the difference, divided by the norm of
    the fp32 product.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device, torch.bfloat16)

    x, weight, gradient = random(64, 128), random(96, 128), random(64, 96)

    def rounded(tensor: torch.Tensor, dtype: torch.dtype, dim: int | None) -> torch.Tensor:
        values, scale = quantise(tensor, dtype, dim)
        return values.float() * scale

    left, right = (rounded(operand, E4M3, rows(scaling)) for operand in (x, weight))
    if scaling == "rowwise":
        s, t = quantise(x, E4M3, 1)[1], quantise(weight, E4M3, 1)[1].view(1, -1)
        back = rounded((gradient * t).bfloat16(), E4M3, 1) / t
        down = rounded((gradient * s).bfloat16(), E4M3, 0) / s
    else:
        back = down = rounded(gradient, E5M2, None)
    references = left @ right.t(), back @ right, down.t() @ left
    with torch.enable_grad():
        x, weight = x.requires_grad_(), weight.requires_grad_()
        output = _Product.apply(x, weight, scaling, False)
        products = output.detach(), *torch.autograd.grad(output, (x, weight), gradient)
    return max(
        float((product.float() - reference).norm() / reference.norm())
        for product, reference in zip(products, references, strict=True)
    )
