"""A tiny config of every family, for tests of the simulator and the runtime."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import AutoConfig

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 352,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
LATENT = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "n_group": 2,
    "topk_group": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, **GROUPED, "first_k_dense_replace": 1},
    "glm4_moe": {**GROUPED, "n_group": 1},
    "ernie4_5": {"head_dim": 16},
    "deepseek_v2": {**LATENT, **GROUPED, "n_group": 1, "first_k_dense_replace": 1},
    "dots1": {**GROUPED, "n_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "exaone_moe": {**EXPERTS, "sliding_window": 16},
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "glm4_moe_lite": {**LATENT, **GROUPED, "n_group": 1},
    "llama4_text": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 224,
        "interleave_moe_layer_step": 2,
    },
    "mellum": {
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
    },
    "minicpm3": {**LATENT},
    "jetmoe": {"kv_channels": 16, "num_local_experts": 8},
    "phimoe": {"num_local_experts": 8},
    "minimax_m2": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_5_moe_text": {
        **EXPERTS,
        **DELTA,
        "head_dim": 16,
        "shared_expert_intermediate_size": 160,
    },
    "qwen3_5_text": {**DELTA, "head_dim": 16},
    "solar_open": {**GROUPED, "n_group": 1, "head_dim": 16},
    "youtu": {**LATENT},
    **{
        family: {
            "num_key_value_heads": None,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "n_positions": 256,
        }
        for family in ("gpt2", "gpt_bigcode")
    },
    "opt": {
        "ffn_dim": 352,
        "dropout": 0.0,
        "max_position_embeddings": 254,
        "word_embed_proj_dim": None,
    },
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "dbrx": {
        "d_model": 128,
        "attn_config": {"kv_n_heads": 4, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "gemma3n_text": {
        "head_dim": 16,
        "hidden_size_per_layer_input": 24,
        "vocab_size_per_layer_input": 300,
        "num_kv_shared_layers": 1,
        "laurel_rank": 8,
    },
    "biogpt": {
        "num_key_value_heads": None,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 254,
    },
    **{
        family: {"num_key_value_heads": None, "n_positions": 256, "rotary_dim": 8}
        for family in ("gptj", "codegen")
    },
    "falcon": {"num_key_value_heads": None},
    "mpt": {"num_key_value_heads": None, "max_seq_len": 256},
    "granite_swa": {"sliding_window": 16, "layer_rope_theta": [10000.0, 10000.0, 0.0] * 2},
    "granitemoe_swa": {"sliding_window": 16},
    "mimo_v2_flash": {
        **GROUPED,
        "n_group": 1,
        "head_dim": 16,
        "v_head_dim": 24,
        "sliding_window": 17,
    },
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 96},
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 16},
    "laguna": {**EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 160},
    "persimmon": {"num_key_value_heads": None},
    "hy_v3": {**EXPERTS, "head_dim": 16},
    "axk1": {**LATENT, **GROUPED},
    "aria_text": {"moe_num_experts": 8, "moe_topk": 2},
    "cohere2_moe": {"head_dim": 16},
    "internlm3": {"head_dim": 16},
    "iquestcoder": {"head_dim": 16},
    "cwm": {"head_dim": 16, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 16},
    "helium": {"head_dim": 16},
    "hunyuan_v1_dense": {"head_dim": 16},
    "ministral": {"head_dim": 16},
    "ministral3": {"head_dim": 16},
    "seed_oss": {"head_dim": 16, "attention_dropout": 0.0, "residual_dropout": 0.0},
    "vaultgemma": {"head_dim": 16},
    "bloom": {"num_key_value_heads": None, "intermediate_size": None},
    "falcon_h1": {
        "mamba_d_ssm": 96,
        "mamba_n_heads": 4,
        "mamba_n_groups": 2,
        "mamba_d_state": 40,
        "mamba_chunk_size": 64,
    },
    "gpt_neox": {"num_key_value_heads": None},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 160},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 160},
}
"""Family -> its own keys, which make its model tiny."""


def config_of(family: str, **changes: Any) -> transformers.PretrainedConfig:
    given = {**SMALL, **OWN.get(family, {}), **changes}
    if "layer_rope_theta" in given:  # an entry for each layer
        given["layer_rope_theta"] = given["layer_rope_theta"][: given["num_hidden_layers"]]
    return AutoConfig.for_model(family, **given)
