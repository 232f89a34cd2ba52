"""Counts the device memory that a real decoder layer takes in the runtime, without a GPU.

The runtime's own function of a layer is executed on fake tensors. They have shapes but no memory,
so layers of real widths with thousands of tokens are counted in a second. Every tensor that an op
makes counts from then on until it is freed, rounded up to 512 bytes as in PyTorch's allocator.

The fake tensors are on the CPU. Three things differ on a GPU and are modelled here:

* *Attention.* `scaled_dot_product_attention` is replaced by a function that allocates as the GPU's
  kernels do. Without a mask this is flash attention, otherwise memory-efficient attention.
* *Lengths.* The kernel for sinks receives lengths instead of a mask.
* *Memory inside kernels.* Fake kernels only allocate their results. `INSIDE` has the temporary
  bytes of the GPU's kernels for some ops.

How many tokens an expert receives does not change these bytes: all experts are one grouped product,
whose rows are the pairs of a token and an expert.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from megatrain.runtime.layers import lengths
from megatrain.runtime.layers.functional_layers import FunctionalLayers, config_of
from megatrain.runtime.layers.table_gradient import TableGradient
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.simulator.model.attention_masks import document_attention
from megatrain.simulator.model.layer import EMBEDDING, LayerSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

BLOCK = 512
"""PyTorch's allocator rounds each allocation up to a multiple of this many bytes."""


class Peaks(NamedTuple):
    """Bytes that a decoder layer takes in addition to its weights, its input, and the gradient of
    its output.
    """

    forward: int
    """The peak of a forward pass that saves nothing."""
    recompute: int
    """The peak of a forward pass that saves activations."""
    saved: int
    """The bytes at the end of this pass: saved activations and the output."""
    backward: int
    """The peak of the backward pass, whose results are the gradients of input and weights."""

    @property
    def all(self) -> int:
        """The highest of the peaks."""
        return max(self.forward, self.recompute, self.backward)


def _index_put(*args: Any) -> int:
    """Returns the temporary bytes of `index_put`: sorting takes 4 vectors of 8 bytes per index."""
    indices = [index for index in args[1] if index is not None]
    return 4 * 8 * max(index.numel() for index in indices) if len(args) > 3 and args[3] else 0


def _solve(*args: Any) -> int:
    """Returns the temporary bytes of `solve`: column-major copies of both operands."""
    return sum(tensor.numel() * tensor.element_size() for tensor in args[:2])


INSIDE: dict[str, Callable[..., int]] = {
    "aten.index_put.default": _index_put,
    "aten.index_put_.default": _index_put,
    "aten._index_put_impl_.default": _index_put,
    "aten.linalg_solve_triangular.default": _solve,
}
"""Name of an op -> the bytes that the GPU's kernel allocates and frees, from its arguments."""
INSTEAD: dict[str, Callable[..., Any]] = {}
"""Name of an op -> a function that runs in its place, and whose tensors are counted."""


