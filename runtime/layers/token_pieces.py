"""Chains of modules of a decoder layer that compute a piece of tokens at a time.

A chain is the MLP or the router and its experts, with the norm before them, or it is the norm
before attention (`LayerPieces`). Its last module computes the whole chain, and the other modules
return their input. Each token is computed with transformers' modules.

Autograd saves only the input of a chain. The backward pass recomputes the pieces in order, each
with a graph. It stores the gradient of the piece's input, and adds the gradients of weights, which
are in the compute dtype, to sums in fp32. After the last piece, the sums are rounded to the compute
dtype.

If the model is trained with a router loss, a chain with a router also returns the logits of all
tokens, because the loss reads the choices of all tokens (`router_loss.py`). Their gradient reaches
the router piece by piece, together with the gradient of the output.

If the output of a recompute is not used, the MLP is skipped: its output is NaN, and its backward
pass recomputes it anyway. A chain that returns logits is not skipped.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from megatrain.runtime.layers import compiling
from megatrain.runtime.layers.last_products import leave_out
from megatrain.simulator.model.families import LayerPieces

_CHAINS: weakref.WeakValueDictionary[int, Chain] = weakref.WeakValueDictionary()
"""All chains of this process by index. The ops of compiled layers take this index."""
_INDICES = itertools.count()


class Router(NamedTuple):
    """Where a model's routers return their logits."""

    kind: type
    """Class of the routers."""
    output: int
    """Index of the logits in a router's outputs."""

    def record(self, module: torch.nn.Module, logits: list[torch.Tensor]) -> None:
        """Makes the routers in `module` append their logits, [tokens, experts], to `logits`."""
        for part in module.modules():
            if isinstance(part, self.kind):
                part.register_forward_hook(
                    lambda _module, _input, outputs: logits.append(outputs[self.output])
                )


