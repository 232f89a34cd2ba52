"""Attention inside documents by their lengths: PyTorch's variable-length flash attention, over all documents of a micro-batch at once.

No mask is read, and no pair of tokens of two documents is computed: a packed row takes at most what causal flash attention over the whole row takes.
The aten ops are those that PyTorch's public `torch.nn.attention.varlen.varlen_attn` calls. They are called directly, because that function has no
backward from an output that was kept, and took other arguments in 2.10, 2.11 and 2.12; the ops' have been the same.

A layer gets `Bounds` as its attention mask, which transformers' layers hand on untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.backends import cuda as sdp

from megatrain.runtime.layers.documents import begins
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

_SEQUENCE = 128  # of the tensors on which PyTorch is asked whether it has the kernel: that does not hang on the length
_ALIGNED = 8  # elements of a head that the kernel takes


class Bounds(NamedTuple):
    """Where the documents of a micro-batch begin and end, its rows laid end to end."""

    starts: torch.Tensor
    """[documents + 1] int32: document i is tokens `starts[i]` to `starts[i + 1]`. As many documents as there is `room` for: the last ones are empty"""
    longest: int
    """no document has more tokens"""


def takes_lengths(model: ModelSpec, workload: Workload, device: torch.device) -> bool:
    """Whether `device` has the kernel for this model: CUDA with flash attention, bf16, scores that a fused kernel computes."""
    if device.type != "cuda" or model.documents_by(workload.dtype) != "lengths":
        return False
    heads, pairs, size = model.heads
    width = _aligned(size)
    query, key = (torch.empty(1, count, _SEQUENCE, width, dtype=torch.bfloat16, device=device, requires_grad=True) for count in (heads, pairs))
    return bool(sdp.can_use_flash_attention(sdp.SDPAParams(query, key, key, None, 0.0, True, heads != pairs)))


def room(documents: torch.Tensor) -> int:
    """For how many documents there has to be room, of [batch, sequence] int64: their number rounded up to batch, 2 batch, 4 batch, ...

    A function of the micro-batch alone, as the kernel's sums may hang on it; of few values, so that memory is allocated in few sizes; and never more
    than twice what is needed, since the kernel's grid and its scratch (128 rows a document) grow with it. Waits, where `documents` are on a GPU.
    """
    count, rows = int(begins(documents).sum()), documents.shape[0]
    return rows << max(-(-count // rows) - 1, 0).bit_length()


def bounds(documents: torch.Tensor, places: int, *, compiled: bool = False) -> Bounds:
    """Of [batch, sequence] int64 on any device, without waiting for it; `places`: what `room` says. `compiled`: one graph for any number of documents."""
    ordinals = begins(documents).flatten().cumsum(0)  # from 1
    starts = torch.searchsorted(ordinals, torch.arange(1, places + 2, device=documents.device), out_int32=True)
    if compiled:
        torch._dynamo.maybe_mark_dynamic(starts, 0)
    return Bounds(starts, documents.shape[1])


def attend_within(
    documents: Bounds, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int, *,
    kept: Sequence[torch.Tensor] | None = None, taken: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Query [batch, heads, sequence, size], key and value likewise with their own heads -> [batch, sequence, heads, value size], contiguous.

    `window`: tokens that one sees, itself included; 0: all before it. `kept` and `taken`: output, and log-sum-exp [batch, heads, sequence] fp32.
    """
    batch, heads, length, size = query.shape
    depth = value.shape[-1]
    width = _aligned(max(size, depth))
    left = window - 1 if 0 < window < length else -1
    flat = [_flat(tensor, width) for tensor in (query, key, value)]
    if kept is not None:
        output = _Kept.apply(documents.starts, documents.longest, left, scale, *flat, _flat(kept[0].transpose(1, 2), width), _by_head(kept[1]))
    else:
        output, log_sum_exp = forward(documents.starts, documents.longest, left, scale, *flat)
    made = output[..., :depth].reshape(batch, length, heads, depth).contiguous()
    if taken is not None:
        taken += [made, log_sum_exp.view(heads, batch, length).transpose(0, 1).contiguous()]
    return made


def forward(
    starts: torch.Tensor, longest: int, left: int, scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """[tokens, heads, size] each -> output likewise, and log-sum-exp [heads, tokens] fp32, with autograd's own backward. `left`: tokens seen before
    oneself, -1 for all.
    """
    made = torch.ops.aten._flash_attention_forward.default(
        query, key, value, starts, starts, longest, longest, 0.0, True, False, scale=scale, **_window(left)
    )  # fmt: skip
    return made[0], made[1]


def backward(
    starts: torch.Tensor, longest: int, left: int, scale: float, gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    output: torch.Tensor, log_sum_exp: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of query, key and value. The random state is passed for form: without dropout nothing reads it."""
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    made = torch.ops.aten._flash_attention_backward.default(
        gradient, query, key, value, output, log_sum_exp, starts, starts, longest, longest, 0.0, True, seed, unused, scale=scale, **_window(left)
    )  # fmt: skip
    return made[0], made[1], made[2]


class _Kept(torch.autograd.Function):
    """Attention whose output is there already; backward is the kernel's."""

    @staticmethod
    def forward(
        ctx: Any, starts: torch.Tensor, longest: int, left: int, scale: float, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        output: torch.Tensor, log_sum_exp: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(starts, query, key, value, output, log_sum_exp)
        ctx.longest, ctx.left, ctx.scale = longest, left, scale
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        starts, *saved = ctx.saved_tensors
        return (None, None, None, None, *backward(starts, ctx.longest, ctx.left, ctx.scale, gradient, *saved), None, None)


def _window(left: int) -> dict[str, int]:
    return {} if left < 0 else {"window_size_left": left, "window_size_right": 0}


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _flat(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """[batch, heads, sequence, size] -> [batch x sequence, heads, width], with zeros where a head is narrower: they change no score and no sum."""
    rows = tensor.transpose(1, 2).flatten(0, 1)
    return rows if rows.shape[-1] == width else torch.nn.functional.pad(rows, (0, width - rows.shape[-1]))


def _by_head(log_sum_exp: torch.Tensor) -> torch.Tensor:
    """[batch, heads, sequence] -> [heads, batch x sequence]."""
    return log_sum_exp.transpose(0, 1).flatten(1)
