"""A second implementation of decoder layers that compute their modules in token pieces.

Each chain of modules is one function of its input and its weights. The function computes one piece
of the tokens after the other, and sums the gradients of weights in fp32, in the order of the
pieces.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call


def in_pieces(layer: torch.nn.Module, chains: tuple[tuple[str, ...], ...], piece: int) -> None:
    """Makes transformers' decoder layer compute the modules of each chain `piece` tokens at a
    time.
    """
    for names in chains:
        modules = [layer.get_submodule(name) for name in names]
        forwards = [type(module).forward for module in modules]
        for module in modules[:-1]:
            module.forward = _same  # type: ignore[method-assign]
        modules[-1].forward = _Whole(modules, forwards, piece)  # type: ignore[method-assign]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class _Whole:
    def __init__(self, modules: list[torch.nn.Module], forwards: list[Any], piece: int) -> None:
        self.modules, self.forwards, self.piece = modules, forwards, piece
        self.names = [
            (index, name)
            for index, module in enumerate(modules)
            for name, _ in module.named_parameters()
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weights = [self.modules[index].get_parameter(name) for index, name in self.names]
        made: torch.Tensor = _Definition.apply(self, x, *weights)
        return made

    def compute(self, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for index, (module, forward) in enumerate(zip(self.modules, self.forwards, strict=True)):
            own = {
                name: weight
                for (which, name), weight in zip(self.names, weights, strict=True)
                if which == index
            }
            x = functional_call(_Calls(module, forward), {f"of.{n}": w for n, w in own.items()}, x)
        return x


class _Calls(torch.nn.Module):
    """Calls a module with the forward of its class."""

    def __init__(self, of: torch.nn.Module, forward: Any) -> None:
        super().__init__()
        self.of, self._forward = of, forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._forward(self.of, x)
        return made


class _Definition(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: _Whole, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.whole = whole
        ctx.save_for_backward(x, *weights)
        runs = x.flatten(0, 1).split(whole.piece)
        made = [whole.compute(run[None], list(weights))[0] for run in runs]
        return torch.cat(made).view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        below, sums = [], [torch.zeros(weight.shape, device=x.device) for weight in weights]
        for run, upper in zip(
            x.flatten(0, 1).split(ctx.whole.piece),
            gradient.flatten(0, 1).split(ctx.whole.piece),
            strict=True,
        ):
            leaves = [each.detach().requires_grad_() for each in (run, *weights)]
            with torch.enable_grad():
                made = ctx.whole.compute(leaves[0][None], leaves[1:])[0]
            dx, *found = torch.autograd.grad(made, leaves, upper)
            below.append(dx)
            sums = [total + each.float() for total, each in zip(sums, found, strict=True)]
        rounded = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return None, torch.cat(below).view_as(x), *rounded
