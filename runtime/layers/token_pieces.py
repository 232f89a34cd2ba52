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

In a compiled layer, a chain is one op that the compiler does not look into, `megatrain::in_pieces`,
with `megatrain::in_pieces_backward` for its gradients. The function of one piece is compiled by
itself. Its forward pass always runs the program without gradients, so that its bits do not depend
on whether the layer is recomputed.
"""

from __future__ import annotations

import copy
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.func import functional_call

from megatrain.runtime.layers import compiling
from megatrain.simulator.model.families import LayerPieces

_CHAINS: weakref.WeakValueDictionary[int, Chain] = weakref.WeakValueDictionary()
"""the chains of this process by their index, which is an argument of the ops of compiled layers"""
_INDICES = itertools.count()


class Chain:
    """Modules that are computed one after the other, a piece of tokens at a time."""

    def __init__(self, modules: list[torch.nn.Module], piece: int, *, compiled: bool) -> None:
        """Copies `modules`. They have no memory, and are called with the weights of the layer.

        Args:
            modules: the modules in the order in which a token passes them.
            piece: tokens of a piece.
            compiled: whether to compile the function of a piece.
        """
        self._given = modules
        run = torch.nn.Sequential(*map(copy.deepcopy, modules)).to("meta")
        self.names = [name for name, _ in _tensors_of(list(run))]
        """names of the tensors that `run` takes"""
        self._piece = piece
        self.left_out = False
        """Whether the forward pass computes nothing."""
        self.index = next(_INDICES)
        _CHAINS[self.index] = self

        def eager(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = functional_call(run, tensors, (x[None],))
            return made[0]

        self.eager = eager
        """returns the output of one piece [tokens, hidden], from tensors by name and its input"""
        self.run: Callable[..., Any] = compiling.compiled(eager) if compiled else eager
        """`eager`, compiled if the layer is"""

    def tensors(self) -> list[torch.Tensor]:
        """Returns the parameters and buffers that the layer's modules have now."""
        return [tensor for _, tensor in _tensors_of(self._given)]

    def rows(self, x: torch.Tensor) -> Iterator[slice]:
        """Yields the tokens of each piece of `x` [tokens, hidden]."""
        for start in range(0, x.shape[0], self._piece):
            yield slice(start, start + self._piece)

    def __call__(self, tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Returns the output of one piece `x` [tokens, hidden]."""
        made: torch.Tensor = self.run(dict(zip(self.names, tensors, strict=True)), x)
        return made


def _tensors_of(modules: list[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers of `modules` with their names in a `Sequential`."""
    return [
        (f"{index}.{name}", tensor)
        for index, module in enumerate(modules)
        for part in (module.named_parameters(), module.named_buffers())
        for name, tensor in part
    ]


def forward_of(chain: Chain, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the output of `chain` for `x` [..., hidden]. It is contiguous."""
    if chain.left_out:
        return torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
    x, tensors = x.detach(), [tensor.detach() for tensor in tensors]  # so that one program is made
    # A layer may change the output in place, so that it is no view.
    made, flat = torch.empty_like(x, memory_format=torch.contiguous_format), x.flatten(0, -2)
    for rows in chain.rows(flat):
        made.view_as(flat)[rows] = chain(tensors, flat[rows])
    return made


def backward_of(
    chain: Chain,
    gradient: torch.Tensor,
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    needed: Sequence[bool],
) -> list[torch.Tensor]:
    """Returns the gradients of `x` [..., hidden] and of those `tensors` that are `needed`."""
    flat, upper = x.flatten(0, -2), gradient.flatten(0, -2)
    dx = torch.empty_like(flat, memory_format=torch.contiguous_format)
    tensors = [
        tensor.detach().requires_grad_(each) for tensor, each in zip(tensors, needed, strict=True)
    ]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    sums: list[torch.Tensor] = []
    for rows in chain.rows(flat):
        with torch.enable_grad():
            piece = flat[rows].detach().requires_grad_()
            made = chain(tensors, piece)
        dx[rows], *found = torch.autograd.grad(made, (piece, *trained), upper[rows])
        del made
        if not sums:
            sums = [each.float() for each in found]
        else:
            for total in sums:
                total += found.pop(0)  # which frees it
        del found
    sums.reverse()
    return [dx.view_as(x), *(sums.pop().to(tensor.dtype) for tensor in trained)]


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chain: Chain, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, *tensors)
        ctx.chain = chain
        return forward_of(chain, x, tensors)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        dx, *found = backward_of(ctx.chain, gradient, x, tensors, needed)
        gradients = iter(found)
        return None, dx, *(next(gradients) if each else None for each in needed)


@torch.library.custom_op("megatrain::in_pieces", mutates_args=())
def _op(x: torch.Tensor, tensors: list[torch.Tensor], chain: int) -> torch.Tensor:
    """Returns what `forward_of` returns, in a compiled layer."""
    with torch.no_grad(), _with_autograd():
        return forward_of(_CHAINS[chain], x, tensors)


@_op.register_fake
def _(x: torch.Tensor, tensors: list[torch.Tensor], chain: int) -> torch.Tensor:
    del tensors, chain  # PyTorch passes every argument of the op
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("megatrain::in_pieces_backward", mutates_args=())
def _op_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    needed: list[bool],
    chain: int,
) -> list[torch.Tensor]:
    """Returns what `backward_of` returns, in a compiled layer."""
    with _with_autograd():
        return backward_of(_CHAINS[chain], gradient, x, tensors, needed)


@_op_backward.register_fake
def _(
    gradient: torch.Tensor,
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    needed: list[bool],
    chain: int,
) -> list[torch.Tensor]:
    del gradient, chain  # PyTorch passes every argument of the op
    trained = [tensor for tensor, each in zip(tensors, needed, strict=True) if each]
    return [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, *trained)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output  # PyTorch gives it, too
    x, tensors, ctx.chain = inputs
    ctx.needed = [tensor.requires_grad for tensor in tensors]
    ctx.save_for_backward(x, *tensors)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, *tensors = ctx.saved_tensors
    dx, *found = _op_backward(gradient, x, tensors, ctx.needed, ctx.chain)
    gradients = iter(found)
    return dx, [next(gradients) if each else None for each in ctx.needed], None


_op.register_autograd(_gradients, setup_context=_save)


@contextmanager
def _with_autograd() -> Iterator[None]:
    """Lets autograd record what runs inside of an op. PyTorch excludes it there."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    for key in ("AutogradOther", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView"):
        keys = keys | torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    include, exclude = (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )
    with torch._C._ForceDispatchKeyGuard(include, exclude - keys):
        yield


def _identity(_self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x


def _in_pieces(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    chain: Any = self._chain
    if torch.compiler.is_compiling():
        return _op(x, chain.tensors(), chain.index)
    made: torch.Tensor = _InPieces.apply(chain, x, *chain.tensors())
    return made


@functools.cache
def _changed(kind: Any, *, last: bool) -> type:
    """Returns the class of a module that ends a chain, or of one that comes before in it. Equal
    modules get the same class, so that their layers are still of the same kind.
    """
    forward = _in_pieces if last else _identity
    return type(f"{kind.__name__}InPieces", (kind,), {"forward": forward})


def install(layer: torch.nn.Module, pieces: LayerPieces, piece: int, *, compiled: bool) -> None:
    """Changes the chains of transformers' decoder layer to compute `piece` tokens at a time.

    Args:
        layer: the decoder layer.
        pieces: what of it is computed in pieces.
        piece: tokens of a piece.
        compiled: whether the layer is compiled.
    """
    for names in pieces.modules:
        modules = [layer.get_submodule(name) for name in names]
        vars(modules[-1])["_chain"] = Chain(modules, piece, compiled=compiled)
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
