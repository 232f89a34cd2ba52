"""Tests of what a family refuses in its config.json: what is not predicted, or cannot be right."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_families import OWN, SMALL

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.specs import ModelSpec

DBRX_ATTENTION = {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0}
DBRX_EXPERTS = {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2}

REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("apertus", {"hidden_act": "silu"}, "hidden_act", "xielu"),
    ("bloom", {"n_head": 6}, "n_head", "a divisor of hidden_size = 128"),
    ("bloom", {"pretraining_tp": 2, "slow_but_exact": True}, "slow_but_exact", "false"),
    ("codegen", {"num_attention_heads": 2, "n_head": 2}, "n_head", "a multiple of 4"),
    ("cohere2_moe", {"rms_norm_eps": 1e-6}, "rms_norm_eps", "null"),
    ("deepseek_v2", {"kv_lora_rank": 33}, "kv_lora_rank", "an even number"),
    ("deepseek_v2", {"qk_nope_head_dim": 17}, "qk_nope_head_dim", "an even number"),
    ("falcon", {"alibi": True}, "alibi", "false"),
    ("falcon", {"output_attentions": True}, "output_attentions", "false"),
    (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 3},
        "num_kv_heads",
        "a divisor of the 8 attention heads",
    ),
    ("falcon_h1", {"mamba_d_ssm": 102}, "mamba_n_heads", "a divisor of the 102 channels"),
    ("falcon_h1", {"mamba_n_groups": 3}, "mamba_n_groups", "a divisor of the"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention", "false"),
    ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn", "false"),
    ("gpt_bigcode", {"multi_query": False}, "multi_query", "true, without cross-attention"),
    ("gpt_bigcode", {"add_cross_attention": True}, "multi_query", "true, without cross-attention"),
    ("jetmoe", {"output_router_logits": True}, "output_router_logits", "false"),
    ("jetmoe", {"num_experts_per_tok": 3}, "num_experts_per_tok", "at most 2"),
    ("jetmoe", {"num_key_value_heads": "4"}, "num_key_value_heads", "a whole number"),
    ("laguna", {"gating": "per-row"}, "gating", "true, per-head or per-element"),
    ("mimo_v2_flash", {"num_key_value_heads": 8}, "num_key_value_heads", "a divisor of half"),
    ("minimax", {"sliding_window": 16}, "sliding_window", "none"),
    ("mpt", {"attn_config": "none"}, "attn_config", "an object"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "attn_config", "qk_ln = False"),
    ("mpt", {"attn_config": {"prefix_lm": True}}, "attn_config", "prefix_lm = False"),
    ("mpt", {"attn_config": {"alibi": False}}, "attn_config", "alibi = True"),
    ("mpt", {"attn_config": {"attn_pdrop": 0.1}}, "attn_config", "attn_pdrop = 0"),
    ("opt", {"word_embed_proj_dim": 64}, "word_embed_proj_dim", "hidden_size = 128"),
    ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before", "true"),
    ("opt", {"enable_bias": False}, "enable_bias", "true"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm", "false"),
    (
        "phimoe",
        {"num_local_experts": 1, "num_experts_per_tok": 1},
        "num_local_experts",
        "at least the 2 experts",
    ),
    (
        "phimoe",
        {"rope_scaling": {"type": "yarn"}},
        "rope_parameters",
        "a rope_type of default or longrope",
    ),
    (
        "qwen3_next",
        {"linear_num_value_heads": 3, "linear_num_key_heads": 2},
        "linear_num_value_heads",
        "a multiple of linear_num_key_heads = 2",
    ),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok", "at most the 8 experts"),
    ("dbrx", {"attn_config": 7}, "attn_config", "an object"),
    ("dbrx", {"attn_config": {**DBRX_ATTENTION, "attn_pdrop": 0.1}}, "attn_pdrop", "0"),
    (
        "dbrx",
        {"attn_config": {**DBRX_ATTENTION, "rope_theta": 5e5}},
        "rope_theta",
        "the rope_theta outside of attn_config, 10000.0",
    ),
    ("dbrx", {"attn_config": {**DBRX_ATTENTION, "clip_qkv": None}}, "clip_qkv", "a number above 0"),
    ("dbrx", {"attn_config": {**DBRX_ATTENTION, "clip_qkv": 0}}, "clip_qkv", "a number above 0"),
    (
        "dbrx",
        {"attn_config": {**DBRX_ATTENTION, "kv_n_heads": 3}},
        "kv_n_heads",
        "a divisor of the 8 attention heads",
    ),
    ("dbrx", {"head_dim": 32}, "head_dim", "d_model = 128 divided by the 8 attention heads"),
    ("dbrx", {"ffn_config": {**DBRX_EXPERTS, "moe_top_k": 5}}, "moe_top_k", "at most the 4"),
    (
        "dbrx",
        {"ffn_config": {**DBRX_EXPERTS, "moe_jitter_eps": 0.1}},
        "moe_jitter_eps",
        "0, since a recompute would draw other numbers",
    ),
    (
        "dbrx",
        {"ffn_config": {**DBRX_EXPERTS, "ffn_act_fn": {"name": "mish"}}},
        "ffn_act_fn",
        "a name of",
    ),
    ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings", "false"),
    ("dbrx", {"output_router_logits": True}, "output_router_logits", "false"),
]


@pytest.mark.parametrize(
    ("family", "changes", "key", "allowed"),
    REFUSED,
    ids=[f"{family}-{key}-{index}" for index, (family, _, key, _) in enumerate(REFUSED)],
)
def test_what_a_family_does_not_predict_is_refused_by_its_key(
    family: str, changes: dict[str, Any], key: str, allowed: str
) -> None:
    given = {"model_type": family, **SMALL, **OWN.get(family, {})}
    content = {name: value for name, value in given.items() if value is not None}
    ModelSpec.from_config(content, "config.json")
    with pytest.raises(UserError) as error:
        ModelSpec.from_config({**content, **changes}, "config.json")
    message = str(error.value)
    assert f"{key}: found" in message
    assert f"allowed: {allowed}" in message
