"""ScaledPositions: rotary embeddings with frequencies that depend on the length of each document.

transformers computes the frequencies from the largest position in its input. So all documents of a
micro-batch would get the frequencies of the longest one. Here, transformers' module runs once for
each class of document lengths with the same frequencies, and each token uses the result of its
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
    """Wraps a rotary embedding, so that each document's frequencies depend on its own length."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary: Any = rotary

    @classmethod
    def around(cls, rotary: Any) -> nn.Module:
        """Returns `rotary` in a ScaledPositions if its frequencies depend on a length.

        Otherwise returns `rotary` itself.
        """
        types = getattr(rotary, "rope_type", "default")
        found = types.values() if isinstance(types, dict) else (types,)
        return (
            cls(rotary) if any(scaled in each for each in found for scaled in _SCALED) else rotary
        )

    def forward(
        self, x: torch.Tensor, position_ids: torch.Tensor, layer_type: str | None = None
    ) -> Any:
        """Returns what the model's own module returns: tensors of [batch, sequence, size]."""
        kind = {} if layer_type is None else {"layer_type": layer_type}
        found = document_lengths(position_ids)
        # A call with one token resets the scaling of an earlier call.
        self._rotary(x, torch.zeros_like(position_ids[..., :1]), **kind)
        made: Any = None
        for above, most in self._classes(found, layer_type):
            here = (found > above) if most is None else (found > above) & (found <= most)
            part = self._rotary(x, position_ids * here, **kind)
            made = part if made is None else _chosen(here[..., None], part, made)
        return made

    def _classes(self, found: torch.Tensor, layer_type: str | None) -> list[tuple[int, int | None]]:
        """Returns the classes of lengths with the same frequencies, shortest first.

        The lengths of a class are above the first number and up to the second one. None stands for
        no limit.
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
        # This synchronizes with the device, as does every call of transformers' module.
        longer = found[found > original].unique().tolist()
        return [(0, original), *((length - 1, length) for length in longer)]


def _chosen(here: torch.Tensor, part: Any, other: Any) -> Any:
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