class Live(TorchDispatchMode):
    """Counts the bytes of tensors until they are freed, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._known: set[weakref.ref[Any]] = set()
        self._ids: set[int] = set()

    def reset_peak(self) -> None:
        self.peak = self.bytes

    def __torch_dispatch__(
        self,
        kernel: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kernel is torch.ops.aten.index_put.default:
            # Autograd copies the first argument only for subclasses, such as fake tensors.
            kernel = torch.ops.aten.index_put_.default
        if str(kernel) in INSTEAD:
            with self:
                return INSTEAD[str(kernel)](*args, **(kwargs or {}))
        made = kernel(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf)
        inside = INSIDE.get(str(kernel))
        self.peak = max(self.peak, self.bytes + (inside(*args) if inside else 0))
        return made

    def add(self, tensor: torch.Tensor, *, given: bool = False) -> None:
        """Counts the storage of `tensor` until it is freed. If `given`, it is never counted."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._ids:
            return
        size, key = 0 if given else -(-storage.nbytes() // BLOCK) * BLOCK, storage._cdata
        self._ids.add(key)
        self.bytes += size

        def freed(reference: weakref.ref[Any]) -> None:
            self._known.discard(reference)
            self._ids.discard(key)
            self.bytes -= size

        self._known.add(weakref.ref(storage, freed))


class _Attention(torch.autograd.Function):
    """Attention that allocates as the kernels of a GPU do, and computes nothing."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        batch, heads, sequence, _ = q.shape
        output = q.new_empty(batch, sequence, heads, v.shape[-1]).transpose(1, 2)
        log_sum_exp = q.new_empty(batch, heads, sequence, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, mask, output, log_sum_exp)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, mask, _, log_sum_exp = ctx.saved_tensors
        return *_gradients(gradient, q, k, v, log_sum_exp, mask), None


def _gradients(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_sum_exp: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gradient = gradient.transpose(1, 2).contiguous()
    dq, dk, dv = (
        torch.empty_like(each.transpose(1, 2), memory_format=torch.contiguous_format)
        for each in (q, k, v)
    )
    held = [log_sum_exp.new_empty(log_sum_exp.shape), dq.new_empty(dq.shape, dtype=torch.float32)]
    if mask is None and q.shape[1] != k.shape[1]:  # flash attention sums each head's dk and dv
        held += [dq.new_empty(dq.shape), dq.new_empty(dq.shape)]
    elif max(q.shape[-1], v.shape[-1]) > 128 and _masked(q, v, mask):
        held += [each.new_empty(each.shape, dtype=torch.float32) for each in (dk, dv)]
    del held
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _flash(
    q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, sequence, _size = q.shape
    output = q.new_empty(batch, sequence, heads, v.shape[-1]).transpose(1, 2)
    return output, q.new_empty(batch, heads, sequence, dtype=torch.float32)


def _flash_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    held = output.transpose(1, 2).contiguous()  # a copy of heads that are not all of them
    found = _gradients(gradient, q, k, v, log_sum_exp)
    del held
    return found


def _varlen(
    q: torch.Tensor, _k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, ...]:
    tokens, heads, _size = q.shape
    assert q.shape[-1] == v.shape[-1]
    output = torch.empty_like(q)  # with the layout of the queries
    seed = q.new_empty(2, dtype=torch.int64)
    return output, q.new_empty(heads, tokens, dtype=torch.float32), seed, seed[:0], seed[:0]


def varlen_inside(
    _: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any, **__: Any
) -> int:
    """Returns the temporary bytes of the backward kernel that receives the lengths of documents.

    They are those of flash attention. The sum of q's gradient and the products of output and
    gradient have 128 more rows for each document.
    """
    tokens, heads, size = q.shape
    documents = others[2].shape[0] - 1
    shared = heads * (size + v.shape[-1]) if heads != k.shape[1] else 0
    rows = tokens + 128 * documents
    return 4 * rows * heads * (-(-size // 32) * 32 + 1) + tokens * shared * q.element_size()


def _varlen_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *others: Any,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    gradient = gradient.contiguous()
    found = tuple(
        torch.empty_like(each, memory_format=torch.contiguous_format) for each in (q, k, v)
    )
    held = q.new_empty(varlen_inside(gradient, q, k, v, *others), dtype=torch.uint8)
    del held
    return found


_OPS = {
    "aten._flash_attention_forward.default": _varlen,
    "aten._flash_attention_backward.default": _varlen_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _flash,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _flash_backward,
}
"""Kernels that layers call by their names -> what runs in their place."""


def _masked(q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Returns whether the kernel is memory-efficient attention instead of flash attention."""
    return mask is not None or q.shape[-1] != v.shape[-1] or q.shape[-1] > 256


def _described(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """Replaces `scaled_dot_product_attention`.

    A Boolean mask is converted to the compute dtype, and heads are padded to a multiple of 8
    elements.
    """
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
            attn_mask.logical_not(), -torch.inf
        )
    size = query.shape[-1]
    padding = -size % 8
    if padding:
        query, key, value = (
            torch.nn.functional.pad(each, (0, padding)) for each in (query, key, value)
        )
    output: torch.Tensor = _Attention.apply(query, key, value, attn_mask)
    return output[..., : value.shape[-1] - padding] if padding else output


@contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _described),
        mock.patch.dict(INSTEAD, _OPS),
    ):
        yield


