"""Tiny multimodal models. Only their language model is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny_families import DELTA, EXPERTS
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    Gemma3nVisionConfig,
    PreTrainedModel,
)

_TEXT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_QWEN_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        "vision_config": {**_VISION, "num_hidden_layers": 4},  # as many as the language model has
        "mm_tokens_per_image": 4,
        "image_token_index": 400,
        "boi_token_index": 401,
        "eoi_token_index": 402,
    },
    "gemma4": {
        "text_config": {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 16,
        },
    },
    "gemma3n": {
        "text_config": {
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 300,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
            "laurel_rank": 8,
        },
        "vision_config": {"hidden_size": 32, "vocab_offset": 320, "vocab_size": 10},
        "audio_config": {
            "hidden_size": 32,
            "vocab_offset": 330,
            "vocab_size": 10,
            "input_feat_size": 16,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "sscp_conv_channel_size": [4, 4],
        },
        "image_token_id": 321,
        "audio_token_id": 331,
    },
    "llama4": {
        "text_config": {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
        "vision_config": {
            **_VISION,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    },
    "qwen3_5": {
        "text_config": {**DELTA, "full_attention_interval": 2},
        "vision_config": _QWEN_VISION,
    },
    "qwen3_5_moe": {
        "text_config": {
            **DELTA,
            **EXPERTS,
            "full_attention_interval": 2,
            "shared_expert_intermediate_size": 160,
        },
        "vision_config": _QWEN_VISION,
    },
}


class _Tower(PreTrainedModel):
    """A vision tower of one matrix for Gemma 3n, whose real tower needs another package."""

    config_class = Gemma3nVisionConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()


AutoModel.register(Gemma3nVisionConfig, _Tower, exist_ok=True)


def config_of(kind: str) -> Any:
    own = _CONFIGS[kind]
    return AutoConfig.for_model(kind, **{**own, "text_config": {**_TEXT, **own["text_config"]}})


def save(kind: str, folder: Path) -> Any:
    """Saves a model with random weights, including norms, into `folder`, and returns it."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(kind))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape) * 0.1 + (0.5 if parameter.ndim == 1 else 0)
            )
    model.save_pretrained(folder)
    return model
