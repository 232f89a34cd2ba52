"""Linear layers whose output nothing reads, in a recompute.

A recompute of a decoder layer saves the tensors that the backward pass needs. The projection of a
dense MLP's output is not among them: it is added to the output of the layer, and no gradient
depends on it. A short recompute leaves out this product (`Workload.short_recompute`), which is 29 %
of the FLOPs of a recompute of Qwen2.5-7B. The result of the layer is then NaN.

PyTorch's activation checkpointing also stops a recompute after the last tensor that is saved
(`torch.utils.checkpoint.set_checkpoint_early_stop`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers.models.falcon.modeling_falcon import FalconLinear


class _LeftOut(torch.autograd.Function):
    """The autograd function of a linear layer, whose forward pass returns NaN.

    The backward pass runs the same ops as that of `torch.nn.functional.linear`, so the gradients
    have the same bits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        return not_computed(x, weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        flat = gradient.reshape(-1, gradient.shape[-1])
        # First, because a compiled layer frees `x` after it.
        dw = flat.t().mm(x.reshape(-1, x.shape[-1]))
        dx = flat.mm(weight).view(x.shape)
        return dx, dw, flat.sum(0) if ctx.biased else None


def not_computed(x: torch.Tensor, width: int) -> torch.Tensor:
    """Returns NaN in the shape of the output of a linear layer, [..., width]. `x` is the input,
    [..., in].
    """
    # The result has its own memory, because some layers change it in place. It depends on `x`,
    # because otherwise the compiler would move the computation of `x` to the backward pass, where
    # it takes more memory.
    return x[..., :1] * torch.nan + x.new_zeros(width)


class SkippableLinear(torch.nn.Linear):
    """A linear layer that can leave out its product."""

    unread = False
    """Whether the output is NaN instead of the product. The gradients are the same."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's name
        """Returns the output, [..., out].

        Args:
            input: the input, [..., in].
        """
        if not self.unread:
            return super().forward(input)
        output: torch.Tensor = _LeftOut.apply(input, self.weight, self.bias)
        return output


def leave_out(module: torch.nn.Module, weights: Iterable[str]) -> None:
    """Changes linear layers in `module` to return NaN.

    Args:
        module: a decoder layer, or modules of one.
        weights: names of the weights of these linear layers (`ModelSpec.last_products`).

    Raises ValueError if a weight does not belong to an `nn.Linear`.
    """
    for name in weights:
        linear = module.get_submodule(name.removesuffix(".weight"))
        if type(linear) in (torch.nn.Linear, FalconLinear):
            linear.__class__ = SkippableLinear
        if not isinstance(linear, SkippableLinear):
            raise ValueError(f"{name} belongs to a {type(linear).__name__}, not to an nn.Linear")
        vars(linear)["unread"] = True
