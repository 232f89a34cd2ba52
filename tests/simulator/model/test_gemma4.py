"""Tests of Gemma 4: two forms of its config.json, models with fewer layers, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_families import config_of
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families import with_nulls
from megatrain.simulator.model.specs import ModelSpec

TINY = {
    key: value
    for key, value in config_of("gemma4_text").to_dict().items()
    if key != "per_layer_config"
}
SIZES = {"global_head_dim": 32, "num_global_key_value_heads": 2}


def test_both_forms_of_the_config_give_one_model() -> None:
    """The published config.json and that of transformers describe the same model.

    The published one gives the sizes of layers with full attention once, and transformers writes
    them layer by layer.
    """
    written, published = (
        ModelSpec.from_config(config, "config.json", "gemma4")
        for config in (config_of("gemma4_text").to_dict(), {**TINY, **SIZES})
    )
    assert written.stack == published.stack
    assert written.config == published.config
    assert "per_layer_config" not in written.config


def test_full_layers_may_have_the_sizes_of_the_others() -> None:
    """transformers then writes no sizes of their own."""
    written = config_of(
        "gemma4_text",
        global_head_dim=TINY["head_dim"],
        num_global_key_value_heads=TINY["num_key_value_heads"],
    ).to_dict()
    assert written["per_layer_config"] == {}
    spec = ModelSpec.from_config(written, "config.json")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**with_nulls(spec.config)))
    assert spec.parameters == sum(parameter.numel() for parameter in whole.parameters())


def test_sizes_of_the_published_form_are_ignored_beside_per_layer_sizes() -> None:
    """transformers ignores them too, even if no layer has sizes of its own."""
    config = {**TINY, **SIZES, "num_global_key_value_heads": 1, "per_layer_config": {}}
    spec = ModelSpec.from_config(config, "config.json")
    assert spec.config["global_head_dim"] == TINY["head_dim"]
    assert spec.config["num_global_key_value_heads"] == TINY["num_key_value_heads"]


def test_the_size_of_full_heads_has_the_default_of_transformers() -> None:
    config = {key: value for key, value in TINY.items() if key != "head_dim"}
    spec = ModelSpec.from_config(config, "config.json")
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert spec.parameters == sum(parameter.numel() for parameter in whole.parameters())


@pytest.mark.parametrize("layers", range(1, 9))
def test_a_model_with_fewer_layers_is_that_of_transformers(layers: int) -> None:
    """A model with fewer layers is transformers' model, whose last layer is always full."""
    spec = ModelSpec.from_config(
        config_of("gemma4_text", num_hidden_layers=8).to_dict(), "config.json"
    ).with_layers(layers)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**with_nulls(spec.config)))
    assert spec.parameters == sum(parameter.numel() for parameter in whole.parameters())
    assert spec.decoders[-1].attention == "full_attention"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size_per_layer_input": 16},
            (
                r"hidden_size_per_layer_input: found 16; allowed: 0, since layers that also read"
                r" rows of a second embedding table"
            ),
        ),
        (
            {"hidden_size_per_layer_input": None},
            r"hidden_size_per_layer_input: found 256; allowed: 0, since ",
        ),
        (
            {"num_kv_shared_layers": 2},
            (
                r"num_kv_shared_layers: found 2; allowed: 0, since layers that attend to keys and"
                r" values of an earlier layer"
            ),
        ),
        (
            {"num_global_key_value_heads": 3},
            r"num_global_key_value_heads: found 3; allowed: a divisor of the 8 attention heads",
        ),
        (
            {
                "enable_moe_block": True,
                "num_experts": 2,
                "top_k_experts": 3,
                "moe_intermediate_size": 8,
            },
            r"top_k_experts: found 3; allowed: at most the 2",
        ),
        (
            {"per_layer_config": {"0": {"head_dim": 32}}},
            (
                r"per_layer_config: found .*; allowed: the same head_dim for every full_attention"
                r" layer"
            ),
        ),
        (
            {"per_layer_config": {"5": {"sliding_window": 4}}},
            (
                r"per_layer_config: found .*; allowed: the same head_dim for every full_attention"
                r" layer"
            ),
        ),
    ],
)
def test_a_config_that_is_no_stack_of_layers_is_refused_by_its_key(
    changes: dict[str, Any], message: str
) -> None:
    """A config that is not a plain stack of layers is refused, and the error names the key."""
    with pytest.raises(UserError, match=f"config.json: {message}") as error:
        ModelSpec.from_config(
            {
                key: value
                for key, value in {**TINY, **SIZES, **changes}.items()
                if value is not None
            },
            "config.json",
        )
    assert "\n" not in str(error.value)
