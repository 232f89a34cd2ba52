"""More families with experts, most of them with shared experts as in DeepSeek."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.attention import attend, sink_scores
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.decoders import sinks
from megatrain.simulator.model.families.experts import latent_attention, routed, shared_experts
from megatrain.simulator.model.families.family import (
    Family,
    Parts,
    attends,
    bare_norm,
    dense_or,
    gated,
    interleaved_rotary,
    pre_norms,
    query_key_norms,
    stacked,
)
from megatrain.simulator.model.families.kinds import (
    FULL,
    SLIDING,
    Kind,
    cohere_window,
    dense_between,
    ernie_sparse,
    every_layer,
    listed_or_full,
    mimo_window,
    one_dense,
)
from megatrain.simulator.model.families.part import Compiled, Kept, Part, Traffic, placed
from megatrain.simulator.model.families.parts import (
    centred_norm,
    gated_mlp,
    linear,
    residual,
    rms_norm,
    rotary,
    shared_input,
)


def hy_v3_combined(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the casts for adding the outputs of routed and shared experts in fp32, if the config
    says so.
    """
    if not c.flag("enable_moe_fp32_combine", True):
        return ()
    cast = Traffic(0, 0, 3 * c.hidden)
    return placed("mlp", Part(forward=cast, backward=cast))


