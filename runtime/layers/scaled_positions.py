"""ScaledPositions: rotary embeddings whose frequencies depend on a document's length, computed for each document by its own.

transformers takes the length from the largest position that it is given, so that all documents of a micro-batch would get the frequencies of the
longest one. Here its own module runs once for the documents of each class of lengths that share their frequencies, and each token takes the result
of its class.

| rope type | classes of lengths |
|---|---|
| `longrope` | up to the original length, and longer |
| `dynamic` | up to the original length, and each longer length by itself |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_SCALED = ("longrope", "dynamic")


class ScaledPositions(nn.Module):
    """A model's rotary embedding, with each document's frequencies by its own length."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary: Any = rotary

    @classmethod
    def around(cls, rotary: Any) -> nn.Module:
        """`rotary` itself where its frequencies do not depend on a length."""
        types = getattr(rotary, "rope_type", "default")
        found = types.values() if isinstance(types, dict) else (types,)
        return cls(rotary) if any(scaled in each for each in found for scaled in _SCALED) else rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None) -> Any:
        """What the model's own module returns: a tensor, or several, of [batch, sequence, size]."""
        kind = {} if layer_type is None else {"layer_type": layer_type}
        found = document_lengths(position_ids)
        self._rotary(x, torch.zeros_like(position_ids[..., :1]), **kind)  # one token: undoes the scaling of an earlier call
        made: Any = None
        for above, most in self._classes(found, layer_type):
            here = (found > above) if most is None else (found > above) & (found <= most)
            part = self._rotary(x, position_ids * here, **kind)
            made = part if made is None else _chosen(here[..., None], part, made)
        return made

    def _classes(self, found: torch.Tensor, layer_type: str | None) -> list[tuple[int, int | None]]:
        """Lengths that share their frequencies, shortest first: above the first number, up to the second one."""
        rope, types = self._rotary.config.rope_parameters, self._rotary.rope_type
        if layer_type is not None:
            rope, types = rope[layer_type], types[layer_type]
        if types == "longrope":
            original = int(rope["original_max_position_embeddings"])
            return [(0, original), (original, None)]
        if "dynamic" not in types:
            return [(0, None)]
        original = int(self._rotary.original_max_seq_len)
        longer = found[found > original].unique().tolist()  # waits for the device, as transformers' module does at every call
        return [(0, original), *((length - 1, length) for length in longer)]


def _chosen(here: torch.Tensor, part: Any, other: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return torch.where(here, part, other)
    return tuple(torch.where(here, mine, theirs) for mine, theirs in zip(part, other, strict=True))


def document_lengths(positions: torch.Tensor) -> torch.Tensor:
    """[..., sequence] int64, each token's distance from the start of its document -> the length of its document, the same shape."""
    size = positions.shape[-1]
    ends = torch.ones_like(positions, dtype=torch.bool)
    ends[..., :-1] = positions[..., 1:] == 0
    index = torch.arange(size, device=positions.device).expand(positions.shape)
    last = torch.where(ends, index, size).flip(-1).cummin(-1).values.flip(-1)
    return positions.gather(-1, last) + 1
