"""Variable-length attention in plain PyTorch, for tests without a GPU.

It replaces the kernels that `runtime/layers/lengths.py` calls.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from megatrain.runtime.layers import lengths
from megatrain.runtime.layers.lengths import Call, Kernel
from megatrain.simulator.model.attention_masks import document_attention
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

Tensor = torch.Tensor


def _scores(
    starts: Tensor, longest: int, left: int, scale: float, query: Tensor, key: Tensor
) -> Tensor:
    """Returns fp64 scores [heads, tokens, tokens], -inf for tokens that are not attended to."""
    index = torch.arange(query.shape[0], device=query.device)
    document = torch.searchsorted(starts.long(), index, right=True)
    behind = index[:, None] - index[None, :]
    seen = (document[:, None] == document[None, :]) & (behind >= 0) & (behind < longest)
    if left >= 0:
        seen = seen & (behind <= left)
    scores = torch.einsum("qhd,khd->hqk", query.double(), _each_head(key, query)) * scale
    return scores.masked_fill(~seen, -torch.inf)


def _each_head(pairs: Tensor, query: Tensor) -> Tensor:
    return pairs.double().repeat_interleave(query.shape[1] // pairs.shape[1], 1)


def forward(how: Call, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `lengths.forward` and checks the shapes of its arguments."""
    output, log_sum_exp = _Attention.apply(*how, query, key, value)
    return output, log_sum_exp


class _Attention(torch.autograd.Function):
    """An attention whose backward uses what the forward saved, as the aten ops do."""

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        starts: Tensor,
        longest: int,
        left: int,
        scale: float,
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        output, log_sum_exp = _computed(starts, longest, left, scale, query, key, value)
        ctx.mark_non_differentiable(log_sum_exp)
        ctx.save_for_backward(starts, query, key, value, output, log_sum_exp)
        ctx.kernel, ctx.longest, ctx.left, ctx.scale = kernel, longest, left, scale
        return output, log_sum_exp

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        starts, *saved = ctx.saved_tensors
        how = Call(ctx.kernel, starts, ctx.longest, ctx.left, ctx.scale)
        return None, None, None, None, None, *backward(how, gradient, *saved)


def _computed(
    starts: Tensor, longest: int, left: int, scale: float, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    tokens, heads, size = query.shape
    assert starts.dtype == torch.int32
    assert key.shape == value.shape
    assert (key.shape[0], key.shape[2], heads % key.shape[1], size % 8) == (tokens, size, 0, 0)
    scores = _scores(starts, longest, left, scale, query, key)
    log_sum_exp = scores.logsumexp(-1)
    output = torch.einsum(
        "hqk,khd->qhd", (scores - log_sum_exp[..., None]).exp(), _each_head(value, query)
    )
    return output.to(query.dtype), log_sum_exp.float()


def backward(
    how: Call,
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
) -> tuple[Tensor, ...]:
    """Computes `lengths.backward` from what a forward saved (arXiv 2307.08691, section 2.3)."""
    assert output.shape == query.shape
    assert log_sum_exp.shape == (query.shape[1], query.shape[0])
    _, starts, longest, left, scale = how
    above = gradient.double()
    shares = (
        _scores(starts, longest, left, scale, query, key) - log_sum_exp[..., None].double()
    ).exp()
    of_shares = torch.einsum("qhd,khd->hqk", above, _each_head(value, query))
    of_scores = shares * (of_shares - (above * output.double()).sum(-1).T[..., None]) * scale
    of_query = torch.einsum("hqk,khd->qhd", of_scores, _each_head(key, query))
    wide = (
        torch.einsum("hqk,qhd->khd", of_scores, query.double()),
        torch.einsum("hqk,qhd->khd", shares, above),
    )
    return of_query.to(query.dtype), *(
        each.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype) for each in wide
    )


def install(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Installs this attention for models that have a fused kernel, on any device and in any dtype.

    Returns a list to which each call appends the size of `starts`.
    """
    called: list[int] = []

    def counted(how: Call, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            called.append(len(how.starts))
        return forward(how, *tensors)

    def takes_lengths(model: ModelSpec, work: Workload, _device: torch.device) -> bool:
        return document_attention(model, msgspec.structs.replace(work, dtype="bf16")) == "lengths"

    monkeypatch.setattr(lengths, "takes_lengths", takes_lengths)
    monkeypatch.setattr(lengths, "forward", counted)
    monkeypatch.setattr(lengths, "backward", backward)
    return called
