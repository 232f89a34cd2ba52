"""Chains of modules of a decoder layer that compute a run of tokens at a time.

A chain is the MLP with the norm before it, or the norm before attention (`LayerPieces`). Its last
module computes all of it, and the modules before that one return their input. The computation of a
token is that of transformers' modules.

Autograd saves only the input of a chain. The backward pass goes through the pieces in order. It
computes each again with a graph, writes the gradient of its input into its place, and adds the
gradients of its weights, which are in the compute dtype, to sums in fp32. After the last piece, the
sums are rounded to the compute dtype.

In a recompute whose output nobody reads, the MLP is left out: its output is NaN, and its backward
pass computes it anyway.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import functional_call

from megatrain.simulator.model.families import LayerPieces


class Chain:
    """Modules that are computed one after the other, a piece of tokens at a time."""

    def __init__(self, modules: list[torch.nn.Module], piece: int) -> None:
        """Copies `modules`. They have no memory, and are called with the weights of the layer."""
        self._given = modules
        self._run = torch.nn.Sequential(*map(copy.deepcopy, modules)).to("meta")
        self._piece = piece
        self.left_out = False
        """Whether the forward pass computes nothing."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers that the layer's modules have now, by name."""
        return {
            f"{index}.{name}": tensor
            for index, module in enumerate(self._given)
            for part in (module.named_parameters(), module.named_buffers())
            for name, tensor in part
        }

    def rows(self, x: torch.Tensor) -> Iterator[slice]:
        """Yields the tokens of each piece of `x` [tokens, hidden]."""
        for start in range(0, x.shape[0], self._piece):
            yield slice(start, start + self._piece)

    def __call__(self, tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Returns the output of one piece `x` [tokens, hidden]."""
        made: torch.Tensor = functional_call(self._run, tensors, (x[None],))
        return made[0]


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chain: Chain, names: list[str], x: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *tensors)
        ctx.chain, ctx.names = chain, names
        if chain.left_out:
            return torch.full_like(x, torch.nan)
        # A layer may change the output in place, so that it is no view.
        made, flat = torch.empty_like(x, memory_format=torch.contiguous_format), x.flatten(0, -2)
        for rows in chain.rows(flat):
            made.view_as(flat)[rows] = chain(dict(zip(names, tensors, strict=True)), flat[rows])
        return made

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, *tensors = ctx.saved_tensors
        chain: Chain = ctx.chain
        flat, upper = x.flatten(0, -2), gradient.flatten(0, -2)
        dx = torch.empty_like(flat, memory_format=torch.contiguous_format)
        tensors = [
            tensor.detach().requires_grad_(needed)
            for tensor, needed in zip(tensors, ctx.needs_input_grad[3:], strict=True)
        ]
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        sums: list[torch.Tensor] = []
        for rows in chain.rows(flat):
            with torch.enable_grad():
                piece = flat[rows].detach().requires_grad_()
                made = chain(dict(zip(ctx.names, tensors, strict=True)), piece)
            dx[rows], *found = torch.autograd.grad(made, (piece, *trained), upper[rows])
            del made
            if not sums:
                sums = [each.float() for each in found]
            else:
                for total in sums:
                    total += found.pop(0)  # which frees it
            del found
        sums.reverse()
        gradients = [
            sums.pop().to(tensor.dtype) if tensor.requires_grad else None for tensor in tensors
        ]
        return None, None, dx.view_as(x), *gradients


def _identity(_self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x


def _in_pieces(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    chain: Chain = vars(self)["_chain"]
    tensors = chain.tensors()
    made: torch.Tensor = _InPieces.apply(chain, list(tensors), x, *tensors.values())
    return made


@functools.cache
def _changed(kind: Any, *, last: bool) -> type:
    """Returns the class of a module that ends a chain, or of one that comes before in it. Equal
    modules get the same class, so that their layers are still of the same kind.
    """
    forward = _in_pieces if last else _identity
    return type(f"{kind.__name__}InPieces", (kind,), {"forward": forward})


def install(layer: torch.nn.Module, pieces: LayerPieces, piece: int) -> None:
    """Changes the chains of transformers' decoder layer to compute `piece` tokens at a time."""
    for names in pieces.modules:
        modules = [layer.get_submodule(name) for name in names]
        vars(modules[-1])["_chain"] = Chain(modules, piece)
        for module in modules:
            kind: Any = type(module)
            module.__class__ = _changed(kind, last=module is modules[-1])
    vars(layer)["_last_chain"] = vars(modules[-1])["_chain"]


@contextmanager
def without_mlp(layer: torch.nn.Module) -> Iterator[None]:
    """Leaves out the MLP of forward passes inside of the context, if it is computed in pieces."""
    chain: Chain | None = vars(layer).get("_last_chain")
    if chain is None:
        yield
        return
    chain.left_out = True
    try:
        yield
    finally:
        chain.left_out = False
