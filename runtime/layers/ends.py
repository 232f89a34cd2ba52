"""embedding_and_head: returns the EmbeddingAndHead that fits a model's family."""

from __future__ import annotations

from typing import Any

import torch

from megatrain.runtime.layers.embedding_and_head import EmbeddingAndHead
from megatrain.runtime.layers.gemma3n import Gemma3nEmbeddingAndHead, carries
from megatrain.simulator.model.families import FAMILIES
from megatrain.simulator.model.specs import ModelSpec


def embedding_and_head(
    whole: Any, model: ModelSpec, dtype: torch.dtype, device: torch.device
) -> EmbeddingAndHead:
    """Returns the embedding and the head of `whole`.

    Args:
        whole: a model of `meta_model`.
        model: the spec of the model.
        dtype: the dtype of the hidden states.
        device: the device of the model's buffers.

    Raises UserError if the runtime cannot train a model of this structure.
    """
    family = FAMILIES[model.family]
    if carries(model.family):
        return Gemma3nEmbeddingAndHead(whole, dtype, device)
    return EmbeddingAndHead(
        whole, model.hidden, dtype, device, model.positions, family.norm_name, family.embedding_norm
    )
