"""Attention within packed documents: a variable-length kernel for all documents of a micro-batch at
once. It is PyTorch's flash attention, or FlashAttention-4 if the workload names it (`flash4.py`).

The kernel reads no mask and computes nothing for pairs of tokens in different documents. So it
takes at most as long as causal flash attention over whole rows.

PyTorch's kernel is called through the aten ops that `torch.nn.attention.varlen.varlen_attn` calls.
There are two reasons. `varlen_attn` cannot run the backward pass of a saved output. And the
parameters of `varlen_attn` differ between PyTorch 2.10, 2.11 and 2.12, while the parameters of the
ops do not.

A layer receives `LengthBounds` as its attention mask. transformers' layers pass it on unchanged.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.backends import cuda as sdp

from megatrain.runtime.layers import flash4
from megatrain.runtime.layers.documents import begins
from megatrain.runtime.layers.sinks import add_sinks, sink_gradient
from megatrain.simulator.model.attention_masks import document_attention
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

Kernel = Literal["flash", "flash4"]
"""The kernels that receive the lengths of documents."""
# Sequence length of the tensors for asking PyTorch whether it has the kernel. The answer does not
# depend on this length.
_SEQUENCE = 128
_ALIGNED = 8  # the kernel requires head sizes that are multiples of this


class LengthBounds(NamedTuple):
    """The bounds of all documents in a micro-batch, whose rows are concatenated."""

    starts: torch.Tensor
    """[documents + 1] int32. Document i has tokens `starts[i]` to `starts[i + 1]`. The number of
    documents is that of `room`. The last documents may be empty."""
    extent: torch.Tensor
    """A tensor without elements, [longest, 0]. `longest` is an upper bound of the number of tokens
    in a document. It is the size of a tensor, because one compiled graph serves all sizes, but not
    all values of an int."""
    window: int
    """Number of tokens that a token attends to, including itself; 0 for no limit."""


class Room(NamedTuple):
    """What a kernel must make room for in a micro-batch."""

    documents: int
    """Number of documents."""
    longest: int
    """Number of tokens in a document."""


class Call(NamedTuple):
    """What a call of a kernel needs besides its tensors."""

    kernel: Kernel
    starts: torch.Tensor
    """Bounds of the documents, [documents + 1] int32."""
    longest: int
    """Upper bound of the number of tokens in a document."""
    left: int
    """Number of earlier tokens that a token attends to; -1 for all."""
    scale: float
    """Factor on the scores."""


def takes_lengths(model: ModelSpec, workload: Workload, device: torch.device) -> bool:
    """Returns whether `device` has the kernel for this model. The kernel requires CUDA with flash
    attention, bf16, and attention scores that a fused kernel can compute.
    """
    if device.type != "cuda" or document_attention(model, workload) != "lengths":
        return False
    heads, pairs, size = model.heads
    width = _aligned(size)
    query, key = (
        torch.empty(
            1, count, _SEQUENCE, width, dtype=torch.bfloat16, device=device, requires_grad=True
        )
        for count in (heads, pairs)
    )
    return bool(
        sdp.can_use_flash_attention(
            sdp.SDPAParams(query, key, key, None, 0.0, True, heads != pairs)
        )
    )


def room(documents: torch.Tensor) -> Room:
    """Returns upper bounds for `documents`, [batch, sequence] int64. The number of documents is
    rounded up to a power of two times the batch size. The length of the longest document is rounded
    up to a power of two, at least 2 and at most `sequence`. It is at least 2, because a compiled
    graph serves all sizes but 1.

    The result depends only on the micro-batch, because the order of the kernel's sums may depend on
    it. It has few different values, so memory is allocated in few sizes. The number is at most
    about twice the number of documents, because the kernel's grid and workspace (128 rows per
    document) grow with it. The grid also grows with `longest`: with documents of 657 tokens in rows
    of 8,192, the backward kernel took 1.3 times as long with the length of the row (H200, 7B).

    Synchronizes with the device if `documents` is on a GPU.
    """
    numbers = documents.cpu().numpy()  # one thread, see `runtime/batch.py`
    rows, sequence = numbers.shape
    first = np.ones(numbers.shape, dtype=bool)
    np.not_equal(numbers[:, 1:], numbers[:, :-1], out=first[:, 1:])
    starts = np.flatnonzero(first)
    longest = int(np.diff(starts, append=numbers.size).max())
    return Room(
        rows << max(-(-len(starts) // rows) - 1, 0).bit_length(),
        min(1 << max(longest - 1, 1).bit_length(), sequence),
    )


def bounds(
    documents: torch.Tensor, room: Room, window: int = 0, *, compiled: bool = False
) -> LengthBounds:
    """Returns the bounds of `documents`. Does not synchronize with the device.

    Args:
        documents: document numbers, [batch, sequence] int64 on any device.
        room: the result of `room` for these documents.
        window: number of tokens that a token attends to, including itself; 0 for no limit.
        compiled: whether the layers are compiled. If so, one graph serves all values of `room`.
    """
    ordinals = begins(documents).flatten().cumsum(0)  # document numbers in the micro-batch, from 1
    starts = torch.searchsorted(
        ordinals, torch.arange(1, room.documents + 2, device=documents.device), out_int32=True
    )
    extent = torch.empty(room.longest, 0, device=documents.device)
    if compiled:
        torch._dynamo.maybe_mark_dynamic(starts, 0)
        torch._dynamo.maybe_mark_dynamic(extent, 0)
    return LengthBounds(starts, extent, window)


def attend_within(
    documents: LengthBounds,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    *,
    kept: Sequence[torch.Tensor] | None = None,
    results: list[torch.Tensor] | None = None,
    groups: int = 1,
    sinks: torch.Tensor | None = None,
    kernel: Kernel = "flash",
) -> torch.Tensor:
    """Computes causal attention within each document.

    Args:
        documents: the bounds of the documents.
        query: queries, [batch, heads, sequence, size].
        key: keys, [batch, key heads, sequence, size].
        value: values, [batch, key heads, sequence, value size].
        scale: factor on the scores.
        kept: output and log-sum-exp of an earlier forward pass, which are used instead of running
            the kernel.
        results: a list, to which the output and the log-sum-exp, [batch, heads, sequence] fp32, are
            appended.
        groups: number of groups of heads, for which the kernel runs one after another.
        sinks: sinks (`sinks.py`), [heads]. With sinks, saved results include them.
        kernel: the kernel.

    Returns the output, [batch, sequence, heads, value size], contiguous.
    """
    batch, heads, length, size = query.shape
    depth = value.shape[-1]
    width = _aligned(max(size, depth))
    left = documents.window - 1 if 0 < documents.window < length else -1
    how = Call(kernel, documents.starts, documents.extent.shape[0], left, scale)
    flat = [_flat(tensor, width) for tensor in (query, key, value)]
    log_sum_exp: torch.Tensor | None = None
    if kept is not None:
        saved = (_flat(kept[0].transpose(1, 2), width), _by_head(kept[1]))
    elif groups > 1 or sinks is not None:
        saved = _computed(how, groups, sinks, *flat)
        log_sum_exp = saved[1]
    if kept is not None or groups > 1 or sinks is not None:
        output = _SavedLengthsAttention.apply(*how, groups, *flat, *saved, sinks)
    else:
        output, log_sum_exp = forward(how, *flat)
    contiguous = output[..., :depth].reshape(batch, length, heads, depth).contiguous()
    if results is not None:
        assert log_sum_exp is not None, "results that were saved are not saved again"
        results += [contiguous, log_sum_exp.view(heads, batch, length).transpose(0, 1).contiguous()]
    return contiguous


@torch.no_grad()
def _computed(
    how: Call,
    groups: int,
    sinks: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns what `forward` returns, with the sinks added. The kernel runs for one group of heads
    after another. Autograd records nothing.
    """
    if groups == 1:
        output, log_sum_exp = forward(how, query, key, value)
    else:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        log_sum_exp = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
        inputs = (tensor.chunk(groups, 1) for tensor in (query, key, value))
        for out, sums, *group in zip(
            output.chunk(groups, 1), log_sum_exp.chunk(groups, 0), *inputs, strict=True
        ):
            made, found = forward(how, *group)
            out.copy_(made)
            sums.copy_(found)
    return (output, log_sum_exp) if sinks is None else add_sinks(output, log_sum_exp, sinks)