class Chain:
    """Modules that are computed in sequence, for a piece of tokens at a time."""

    def __init__(
        self,
        modules: list[torch.nn.Module],
        piece: int,
        *,
        hidden: int,
        compiled: bool,
        router: Router | None,
        logits: list[torch.Tensor],
        last: Iterable[str],
    ) -> None:
        """Copies `modules` to the meta device. Calls take the weights of the layer.

        Args:
            modules: the modules in the order of their computation.
            piece: number of tokens in a piece.
            hidden: width of the input.
            compiled: whether to compile the function of a piece.
            router: the model's routers if their logits are recorded, otherwise None.
            logits: the list to which the layer appends the logits of all tokens.
            last: names of the weights in a `Sequential` of `modules` whose products the backward
                pass leaves out.
        """
        self._layer_modules = modules
        run = torch.nn.Sequential(*map(copy.deepcopy, modules)).to("meta")
        self.names = [name for name, _ in _tensors_of(list(run))]
        """Names of the tensors that `run` takes."""
        self._piece = piece
        self.left_out = False
        """Whether the forward pass skips the computation and returns NaN."""
        self.logits = logits
        """The list to which the layer appends the logits of all tokens."""
        self.index = next(_INDICES)
        _CHAINS[self.index] = self
        recorded: list[torch.Tensor] = []
        short = copy.deepcopy(run)
        leave_out(short, last)
        if router:
            router.record(run, recorded)
            router.record(short, recorded)

        def called(
            modules: torch.nn.Sequential, tensors: dict[str, torch.Tensor], x: torch.Tensor
        ) -> list[torch.Tensor]:
            recorded.clear()
            output: Any = functional_call(modules, tensors, (x[None],))
            output = output[0] if isinstance(output, tuple) else output
            return [output.reshape(x.shape), *recorded]

        def eager(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
            return called(run, tensors, x)

        def eager_short(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
            return called(short, tensors, x)

        self.eager = eager
        """Returns the output of one piece, [tokens, hidden], and its logits, [tokens, experts], if
        they are recorded, from tensors by name and the input."""
        self.run: Callable[..., Any] = compiling.compiled(eager) if compiled else eager
        """`eager`, which is compiled if the layer is compiled."""
        self.run_short: Callable[..., Any] = self.run
        """Like `run`, for the backward pass. It leaves out the products of `last`. The output is
        NaN if there are any."""
        if last:
            self.run_short = compiling.compiled(eager_short) if compiled else eager_short
        self.pair = False
        """Whether the last module returns a tuple with its output and something else."""
        self.further: list[tuple[int, torch.dtype]] = []
        """Width and dtype of the logits, if they are recorded."""
        self._describe(run, hidden)

    def _describe(self, run: torch.nn.Sequential, hidden: int) -> None:
        """Sets `pair` and `further` from a call with tensors that have no memory."""
        named = dict(_tensors_of(list(run)))
        # A model in bf16 may have single parameters in fp32.
        own = min((tensor.dtype for tensor in named.values()), key=lambda dtype: dtype.itemsize)
        device = next((t.device for t in self.tensors() if not t.is_meta), torch.device("cpu"))
        returned: list[object] = []
        hook = run[-1].register_forward_hook(lambda _run, _input, output: returned.append(output))
        with FakeTensorMode(), torch.no_grad():
            # Grouped products exist without memory only in bf16.
            tensors = {
                name: torch.empty(
                    tensor.shape,
                    dtype=torch.bfloat16 if tensor.dtype == own else tensor.dtype,
                    device=device,
                )
                for name, tensor in named.items()
            }
            x = torch.empty(1, hidden, dtype=torch.bfloat16, device=device)
            _, *further = self.eager(tensors, x)
        hook.remove()
        self.pair = isinstance(returned[0], tuple)
        self.further = [
            (logits.shape[-1], own if logits.dtype == torch.bfloat16 else logits.dtype)
            for logits in further
        ]

    def empty(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Returns tensors without values for the results of the input `x` [..., hidden]: the output
        of this shape, contiguous, and the logits, [tokens, experts], if they are recorded.
        """
        # The output is not a view, because a layer may change it in place.
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows = x.flatten(0, -2).shape[0]
        return [output, *(x.new_empty(rows, width, dtype=dtype) for width, dtype in self.further)]

    def tensors(self) -> list[torch.Tensor]:
        """Returns the current parameters and buffers of the layer's modules, in the order of
        `names`.
        """
        return [tensor for _, tensor in _tensors_of(self._layer_modules)]

    def rows(self, x: torch.Tensor) -> Iterator[slice]:
        """Yields the rows of each piece of `x` [tokens, hidden]."""
        for start in range(0, x.shape[0], self._piece):
            yield slice(start, start + self._piece)

    def __call__(
        self, tensors: Sequence[torch.Tensor], x: torch.Tensor, *, short: bool = False
    ) -> list[torch.Tensor]:
        """Returns what `eager` returns for one piece `x` [tokens, hidden], or with `short` what
        `run_short` returns.
        """
        run = self.run_short if short else self.run
        results: list[torch.Tensor] = run(dict(zip(self.names, tensors, strict=True)), x)
        return results


def _tensors_of(modules: list[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters and buffers of `modules` with their names in a `Sequential`."""
    return [
        (f"{index}.{name}", tensor)
        for index, module in enumerate(modules)
        for part in (module.named_parameters(), module.named_buffers())
        for name, tensor in part
    ]


def forward_of(
    chain: Chain, x: torch.Tensor, tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the results of `chain` for `x` [..., hidden], as `Chain.empty` describes them."""
    results = chain.empty(x)
    if chain.left_out:
        assert len(results) == 1, "the router loss reads the logits"
        return [results[0].fill_(torch.nan)]
    # Without gradients, so only one program is compiled.
    flat, tensors = x.detach().flatten(0, -2), [tensor.detach() for tensor in tensors]
    for rows in chain.rows(flat):
        for whole, part in zip(results, chain(tensors, flat[rows]), strict=True):
            whole.view(-1, whole.shape[-1])[rows] = part
    return results


def backward_of(
    chain: Chain,
    gradients: Sequence[torch.Tensor],
    x: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    needed: Sequence[bool],
) -> list[torch.Tensor]:
    """Returns the gradients of `x` [..., hidden], and of the `tensors` with a true `needed`.

    `gradients` are those of the results of `forward_of`. The last may be left out.
    """
    flat = x.flatten(0, -2)
    uppers = [gradient.flatten(0, -2) for gradient in gradients]
    dx = torch.empty_like(flat, memory_format=torch.contiguous_format)
    tensors = [
        tensor.detach().requires_grad_(need) for tensor, need in zip(tensors, needed, strict=True)
    ]
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    sums: list[torch.Tensor] = []
    for rows in chain.rows(flat):
        with torch.enable_grad():
            piece = flat[rows].detach().requires_grad_()
            results = chain(tensors, piece, short=True)[: len(uppers)]
        dx[rows], *parts = torch.autograd.grad(
            results, (piece, *trained), [upper[rows] for upper in uppers]
        )
        del results
        if not sums:
            sums = [part.float() for part in parts]
        else:
            for total in sums:
                total += parts.pop(0)  # frees the gradient after the addition
        del parts
    sums.reverse()
    return [dx.view_as(x), *(sums.pop().to(tensor.dtype) for tensor in trained)]


class _InPieces(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, chain: Chain, x: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(x, *tensors)
        ctx.set_materialize_grads(False)
        ctx.chain = chain
        return tuple(forward_of(chain, x, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        x, *tensors = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        dx, *below = backward_of(ctx.chain, _present(gradients), x, tensors, needed)
        return None, dx, *_where_needed(below, needed)


def _present(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Returns the gradients of the output and, if there is a router loss, of the logits."""
    return [gradient for gradient in gradients if gradient is not None]


def _where_needed(
    gradients: list[torch.Tensor], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Returns a list with `gradients` at the true entries of `needed`, and None at the others."""
    remaining = iter(gradients)
    return [next(remaining) if need else None for need in needed]


@torch.library.custom_op("megatrain::in_pieces", mutates_args=())
def _op(x: torch.Tensor, tensors: list[torch.Tensor], chain: int) -> list[torch.Tensor]:
    """Returns what `forward_of` returns, in a compiled layer."""
    with torch.no_grad(), _with_autograd():
        return forward_of(_CHAINS[chain], x, tensors)


@_op.register_fake
def _(x: torch.Tensor, tensors: list[torch.Tensor], chain: int) -> list[torch.Tensor]:
    del tensors  # PyTorch passes every argument of the op
    return _CHAINS[chain].empty(x)


@torch.library.custom_op("megatrain::in_pieces_backward", mutates_args=())
def _op_backward(
    gradients: list[torch.Tensor],
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    needed: list[bool],
    chain: int,
) -> list[torch.Tensor]:
    """Returns what `backward_of` returns, in a compiled layer."""
    with _with_autograd():
        return backward_of(_CHAINS[chain], gradients, x, tensors, needed)


@_op_backward.register_fake
def _(
    gradients: list[torch.Tensor],
    x: torch.Tensor,
    tensors: list[torch.Tensor],
    needed: list[bool],
    chain: int,
) -> list[torch.Tensor]:
    del gradients, chain  # PyTorch passes every argument of the op
    trained = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]
    return [torch.empty_like(like, memory_format=torch.contiguous_format) for like in (x, *trained)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    del output  # PyTorch passes it, but the backward pass does not need it
    ctx.set_materialize_grads(False)
    x, tensors, ctx.chain = inputs
    ctx.needed = [tensor.requires_grad for tensor in tensors]
    ctx.save_for_backward(x, *tensors)


def _gradients(ctx: Any, gradients: list[torch.Tensor | None]) -> tuple[Any, ...]:
    x, *tensors = ctx.saved_tensors
    dx, *below = _op_backward(_present(gradients), x, tensors, ctx.needed, ctx.chain)
    return dx, _where_needed(below, ctx.needed), None


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


def _in_pieces(self: torch.nn.Module, x: torch.Tensor) -> Any:
    chain: Any = self._chain
    if torch.compiler.is_compiling():
        output, *further = _op(x, chain.tensors(), chain.index)
    else:
        output, *further = _InPieces.apply(chain, x, *chain.tensors())
    chain.logits.extend(further)
    return (output, None) if chain.pair else output


@functools.cache
def _changed(kind: Any, *, last: bool) -> type:
    """Returns the subclass of `kind` for the last module of a chain or, if not `last`, for the
    other modules. Modules of one class get the same subclass, so layers of the same kind stay
    layers of the same kind.
    """
    forward = _in_pieces if last else _identity
    return type(f"{kind.__name__}InPieces", (kind,), {"forward": forward})


def install(
    layer: torch.nn.Module,
    pieces: LayerPieces,
    piece: int,
    *,
    hidden: int,
    compiled: bool,
    router: Router | None,
    logits: list[torch.Tensor],
    last: Iterable[str],
) -> None:
    """Changes transformers' decoder layer to compute its chains for `piece` tokens at a time.

    Args:
        layer: the decoder layer.
        pieces: the modules of each chain.
        piece: number of tokens in a piece.
        hidden: width of the hidden states.
        compiled: whether the layer is compiled.
        router: the model's routers if their logits are recorded, otherwise None.
        logits: the list to which the layer appends the logits of all tokens, [tokens, experts].
        last: names of the weights whose products the backward pass leaves out.
    """
    for names in pieces.modules:
        modules = [layer.get_submodule(name) for name in names]
        vars(modules[-1])["_chain"] = Chain(
            modules,
            piece,
            hidden=hidden,
            compiled=compiled,
            router=router,
            logits=logits,
            last=[
                f"{index}.{weight.removeprefix(f'{name}.')}"
                for index, name in enumerate(names)
                for weight in last
                if weight.startswith(f"{name}.")
            ],
        )
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
