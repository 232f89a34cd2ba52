"""Compares fp8 linear layers with torchao's `Float8Linear`, which PyTorch's training recipes use.

Both multiply with `torch._scaled_mm`, here on the CPU.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fp8_definition import error
from public_packages import public

from megatrain.runtime.layers.fp8_linear import install

Products = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def ours(weight: torch.Tensor, scaling: str) -> torch.nn.Module:
    made = _linear(weight)
    install(torch.nn.ModuleDict({"up": made}), ["up.weight"], scaling)  # type: ignore[arg-type]
    return made


def theirs(weight: torch.Tensor, scaling: str, **changes: bool) -> torch.nn.Module:
    config, layer = public("torchao.float8.config", "torchao.float8.float8_linear")
    recipe = config.Float8LinearConfig.from_recipe_name(scaling)
    made: torch.nn.Module = layer.Float8Linear.from_float(
        _linear(weight), dataclasses.replace(recipe, **changes)
    )
    return made


def _linear(weight: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Linear(*reversed(weight.shape), bias=False, dtype=weight.dtype)
    made.weight = torch.nn.Parameter(weight.clone())
    return made


def products(layer: torch.nn.Module, x: torch.Tensor, gradient: torch.Tensor) -> Products:
    """Returns the output, the gradient of the input and the gradient of the weight."""
    x = x.clone().requires_grad_()
    output = layer(x)
    return output.detach(), *torch.autograd.grad(output, (x, layer.weight), gradient)


def drawn(kind: str) -> Products:
    """Returns an input [64, 128], a weight [96, 128] and a gradient [64, 96].

    If `kind` is `spread`, the scales of their rows differ by a factor of 100 to 1,000.
    """
    draw = torch.Generator().manual_seed(0)
    shapes = ((64, 128), (96, 128), (64, 96))
    x, weight, gradient = (torch.randn(shape, generator=draw) for shape in shapes)
    if kind == "spread":
        x *= torch.logspace(-2, 1, 64)[:, None]
        weight *= torch.logspace(-1, 1, 96)[:, None]
        gradient *= torch.logspace(1, -1, 64)[:, None]
    return x.bfloat16(), (weight * 0.05).bfloat16(), (gradient * 1e-6).bfloat16()


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize("kind", ["normal", "spread"])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_products_are_torchao_s_with_scales_of_powers_of_two(
    scaling: str, kind: str, emulated: bool
) -> None:
    """torchao's recipe `rowwise` has scales of powers of two, and `tensorwise` can have them.

    In the backward pass of `rowwise`, torchao rounds the weight and the input a second time, with
    one scale per column. We reuse the rounded values of the forward pass, and apply their scales to
    the gradient. A power of two changes only the exponent, so both give the same bits. The
    exception is a number that is so much smaller than the largest of its row or column that fp8
    keeps fewer bits of it.
    """
    x, weight, gradient = drawn(kind)
    changes = {"emulate": emulated, "round_scales_to_power_of_2": True}
    found = products(ours(weight, scaling), x, gradient)
    wanted = products(theirs(weight, scaling, **changes), x, gradient)
    same = [one.equal(other) for one, other in zip(found, wanted, strict=True)]
    if scaling == "tensorwise" or kind == "normal":
        assert same == [True, True, True]
    else:
        assert same[0]
        assert all(error(one, other) < 5e-4 for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["normal", "spread"])
@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise"])
def test_errors_are_at_most_a_tenth_above_those_of_exact_scales(scaling: str, kind: str) -> None:
    """An exact scale maps the largest number to the largest fp8 number."""
    x, weight, gradient = drawn(kind)
    exact = x.float() @ weight.float().t(), gradient.float() @ weight.float()
    exact += (gradient.float().t() @ x.float(),)

    def errors(layer: torch.nn.Module) -> list[float]:
        made = products(layer, x, gradient)
        return [error(each, plain) for each, plain in zip(made, exact, strict=True)]

    found = errors(ours(weight, scaling))
    wanted = errors(theirs(weight, scaling, round_scales_to_power_of_2=False))
    assert all(0.03 < one < 1.1 * other for one, other in zip(found, wanted, strict=True))
