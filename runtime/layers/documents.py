"""Documents: rows that hold several, or padding: where each position counts from, and which labels are trained on."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from megatrain.runtime.batch import IGNORED, Batch


def begins(documents: torch.Tensor) -> torch.Tensor:
    """[batch, sequence] int64, -1 for padding -> bool, where a document begins, the same shape."""
    found = torch.ones_like(documents, dtype=torch.bool)
    found[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return found


def positions(documents: torch.Tensor) -> torch.Tensor:
    """[batch, sequence] int64, -1 for padding -> each position's distance from the start of its document, the same shape.

    A run of padding is a document of its own: it sees itself alone, nothing sees it, and no row of the attention is empty, which would be NaN.
    """
    index = torch.arange(documents.shape[1], device=documents.device)
    return index - torch.where(begins(documents), index, 0).cummax(1).values


def trained_labels(batch: Batch) -> torch.Tensor:
    """The labels [batch, sequence] int64, with padding IGNORED whatever stands there."""
    return batch.labels if batch.documents is None else batch.labels.masked_fill(batch.documents < 0, IGNORED)


def chunks(documents: torch.Tensor, size: int) -> torch.Tensor:
    """Documents [batch, sequence] int64 cut into chunks of `size` tokens, numbered so that neighbouring chunks differ; the same shape."""
    return documents * documents.shape[1] + positions(documents) // size


def masks(config: PretrainedConfig, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> Any:
    """The masks that keep documents apart, for a model that does not show the positions to its own: by attention type where the model has types, else
    one. Chunked attention is that of documents as long as a chunk; linear attention has no mask.
    """

    def made(kind: str) -> Any:
        if kind == "linear_attention":
            return None
        function = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
        counted = position_ids % config.attention_chunk_size if kind == "chunked_attention" else position_ids
        return function(config=config, inputs_embeds=inputs_embeds, attention_mask=None, past_key_values=None, position_ids=counted)

    types = getattr(config, "layer_types", None)
    return {kind: made(kind) for kind in set(types)} if types else made("full_attention")
