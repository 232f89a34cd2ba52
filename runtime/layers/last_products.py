"""The linear layers that project the output of an MLP. A recompute leaves out their product, and a
layer that rebuilds outputs computes their gradients in an order that saves memory.

A recompute of a decoder layer saves the tensors that the backward pass needs. The projection of a
dense MLP's output is not among them: it is added to the output of the layer, and no gradient
depends on it. A short recompute leaves out this product (`Workload.short_recompute`), which is 29 %
of the FLOPs of a recompute of Qwen2.5-7B. The result of the layer is then NaN.

PyTorch's activation checkpointing also stops a recompute after the last tensor that is saved
(`torch.utils.checkpoint.set_checkpoint_early_stop`).

A compiled layer can also compute the input of this product again in the backward pass
(`Knobs.rebuild_outputs`). Only the gradient of the weight reads it. By itself, the compiler
computes it in one kernel with the gradients of gate and up, so all of them exist at the same time.
With 32 x 1,024 tokens, a layer of Qwen2.5-7B then takes 2.2 GiB more
(tests/simulator/memory/test_rebuilt_memory.py). With `ordered`, the gradient of the weight is
computed first, and the input is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import FalconLinear


@torch.library.custom_op("megatrain::product_after", mutates_args=())
def _product_after(left: torch.Tensor, right: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Returns the matrix product of `left`, [m, k], and `right`, [k, n].

    A compiled program runs it after `first` was computed. The op does not use `first`, but the
    compiler only knows that it is an argument.
    """
    del first
    return left.mm(right)


@_product_after.register_fake
def _(left: torch.Tensor, right: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    del first
    return left.new_empty(left.shape[0], right.shape[1])


class _LastProduct(torch.autograd.Function):
    """The autograd function of a linear layer. With `unread`, the forward pass returns NaN. With
    `ordered`, a compiled backward pass computes the gradient of the weight first.

    The backward pass runs the same products as that of `torch.nn.functional.linear`, so the
    gradients have the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        unread: bool,
        ordered: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased, ctx.ordered = bias is not None, ordered
        if unread:
            return not_computed(x, weight.shape[0])
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        # First, because a compiled layer frees `x` after it.
        dw = flat.t().mm(x.reshape(-1, x.shape[-1]))
        dx = _product_after(flat, weight, dw) if ctx.ordered else flat.mm(weight)
        return dx.view(x.shape), dw, flat.sum(0) if ctx.biased else None, None, None


def not_computed(x: torch.Tensor, width: int) -> torch.Tensor:
    """Returns NaN in the shape of the output of a linear layer, [..., width]. `x` is the input,
    [..., in].
    """
    # The result has its own memory, because some layers change it in place. It depends on `x`,
    # because otherwise the compiler would move the computation of `x` to the backward pass, where
    # it takes more memory.
    return x[..., :1] * torch.nan + x.new_zeros(width)


class SkippableLinear(torch.nn.Linear):
    """A linear layer that can leave out its product, or compute its gradients in order."""

    unread = False
    """Whether the output is NaN instead of the product. The gradients are the same."""
    ordered = False
    """Whether a compiled backward pass computes the gradient of the weight before that of the
    input. The gradients are the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        """Returns the output, [..., out].

        Args:
            input: the input, [..., in].
        """
        if not (self.unread or self.ordered):
            return super().forward(input)
        output: torch.Tensor = _LastProduct.apply(
            input, self.weight, self.bias, self.unread, self.ordered
        )
        return output


def leave_out(module: torch.nn.Module, weights: Iterable[str]) -> None:
    """Changes linear layers in `module` to return NaN.

    Args:
        module: a decoder layer, or modules of one.
        weights: names of the weights of these linear layers (`ModelSpec.last_products`).

    Raises ValueError if a weight does not belong to an `nn.Linear`.
    """
    for linear in _skippable(module, weights):
        vars(linear)["unread"] = True


def put_in_order(module: torch.nn.Module, weights: Iterable[str]) -> None:
    """Changes linear layers in `module` to compute the gradient of their weight before that of
    their input. The arguments and errors are those of `leave_out`.
    """
    for linear in _skippable(module, weights):
        vars(linear)["ordered"] = True


def _skippable(module: torch.nn.Module, weights: Iterable[str]) -> Iterator[SkippableLinear]:
    """Changes linear layers in `module` to SkippableLinear, and yields them."""
    for name in weights:
        linear = module.get_submodule(name.removesuffix(".weight"))
        if type(linear) in (torch.nn.Linear, FalconLinear):
            linear.__class__ = SkippableLinear
        if not isinstance(linear, SkippableLinear):
            raise ValueError(f"{name} belongs to a {type(linear).__name__}, not to an nn.Linear")
        yield linear
