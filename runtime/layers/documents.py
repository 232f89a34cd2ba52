"""Positions and masks for rows with several documents or with padding.

`documents` is a tensor, [batch, sequence] int64, with the document number of each token, and -1 for
padding.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask


def begins(documents: torch.Tensor) -> torch.Tensor:
    """Returns whether each token is the first of a document, [batch, sequence] bool."""
    result = torch.ones_like(documents, dtype=torch.bool)
    result[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return result


def positions(documents: torch.Tensor) -> torch.Tensor:
    """Returns each token's distance from the start of its document, [batch, sequence] int64.

    Consecutive padding counts as a document, which attends only to itself. If padding attended to
    nothing, its attention output would be NaN.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    return index - torch.where(begins(documents), index, 0).cummax(1).values


def chunks(documents: torch.Tensor, size: int) -> torch.Tensor:
    """Splits documents into chunks of `size` tokens. Returns the chunk number of each token,
    [batch, sequence] int64. Adjacent chunks have different numbers.
    """
    return documents * documents.shape[1] + positions(documents) // size


def masks(config: PretrainedConfig, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> Any:
    """Returns masks that separate documents, for a model that does not make such masks itself: a
    mask for each attention type, by type, or one mask if the config has no types.

    In chunked attention, each chunk counts as a document. Linear attention has no mask.
    `inputs_embeds` is [batch, sequence, hidden], and `position_ids` [batch, sequence] int64 is each
    token's distance from the start of its document.
    """

    def mask_of(kind: str) -> Any:
        if kind == "linear_attention":
            return None
        function = (
            create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
        )
        counted = (
            position_ids % config.attention_chunk_size
            if kind == "chunked_attention"
            else position_ids
        )
        return function(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=None,
            past_key_values=None,
            position_ids=counted,
        )

    types = getattr(config, "layer_types", None)
    return {kind: mask_of(kind) for kind in set(types)} if types else mask_of("full_attention")
