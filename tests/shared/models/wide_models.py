"""A model of every family with real widths and as few layers as possible."""

from __future__ import annotations

from tiny_families import config_of
from transformers import AutoConfig

from megatrain.simulator.model.specs import ModelSpec

WIDE = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 5632,
}
WIDENED = (
    "dbrx",
    "deepseek_v2",
    "dots1",
    "gemma4_text",
    "glm4_moe",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "ministral",
    "nemotron",
)
"""Families with the widths of `WIDE`, because their defaults are not those of a published model."""


def wide_model(family: str) -> ModelSpec:
    """Returns a model with one layer of each kind.

    Its widths are transformers' defaults, which are those of a published model, or `WIDE`.
    """
    config = config_of(family, **WIDE) if family in WIDENED else AutoConfig.for_model(family)
    return ModelSpec.from_config(config.to_dict(), "config.json").shortest(1)
