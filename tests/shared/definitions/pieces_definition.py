"""A second implementation of decoder layers that compute their modules in token pieces.

Each chain of modules is one function of its input and its weights. The function computes one piece
of the tokens after the other, and sums the gradients of weights in fp32, in the order of the
pieces. If the router's logits are wanted, the function also returns the logits of all tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.func import functional_call


def in_pieces(
    layer: torch.nn.Module,
    chains: tuple[tuple[str, ...], ...],
    piece: int,
    router: tuple[type, int] | None,
    logits: list[torch.Tensor],
) -> None:
    """Makes transformers' decoder layer compute the modules of each chain `piece` tokens at a
    time.

    `router` is the class of the model's routers and the index of the logits in their outputs. The
    layer appends the logits of all tokens to `logits`. None means that they are not wanted.
    """
    for names in chains:
        modules = [layer.get_submodule(name) for name in names]
        forwards = [type(module).forward for module in modules]
        for module in modules[:-1]:
            module.forward = _same  # type: ignore[method-assign]
        found: list[torch.Tensor] = []
        for module in modules[-1].modules() if router else ():
            if router and isinstance(module, router[0]):
                module.register_forward_hook(
                    lambda _module, _rows, made, to=found, index=router[1]: to.append(made[index])
                )
        whole = _Whole(modules, forwards, piece, found, logits)
        modules[-1].forward = whole  # type: ignore[method-assign]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class _Whole:
    def __init__(
        self,
        modules: list[torch.nn.Module],
        forwards: list[Any],
        piece: int,
        found: list[torch.Tensor],
        logits: list[torch.Tensor],
    ) -> None:
        self.modules, self.forwards, self.piece = modules, forwards, piece
        self.found, self.logits, self.pair = found, logits, False
        self.names = [
            (index, name)
            for index, module in enumerate(modules)
            for name, _ in module.named_parameters()
        ]

    def __call__(self, x: torch.Tensor) -> Any:
        weights = [self.modules[index].get_parameter(name) for index, name in self.names]
        made, *logits = _Definition.apply(self, x, *weights)
        self.logits += logits
        return (made, None) if self.pair else made

    def compute(self, run: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the output of a run of tokens, [tokens, hidden], and the logits if wanted."""
        self.found.clear()
        x: Any = run[None]
        for index, (module, forward) in enumerate(zip(self.modules, self.forwards, strict=True)):
            own = {
                name: weight
                for (which, name), weight in zip(self.names, weights, strict=True)
                if which == index
            }
            x = functional_call(_Calls(module, forward), {f"of.{n}": w for n, w in own.items()}, x)
        self.pair = isinstance(x, tuple)
        return [(x[0] if self.pair else x).reshape(run.shape), *self.found]


class _Calls(torch.nn.Module):
    """Calls a module with the forward of its class."""

    def __init__(self, of: torch.nn.Module, forward: Any) -> None:
        super().__init__()
        self.of, self._forward = of, forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self.of, x)


class _Definition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, whole: _Whole, x: torch.Tensor, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.whole = whole
        ctx.save_for_backward(x, *weights)
        runs = x.flatten(0, 1).split(whole.piece)
        made, *logits = zip(*(whole.compute(run, list(weights)) for run in runs), strict=True)
        return torch.cat(made).view_as(x), *map(torch.cat, logits)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        below, sums = [], [torch.zeros(weight.shape, device=x.device) for weight in weights]
        for run, *uppers in zip(
            x.flatten(0, 1).split(ctx.whole.piece),
            *(gradient.flatten(0, -2).split(ctx.whole.piece) for gradient in gradients),
            strict=True,
        ):
            leaves = [each.detach().requires_grad_() for each in (run, *weights)]
            with torch.enable_grad():
                made = ctx.whole.compute(leaves[0], leaves[1:])
            dx, *found = torch.autograd.grad(made, leaves, uppers)
            below.append(dx)
            sums = [total + each.float() for total, each in zip(sums, found, strict=True)]
        rounded = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return None, torch.cat(below).view_as(x), *rounded