def backward_in_groups(
    kernel: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    groups: int,
    *tensors: torch.Tensor,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of queries, keys and values, from a backward kernel that runs for one
    group of heads after another.

    Args:
        kernel: returns these gradients of some heads from the parts of `tensors`.
        groups: number of groups.
        tensors: the gradient of the output, queries, keys, values, the output and the log-sum-exp.
            Their heads are in the dimension 1, and those of the log-sum-exp in `dim`.
        dim: the dimension of the heads in the log-sum-exp.
    """
    if groups == 1:
        return kernel(*tensors)
    *others, log_sum_exp = tensors
    found = [torch.empty_like(tensor) for tensor in others[1:4]]
    heads = (tensor.chunk(groups, 1) for tensor in (*found, *others))
    for *parts, sums in zip(*heads, log_sum_exp.chunk(groups, dim), strict=True):
        # Kernels take the log-sum-exp of several rows without strides.
        for target, part in zip(parts[:3], kernel(*parts[3:], sums.contiguous()), strict=True):
            target.copy_(part)
    return found[0], found[1], found[2]


def forward(
    how: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the forward kernel. Autograd records its backward pass.

    Args:
        how: the kernel, its bounds and its scale.
        query: queries, [tokens, heads, size].
        key: keys, [tokens, key heads, size].
        value: values, [tokens, key heads, size].

    Returns the output, [tokens, heads, size], and the log-sum-exp, [heads, tokens] fp32.
    """
    if how.kernel == "flash4":
        return flash4.forward(query, key, value, how.starts, how.longest, how.left, how.scale)
    outputs = torch.ops.aten._flash_attention_forward.default(
        query,
        key,
        value,
        how.starts,
        how.starts,
        how.longest,
        how.longest,
        0.0,
        True,
        False,
        scale=how.scale,
        **flash4.window_of(how.left),
    )
    return outputs[0], outputs[1]


def backward(
    how: Call,
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    log_sum_exp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of query, key and value. The arguments have the same shapes as in
    `forward`, and `gradient` is the gradient of the output.

    PyTorch's kernel requires a random state as an argument, but does not read it without dropout.
    """
    tensors = (gradient, query, key, value, output, log_sum_exp)
    if how.kernel == "flash4":
        return flash4.backward(*tensors, how.starts, how.longest, how.left, how.scale)
    seed, unused = (
        torch.zeros(2, dtype=torch.uint64, device=query.device),
        torch.empty(0, device=query.device),
    )
    outputs = torch.ops.aten._flash_attention_backward.default(
        *tensors,
        how.starts,
        how.starts,
        how.longest,
        how.longest,
        0.0,
        True,
        seed,
        unused,
        scale=how.scale,
        **flash4.window_of(how.left),
    )
    return outputs[0], outputs[1], outputs[2]


class _SavedLengthsAttention(torch.autograd.Function):
    """An autograd function that returns a saved attention output. Its backward runs the backward
    kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        starts: torch.Tensor,
        longest: int,
        left: int,
        scale: float,
        groups: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        log_sum_exp: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(starts, sinks, query, key, value, output, log_sum_exp)
        ctx.kernel, ctx.longest, ctx.left, ctx.scale = kernel, longest, left, scale
        ctx.groups = groups
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        starts, sinks, *saved = ctx.saved_tensors
        of_sinks = None
        if sinks is not None:
            output, log_sum_exp = saved[-2:]
            of_sinks = sink_gradient(gradient, output, log_sum_exp, sinks, ctx.groups)
        how = Call(ctx.kernel, starts, ctx.longest, ctx.left, ctx.scale)
        kernel = functools.partial(backward, how)
        gradients = backward_in_groups(kernel, ctx.groups, gradient, *saved, dim=0)
        return None, None, None, None, None, None, *gradients, None, None, of_sinks


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _flat(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Reshapes [batch, heads, sequence, size] to [batch x sequence, heads, width]. Heads are padded
    with zeros, which do not change scores or outputs.
    """
    rows = tensor.transpose(1, 2).flatten(0, 1)
    return (
        rows
        if rows.shape[-1] == width
        else torch.nn.functional.pad(rows, (0, width - rows.shape[-1]))
    )


def _by_head(log_sum_exp: torch.Tensor) -> torch.Tensor:
    """Reshapes [batch, heads, sequence] to [heads, batch x sequence]."""
    return log_sum_exp.transpose(0, 1).flatten(1)