def output_norm(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the norm after the experts of A.X K1."""
    return placed("mlp", rms_norm("mlp.post_mlp_layernorm", c.hidden, projected=False))


def mimo_attention(c: ModelConfig, kind: Kind) -> Parts:
    """Returns attention whose scores are written out.

    Layers with a window have sinks and twice as many key-value heads.
    """
    hidden, heads, size, value, bias = (
        c.hidden,
        c.heads,
        c.head_dim,
        c.size("v_head_dim"),
        c.flag("attention_bias"),
    )
    windowed = kind.attention == SLIDING
    window = (
        (
            c.count("sliding_window_size", 0) + 1
            if c.get("sliding_window_size") is not None
            else c.size("sliding_window")
        )
        if windowed
        else 0
    )
    kv_heads = c.kv_heads * (2 if windowed else 1)
    if heads % kv_heads:
        raise c.wrong("num_key_value_heads", f"a divisor of half of the {heads} attention heads")
    return (
        *(sinks(c, kind) if windowed else ()),
        linear("self_attn.q_proj", hidden, heads * size, bias),
        linear("self_attn.k_proj", hidden, kv_heads * size, bias),
        linear("self_attn.v_proj", hidden, kv_heads * value, bias),
        linear("self_attn.o_proj", heads * value, hidden),
        rotary((heads + kv_heads) * size),
        attend(
            c,
            FULL,
            query=size,
            value=value,
            kv_heads=kv_heads,
            window=window,
            scores=sink_scores(c),
        ),
        shared_input(hidden, 3),
    )


def laguna_gate(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns a gate that scales the output of attention: the softplus of a projection, with one
    value per head or per element.
    """
    hidden, heads, size = c.hidden, c.heads, c.head_dim
    c.each_layer("num_attention_heads_per_layer", (heads,))  # checks that all entries are equal
    gating = c.get("gating")
    if gating not in (True, "per-head", "per-element"):
        raise c.wrong("gating", "true, per-head or per-element")
    output, gates = heads * size, heads * (size if gating == "per-element" else 1)
    gate = Part(
        forward=Traffic(3 * output, 2 * gates, 2 * gates),
        backward=Traffic(6 * output, 3 * gates, 2 * gates),
        kept=Kept(2 * output + gates, 0, gates),
        compiled=Compiled(Kept(2 * output + gates, 0, gates), longer=output),
    )
    return (linear("self_attn.g_proj", hidden, gates), gate, shared_input(hidden, 2))


def cohere_prefix(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the MLP of Cohere's dense layers, which may have another width than the experts."""
    inner = c.size("prefix_dense_intermediate_size", c.size("intermediate_size"))
    return gated_mlp(c, inner=inner)


def cohere_norm(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the norm of a layer in which attention and MLP run in parallel."""
    if c.get("rms_norm_eps") is not None:
        raise c.wrong("rms_norm_eps", "null, since only layer norms (layer_norm_eps) are predicted")
    return (
        centred_norm("input_layernorm", (c.hidden,), first=True),
        shared_input(c.hidden, 2),
        Part(parallel=True),
        residual(c.hidden),
    )


_SILU: dict[str, Any] = {"hidden_act": "silu"}

SHARED_EXPERT_FAMILIES: dict[str, Family] = {
    "aria_text": Family(
        # The router has a softmax over the chosen experts only.
        layer=stacked(
            attends(bias="attention_bias"),
            routed(
                number="moe_num_experts", chosen="moe_topk", inner="intermediate_size",
                gate="router", transposed=True,
            ),
            shared_experts("moe_num_shared_experts", inner="intermediate_size", bias="mlp_bias"),
            pre_norms(),
        ),
        mlp=every_layer,
        defaults={
            **_SILU, "intermediate_size": 4096, "moe_num_experts": 8, "moe_topk": 2,
            "moe_num_shared_experts": 2,
        },
    ),
    "axk1": Family(
        layer=stacked(
            latent_attention,
            dense_or(
                routed(number="n_routed_experts", wide=True, experts_first=True),
                shared_experts("n_shared_experts"),
                output_norm,
            ),
            pre_norms(),
        ),
        mlp=dense_between,
        defaults={
            **_SILU, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 2048,
            "n_routed_experts": 192, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
    ),
    "cohere2_moe": Family(
        # Layers with a window have rotary positions.
        layer=stacked(
            attends(bias="attention_bias"),
            dense_or(
                routed(inner="intermediate_size"),
                shared_experts(
                    "num_shared_experts", inner="intermediate_size", optional=True, scaled=True
                ),
                dense=cohere_prefix,
            ),
            cohere_norm,
        ),
        attention=cohere_window, mlp=dense_between, norm=bare_norm, scales_logits=True,
        defaults={
            **_SILU, "tie_word_embeddings": True, "head_dim": 128, "sliding_window": 4096,
            "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
            "first_k_dense_replace": 0, "moe_layer_freq": 1,
            "prefix_dense_sliding_window_pattern": 1, "sliding_window_pattern": 4,
        },
    ),
    "hy_v3": Family(
        layer=stacked(
            attends(bias="attention_bias", norms="head"),
            dense_or(
                routed(wide=True),
                shared_experts("num_shared_experts", bias="mlp_bias"),
                hy_v3_combined,
                dense=gated(bias="mlp_bias"),
            ),
            pre_norms(),
        ),
        mlp=one_dense,
        defaults={
            **_SILU, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 192,
            "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
        },
    ),
    "mimo_v2_flash": Family(
        layer=stacked(
            mimo_attention,
            dense_or(routed(number="n_routed_experts", wide=True, experts_first=True)),
            pre_norms(),
        ),
        attention=mimo_window, mlp=one_dense,
        defaults={
            **_SILU, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
            "sliding_window": 129, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
        },
    ),
    "ernie4_5_moe": Family(
        # The router adds an untrained bias to choose the experts.
        layer=stacked(
            attends(bias="use_bias"),
            interleaved_rotary,
            dense_or(
                routed(number="moe_num_experts", chosen="moe_k", wide=True),
                shared_experts("moe_num_shared_experts", bias="use_bias", optional=True),
                dense=gated(bias="use_bias"),
            ),
            pre_norms(),
        ),
        head_bias="use_bias", mlp=ernie_sparse,
        defaults={
            **_SILU, "num_key_value_heads": 4, "tie_word_embeddings": True, "moe_num_experts": 64,
            "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
        },
    ),
    "hunyuan_v1_moe": Family(
        layer=stacked(
            attends(bias="attention_bias"),
            query_key_norms,
            routed(chosen="moe_topk", inner="intermediate_size", gate="gate.wg", wide=True),
            shared_experts(inner="intermediate_size", name="shared_mlp"),
            pre_norms(),
        ),
        mlp=every_layer,
        defaults={**_SILU, "num_experts": 1, "moe_topk": 1},
    ),
    "laguna": Family(
        layer=stacked(
            attends(bias="attention_bias", norms="head"),
            laguna_gate,
            dense_or(
                routed(experts_first=True),
                shared_experts(inner="shared_expert_intermediate_size", scaled=True),
            ),
            pre_norms(),
        ),
        attention=listed_or_full, mlp=one_dense,
        defaults={
            **_SILU, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
            "sliding_window": 512, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "gating": True,
        },
    ),
}  # fmt: skip
"""`model_type` -> family."""
