"""Variable-length attention written out: stands in for `runtime/layers/lengths.py`'s kernel where there is no GPU, so that all around it is tried."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.runtime.layers import lengths

Tensor = torch.Tensor


def forward(starts: Tensor, longest: int, left: int, scale: float, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As `lengths.forward`, whose shapes are checked here."""
    tokens, heads, size = query.shape
    assert starts.dtype == torch.int32
    assert key.shape == value.shape
    assert (key.shape[0], key.shape[2], heads % key.shape[1], size % 8) == (tokens, size, 0, 0)
    index = torch.arange(tokens, device=query.device)
    document = torch.searchsorted(starts.long(), index, right=True)
    behind = index[:, None] - index[None, :]
    seen = (document[:, None] == document[None, :]) & (behind >= 0) & (behind < longest)
    if left >= 0:
        seen = seen & (behind <= left)
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key.double()) * scale
    scores = scores.masked_fill(~seen, -torch.inf)
    log_sum_exp = scores.logsumexp(-1)
    output = torch.einsum("hqk,khd->qhd", (scores - log_sum_exp[..., None]).exp(), value.double())
    return output.to(query.dtype), log_sum_exp.float()


def backward(
    starts: Tensor, longest: int, left: int, scale: float, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, log_sum_exp: Tensor
) -> tuple[Tensor, ...]:
    """As `lengths.backward`."""
    assert output.shape == query.shape
    assert log_sum_exp.shape == (query.shape[1], query.shape[0])
    inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        made, _ = forward(starts, longest, left, scale, *inputs)
    return torch.autograd.grad(made, inputs, gradient)


def install(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For models of which a fused kernel computes the scores, on any device and in any dtype; returns the sizes of `starts`, call by call."""
    called: list[int] = []

    def counted(starts: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            called.append(len(starts))
        return forward(starts, *others)

    monkeypatch.setattr(lengths, "takes_lengths", lambda model, *_: model.documents_by("bf16") == "lengths")
    monkeypatch.setattr(lengths, "forward", counted)
    monkeypatch.setattr(lengths, "backward", backward)
    return called
