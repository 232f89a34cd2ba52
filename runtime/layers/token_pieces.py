"""Chains of modules of a decoder layer that compute a piece of tokens at a time.

A chain is the MLP with the norm before it, or the norm before attention (`LayerPieces`). Its last
module computes the whole chain, and the other modules return their input. Each token is computed
with transformers' modules.

Autograd saves only the input of a chain. The backward pass recomputes the pieces in order, each
with a graph. It stores the gradient of the piece's input, and adds the gradients of weights, which
are in the compute dtype, to sums in fp32. After the last piece, the sums are rounded to the compute
dtype.

If the output of a recompute is not used, the MLP is skipped: its output is NaN, and its backward
pass recomputes it anyway.

In a compiled layer, a chain is one op that is opaque to the compiler, `megatrain::in_pieces`, with
the op `megatrain::in_pieces_backward` for its gradients. The function of a piece is compiled
separately. The forward pass always runs the program without gradients, so its bits do not depend on
whether the layer is recomputed.
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
"""All chains of this process by index. The ops of compiled layers take this index."""
_INDICES = itertools.count()


class Chain:
    """Modules that are computed in sequence, for a piece of tokens at a time."""

    def __init__(self, modules: list[torch.nn.Module], piece: int, *, compiled: bool) -> None:
        """Copies `modules` to the meta device. Calls take the weights of the layer.

        Args:
            modules: the modules in the order of their computation.
            piece: number of tokens in a piece.
            compiled: whether to compile the function of a piece.
        """
        self._layer_modules = modules
        run = torch.nn.Sequential(*map(copy.deepcopy, modules)).to("meta")
        self.names = [name for name, _ in _tensors_of(list(run))]
        """Names of the tensors that `run` takes."""
        self._piece = piece
        self.left_out = False
        """Whether the forward pass skips the computation and returns NaN."""
        self.index = next(_INDICES)
        _CHAINS[self.index] = self

        def eager(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = functional_call(run, tensors, (x[None],))
            return output[0]

        self.eager = eager
        """Returns the output of one piece, [tokens, hidden], from tensors by name and the input."""
        self.run: Callable[..., Any] = compiling.compiled(eager) if compiled else eager
        """`eager`, which is compiled if the layer is compiled."""

    def tensors(self) -> list[torch.Tensor]:
        """Returns the current parameters and buffers of the layer's modules, in the order of
        `names`.
        """
        return [tensor for _, tensor in _tensors_of(self._layer_modules)]

    def rows(self, x: torch.Tensor) -> Iterator[slice]:
        """Yields the rows of each piece of `x` [tokens, hidden]."""
        for start in range(0, x.shape[0], self._piece):
            yield slice(start, start + self._piece)

    def __call__(self, tensors: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Returns the output of one piece `x` [tokens, hidden]."""
        output: torch.Tensor = self.run(dict(zip(self.names, tensors, strict=True)), x)
        return output


def _tensors_of(modules: list[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers of `modules` with their names in a `Sequential`."""
    return [
        (f"{index}.{name}", tensor)
        for index, module in enumerate(modules)
        for part in (module.named_parameters(), module.named_buffers())
        for name, tensor in part
    ]


def forward_of(chain: Chain, x: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the output of `chain` for `x` [..., hidden], contiguous."""
    if chain.left_out:
        return torch.full_like(x, torch.nan, memory_format=torch.contiguous_format)
    # Without gradients, so only one program is compiled.
    x, tensors = x.detach(), [tensor.detach() for tensor in tensors]
    # The output is not a view, because a layer may change it in place.
    output, flat = torch.empty_like(x, memory_format=torch.contiguous_format), x.flatten(0, -2)
    for rows in chain.rows(flat):
        output.view_as(flat)[rows] = chain(tensors, flat[rows])
    return output


def backward_of(
    chain: Chain,
    gradient: torch.Tensor,
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    needed: Sequence[bool],
) -> list[torch.Tensor]:
    """Returns the gradients of `x` [..., hidden], and of the `tensors` with a true `needed`."""
    flat, upper = x.flatten(0, -2), gradient.flatten(0, -2)
    dx = torch.empty_like(flat, memory_format=torch.contiguous_format)
    tensors = [
        tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)
    ]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    sums: list[torch.Tensor] = []
    for rows in chain.rows(flat):
        with torch.enable_grad():
            piece = flat[rows].detach().requires_grad_()
            output = chain(tensors, piece)
        dx[rows], *gradients = torch.autograd.grad(output, (piece, *trained), upper[rows])
        del output
        if not sums:
            sums = [part.float() for part in gradients]
        else:
            for total in sums:
                total += gradients.pop(0)  # frees the gradient after the addition
        del gradients
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
        dx, *gradients = backward_of(ctx.chain, gradient, x, tensors, needed)
        return None, dx, *_where_needed(gradients, needed)


def _where_needed(
    gradients: list[torch.Tensor], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Returns a list with `gradients` at the true entries of `needed`, and None at the others."""
    remaining = iter(gradients)
    return [next(remaining) if need else None for need in needed]


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
    trained = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
    return [torch.empty_like(like, memory_format=torch.contiguous_format) for like in (x, *trained)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output  # PyTorch passes it, but the backward pass does not need it
    x, tensors, ctx.chain = inputs
    ctx.needed = [tensor.requires_grad for tensor in tensors]
    ctx.save_for_backward(x, *tensors)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, *tensors = ctx.saved_tensors
    dx, *gradients = _op_backward(gradient, x, tensors, ctx.needed, ctx.chain)
    return dx, _where_needed(gradients, ctx.needed), None


_op.register_autograd(_gradients, setup_context=_save)


@contextmanager
def _with_autograd() -> Iterator[None]:
    """Enables autograd inside a custom op, where PyTorch disables it."""
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
    output: torch.Tensor = _InPieces.apply(chain, x, *chain.tensors())
    return output


@functools.cache
def _changed(kind: Any, *, last: bool) -> type:
    """Returns the subclass of `kind` for the last module of a chain or, if not `last`, for the
    other modules. Modules of one class get the same subclass, so layers of the same kind stay
    layers of the same kind.
    """
    forward = _in_pieces if last else _identity
    return type(f"{kind.__name__}InPieces", (kind,), {"forward": forward})


def install(layer: torch.nn.Module, pieces: LayerPieces, piece: int, *, compiled: bool) -> None:
    """Changes transformers' decoder layer to compute its chains for `piece` tokens at a time.

    Args:
        layer: the decoder layer.
        pieces: the modules of each chain.
        piece: number of tokens in a piece.
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
    """Skips the MLP in forward passes inside the context, if it is computed in pieces."""
    chain: Chain | None = vars(layer).get("_last_chain")
    if chain is None:
        yield
        return
    chain.left_out = True
    try:
        yield
    finally:
        chain.left_out = False