def layers_of_a_gpu(model: ModelSpec, workload: Workload, **options: Any) -> FunctionalLayers:
    """Returns layers on the CPU whose attention kernel receives lengths where it would on a GPU."""
    with mock.patch.object(
        lengths,
        "takes_lengths",
        lambda model, work, _: document_attention(model, work) == "lengths",
    ):
        return FunctionalLayers(model, workload, config_of(model), torch.device("cpu"), **options)


def counted(model: ModelSpec, layer: LayerSpec, workload: Workload, layers: Any = None) -> Peaks:
    """Returns the peak bytes of a decoder layer.

    Each layer of the model costs time, so it should have as few as possible.
    """
    layers = layers or layers_of_a_gpu(model, workload)
    run = layers._kinds[int(layer.name)].eager
    dtype = TORCH_DTYPE[workload.dtype]
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, attention_of_a_gpu():
        live = Live()
        arguments, buffers = (
            tree_map(
                lambda leaf: fake.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf,
                given,
            )
            for given in (layers._layer_arguments(layer.name, 0), layers.buffers[layer.name])
        )
        weights = {
            tensor.name: torch.empty(tensor.shape, dtype=dtype).requires_grad_()
            for tensor in layer.tensors
        }
        x = torch.empty(
            workload.batch, workload.sequence, model.carried, dtype=dtype
        ).requires_grad_()
        gradient = torch.empty_like(x)
        for leaf in tree_leaves((weights, x, gradient, buffers)):
            live.add(leaf, given=True)
        for leaf in tree_leaves(arguments):
            if isinstance(leaf, torch.Tensor):
                live.add(leaf)
        live.reset_peak()
        with live:
            with torch.no_grad():
                made = run(weights | buffers, x, arguments)
            del made
            forward = live.peak
            live.reset_peak()
            output, logits = run(weights | buffers, x, arguments)
            recompute, saved = live.peak, live.bytes
            live.reset_peak()
            outputs, uppers = [output], list[torch.Tensor | None]([gradient])
            if layers.routing and logits is not None:
                layers.routing.begin(0, None)
                outputs.append(layers.routing.share(0, logits))
                uppers.append(None)
            gradients = torch.autograd.grad(
                outputs, (x, *weights.values()), uppers, allow_unused=True
            )
            backward = live.peak
            del gradients, output, outputs, logits
    return Peaks(forward, recompute, saved, backward)


def counted_head(model: ModelSpec, workload: Workload) -> int:
    """Returns the peak bytes of the head in a forward and backward pass, without its weights, its
    input and the gradient of its input.
    """
    layers = FunctionalLayers(model, workload, config_of(model), torch.device("cpu"))
    dtype, live = TORCH_DTYPE[workload.dtype], Live()
    with FakeTensorMode(allow_non_fake_inputs=True):
        weights = {
            tensor.name: torch.empty(tensor.shape, dtype=dtype)
            for tensor in model.stack[model.head].tensors
        }
        rows = (workload.batch, workload.sequence)
        x, gradient = (torch.empty(*rows, model.carried, dtype=dtype) for _ in range(2))
        labels = torch.empty(rows, dtype=torch.int64)
        for leaf in (*weights.values(), x, gradient, labels):
            live.add(leaf, given=True)
        with live:
            layers.head(weights, x, labels, 1.0, gradient)
    return live.peak


def counted_embedding(model: ModelSpec, workload: Workload) -> int:
    """Returns the peak bytes of the embedding's backward pass, without its result."""
    layers = FunctionalLayers(model, workload, config_of(model), torch.device("cpu"))
    dtype, live = TORCH_DTYPE[workload.dtype], Live()
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = (workload.batch, workload.sequence)
        ids, gradient = (
            torch.empty(rows, dtype=torch.int64),
            torch.empty(*rows, model.carried, dtype=dtype),
        )
        names = (*model.tables, *model.positions)
        targets = [
            torch.empty(tensor.shape, dtype=dtype)
            for tensor in model.stack[EMBEDDING].tensors
            if tensor.name in names
        ]
        for leaf in (ids, gradient, *targets):
            live.add(leaf, given=True)
        with live:
            for target, found in zip(targets, layers.embed_backward(gradient, ids, 0), strict=True):
                # as in `binding._gradient_sink`
                if isinstance(found, TableGradient):
                    found.store(target, dtype, adding=True)
                else:
                    target.copy_(found.to(dtype))
    return live.peak
