"""ScaledPositions: rotary embeddings with frequencies that depend on the length of each document.

transformers computes the frequencies from the largest position in its input, so all documents of a
micro-batch would get the frequencies of the longest document. Here, transformers' module runs once
for each class of document lengths that have the same frequencies. Each token uses the result of its
class.

| rope type | classes of lengths |
|---|---|
| `longrope` | up to the original length, and longer |
| `dynamic` | up to the original length, and one class for each longer length |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SCALED = ("longrope", "dynamic")


class ScaledPositions(nn.Module):
    """Wraps a rotary embedding to make each document's frequencies depend on its own length."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary: Any = rotary

    @classmethod
    def around(cls, rotary: Any) -> nn.Module:
        """Wraps `rotary` in a ScaledPositions if its frequencies depend on a length. Otherwise
        returns `rotary` itself.
        """
        types = getattr(rotary, "rope_type", "default")
        names = types.values() if isinstance(types, dict) else (types,)
        return (
            cls(rotary) if any(scaled in name for name in names for scaled in _SCALED) else rotary
        )

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Any:
        """Returns the tensors of transformers' module, [batch, sequence, size]."""
        kind = {} if layer_type is None else {"layer_type": layer_type}
        lengths = document_lengths(position_ids)
        # A call with a single position resets the scaling of an earlier call.
        self._rotary(x, torch.zeros_like(position_ids[..., :1]), **kind)
        result: Any = None
        for above, most in self._classes(lengths, layer_type):
            here = (lengths > above) if most is None else (lengths > above) & (lengths <= most)
            part = self._rotary(x, position_ids * here, **kind)
            result = part if result is None else _where(here[..., None], part, result)
        return result

    def _classes(
        self, lengths: torch.Tensor, layer_type: str | None
    ) -> list[tuple[int, int | None]]:
        """Returns the classes of lengths with the same frequencies, shortest first. A class has the
        lengths above its first number, up to and including its second number. None means no limit.
        """
        rope, types = self._rotary.config.rope_parameters, self._rotary.rope_type
        if layer_type is not None:
            rope, types = rope[layer_type], types[layer_type]
        if types == "longrope":
            original = int(rope["original_max_position_embeddings"])
            return [(0, original), (original, None)]
        if "dynamic" not in types:
            return [(0, None)]
        original = int(self._rotary.original_max_seq_len)
        # This synchronizes with the device, like every call of transformers' module.
        longer = lengths[lengths > original].unique().tolist()
        return [(0, original), *((length - 1, length) for length in longer)]


def _where(here: torch.Tensor, part: Any, other: Any) -> Any:
    """Returns `part` where `here` is true, and otherwise `other`. They are tensors or tuples."""
    if isinstance(part, torch.Tensor):
        return torch.where(here, part, other)
    return tuple(torch.where(here, mine, theirs) for mine, theirs in zip(part, other, strict=True))


def document_lengths(positions: torch.Tensor) -> torch.Tensor:
    """Returns the length of each token's document, [..., sequence] int64.

    `positions` [..., sequence] int64 is each token's distance from the start of its document.
    """
    size = positions.shape[-1]
    ends = torch.ones_like(positions, dtype=torch.bool)
    ends[..., :-1] = positions[..., 1:] == 0
    index = torch.arange(size, device=positions.device).expand(positions.shape)
    last = torch.where(ends, index, size).flip(-1).cummin(-1).values.flip(-1)
    return positions.gather(-1, last) + 1
