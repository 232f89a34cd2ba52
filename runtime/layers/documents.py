"""Positions and masks of rows that contain several documents, or padding.

`documents` is a tensor [batch, sequence] int64. It has the number of each token's document, and -1
for padding.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask


def begins(documents: torch.Tensor) -> torch.Tensor:
    """Returns where a document begins, [batch, sequence] bool."""
    found = torch.ones_like(documents, dtype=torch.bool)
    found[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return found


def positions(documents: torch.Tensor) -> torch.Tensor:
    """Returns each token's distance from the start of its document, [batch, sequence] int64.

    Consecutive padding counts as one document. It attends only to itself, and no other document
    attends to it. A token that attends to nothing would give NaN.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    return index - torch.where(begins(documents), index, 0).cummax(1).values


def chunks(documents: torch.Tensor, size: int) -> torch.Tensor:
    """Splits documents into chunks of `size` tokens.

    Returns the number of each token's chunk, [batch, sequence] int64. Neighbouring chunks have
    different numbers.
    """
    return documents * documents.shape[1] + positions(documents) // size


def masks(config: PretrainedConfig, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> Any:
    """Returns masks that separate documents, for a model that does not make such masks itself.

    Returns one mask for each attention type if the model has types, otherwise one mask. In chunked
    attention, each chunk counts as a document. Linear attention has no mask.
    """

    def made(kind: str) -> Any:
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
    return {kind: made(kind) for kind in set(types)} if types else made("full_attention")
