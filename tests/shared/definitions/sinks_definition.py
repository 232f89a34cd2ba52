"""The definition of attention with sinks: all scores written out."""

from __future__ import annotations

import torch


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    seen: torch.Tensor,
) -> torch.Tensor:
    """Returns attention with a column of sinks in the softmax, [batch, sequence, heads, size]."""
    shared = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(shared, 1) for tensor in (key, value))
    scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(
        ~seen, -torch.inf
    )
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return (shares @ value).transpose(1, 2)
