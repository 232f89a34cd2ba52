"""More families with experts, most of them with shared experts as in DeepSeek."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.experts import (
    experts,
    latent_attention,
    router,
    shared_expert,
)
from megatrain.simulator.model.families.family import Family, Parts, bare_norm, pre_norms, top_k
from megatrain.simulator.model.families.kinds import (
    DENSE,
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
from megatrain.simulator.model.families.parts import (
    Kept,
    Part,
    Traffic,
    attend,
    attention,
    centred_norm,
    gated_mlp,
    linear,
    residual,
    rms_norm,
    rotary,
    shared_input,
    sink_scores,
    turned_in_pairs,
)


def hy_v3(c: ModelConfig, kind: Kind) -> Parts:
    """A router in fp32. Routed and shared experts can also be added in fp32."""
    bias, mlp_bias, hidden = c.flag("attention_bias"), c.flag("mlp_bias"), c.hidden
    mlp = gated_mlp(c, bias=mlp_bias)
    if kind.mlp != DENSE:
        (count, chosen), inner = top_k(c, "num_experts"), c.size("moe_intermediate_size")
        wide = (
            Part(forward=Traffic(0, 0, 3 * hidden), backward=Traffic(0, 0, 3 * hidden))
            if c.flag("enable_moe_fp32_combine", True)
            else Part()
        )
        mlp = (
            router("mlp.gate", hidden, count, wide=True),
            experts("mlp.experts", hidden, inner, count, chosen),
            shared_expert(
                c, "mlp.shared_experts", inner * c.size("num_shared_experts"), bias=mlp_bias
            ),
            wide,
        )
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias, norms="head"),
        *mlp,
        *pre_norms(c),
    )


def axk1(c: ModelConfig, kind: Kind) -> Parts:
    """DeepSeek-V3, with a norm after the experts."""
    hidden = c.hidden
    mlp = gated_mlp(c)
    if kind.mlp != DENSE:
        (count, chosen), inner = top_k(c, "n_routed_experts"), c.size("moe_intermediate_size")
        mlp = (
            experts("mlp.experts", hidden, inner, count, chosen),
            router("mlp.gate", hidden, count, wide=True),
            shared_expert(c, "mlp.shared_experts", inner * c.size("n_shared_experts")),
            rms_norm("mlp.post_mlp_layernorm", hidden, projected=False),
        )
    return (*latent_attention(c, kind.attention), *mlp, *pre_norms(c))


def mimo(c: ModelConfig, kind: Kind) -> Parts:
    """Layers with a window have attention sinks and twice as many key and value heads.

    Scores are written out in all layers.
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
    pairs = c.kv_heads * (2 if windowed else 1)
    if heads % pairs:
        raise c.wrong("num_key_value_heads", f"a divisor of half of the {heads} attention heads")
    mlp = gated_mlp(c)
    if kind.mlp != DENSE:
        count, chosen = top_k(c, "n_routed_experts")
        mlp = (
            experts("mlp.experts", hidden, c.size("moe_intermediate_size"), count, chosen),
            router("mlp.gate", hidden, count, wide=True),
        )
    return (
        Part(tensors=(("self_attn.sinks", (heads,)),) if windowed else ()),
        linear("self_attn.q_proj", hidden, heads * size, bias),
        linear("self_attn.k_proj", hidden, pairs * size, bias),
        linear("self_attn.v_proj", hidden, pairs * value, bias),
        linear("self_attn.o_proj", heads * value, hidden),
        rotary((heads + pairs) * size),
        attend(
            c,
            FULL,
            query=size,
            value=value,
            kv_heads=pairs,
            window=window,
            scores=sink_scores(heads),
        ),
        shared_input(hidden, 3),
        *mlp,
        *pre_norms(c),
    )


def ernie4_5_moe(c: ModelConfig, kind: Kind) -> Parts:
    """ERNIE 4.5, with a router in fp32 that adds an untrained bias to choose the experts."""
    bias, hidden, turned = (
        c.flag("use_bias"),
        c.hidden,
        turned_in_pairs((c.heads + c.kv_heads) * c.head_dim),
    )
    mlp = gated_mlp(c, bias=bias)
    if kind.mlp != DENSE:
        count, chosen, inner, shared = (
            c.size("moe_num_experts"),
            c.size("moe_k"),
            c.size("moe_intermediate_size"),
            c.count("moe_num_shared_experts"),
        )
        if chosen > count:
            raise c.wrong("moe_k", f"at most the {count} experts")
        mlp = (
            router("mlp.gate", hidden, count, wide=True),
            experts("mlp.experts", hidden, inner, count, chosen),
        )
        mlp += (
            (shared_expert(c, "mlp.shared_experts", inner * shared, bias=bias),) if shared else ()
        )
    return (*attention(c, kind.attention, bias=bias, out_bias=bias), turned, *mlp, *pre_norms(c))


def hunyuan_moe(c: ModelConfig, kind: Kind) -> Parts:
    """A router in fp32, and a shared expert of the width of the others."""
    bias, hidden, inner, heads, pairs, size = (
        c.flag("attention_bias"),
        c.hidden,
        c.size("intermediate_size"),
        c.heads,
        c.kv_heads,
        c.head_dim,
    )
    count, chosen = c.size("num_experts"), c.size("moe_topk")
    if chosen > count:
        raise c.wrong("moe_topk", f"at most the {count} experts")
    norms = tuple(
        rms_norm(f"self_attn.{name}_layernorm", size, rows=rows, projected=False)
        for name, rows in (("query", heads), ("key", pairs))
    )
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *norms,
        router("mlp.gate.wg", hidden, count, wide=True),
        experts("mlp.experts", hidden, inner, count, chosen),
        shared_expert(c, "mlp.shared_mlp", inner),
        *pre_norms(c),
    )


def laguna(c: ModelConfig, kind: Kind) -> Parts:
    """The output of attention is scaled by a softplus of a projection, per head or per element."""
    bias, hidden, heads, size = c.flag("attention_bias"), c.hidden, c.heads, c.head_dim
    c.each_layer("num_attention_heads_per_layer", (heads,))  # checks that all layers have as many
    gating = c.get("gating")
    if gating not in (True, "per-head", "per-element"):
        raise c.wrong("gating", "true, per-head or per-element")
    output, gates = heads * size, heads * (size if gating == "per-element" else 1)
    gate = Part(
        forward=Traffic(3 * output, 2 * gates, 2 * gates),
        backward=Traffic(6 * output, 3 * gates, 2 * gates),
        kept=Kept(2 * output + gates, 0, gates),
    )
    mlp = gated_mlp(c)
    if kind.mlp != DENSE:
        (count, chosen), inner = top_k(c, "num_experts"), c.size("moe_intermediate_size")
        mlp = (
            experts("mlp.experts", hidden, inner, count, chosen),
            router("mlp.gate", hidden, count),
            shared_expert(c, "mlp.shared_experts", c.size("shared_expert_intermediate_size")),
            Part(forward=Traffic(2 * hidden), backward=Traffic(2 * hidden)),
        )
    mixer = attention(c, kind.attention, bias=bias, out_bias=bias, norms="head")
    return (
        *mixer,
        linear("self_attn.g_proj", hidden, gates),
        gate,
        shared_input(hidden, 2),
        *mlp,
        *pre_norms(c),
    )


def aria(c: ModelConfig, kind: Kind) -> Parts:
    """The attention of Llama, and a router with a softmax over the chosen experts only."""
    bias, hidden, inner = c.flag("attention_bias"), c.hidden, c.size("intermediate_size")
    count, chosen = c.size("moe_num_experts"), c.size("moe_topk")
    if chosen > count:
        raise c.wrong("moe_topk", f"at most the {count} experts")
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        router("mlp.router", hidden, count),
        experts("mlp.experts", hidden, inner, count, chosen, transposed=True),
        shared_expert(
            c,
            "mlp.shared_experts",
            inner * c.size("moe_num_shared_experts"),
            bias=c.flag("mlp_bias"),
        ),
        *pre_norms(c),
    )


def cohere2_moe(c: ModelConfig, kind: Kind) -> Parts:
    """One norm, after which attention and experts run in parallel.

    Layers with a window have rotary positions.
    """
    bias, hidden = c.flag("attention_bias"), c.hidden
    if c.get("rms_norm_eps") is not None:
        raise c.wrong("rms_norm_eps", "null, since only layer norms (layer_norm_eps) are predicted")
    mlp: Parts
    if kind.mlp == DENSE:
        mlp = gated_mlp(
            c, inner=c.size("prefix_dense_intermediate_size", c.size("intermediate_size"))
        )
    else:
        (count, chosen), inner, shared = (
            top_k(c, "num_experts"),
            c.size("intermediate_size"),
            c.count("num_shared_experts"),
        )
        mlp = (
            router("mlp.gate", hidden, count),
            experts("mlp.experts", hidden, inner, count, chosen),
        )
        if shared:
            mlp += (
                shared_expert(c, "mlp.shared_experts", inner * shared),
                Part(forward=Traffic(2 * hidden), backward=Traffic(2 * hidden)),
            )
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *mlp,
        centred_norm("input_layernorm", (hidden,)),
        shared_input(hidden, 2),
        residual(hidden),
    )


_SILU: dict[str, Any] = {"hidden_act": "silu"}

SHARED_EXPERT_FAMILIES: dict[str, Family] = {
    "aria_text": Family(
        layer=aria, mlp=every_layer,
        defaults={
            **_SILU, "intermediate_size": 4096, "moe_num_experts": 8, "moe_topk": 2,
            "moe_num_shared_experts": 2,
        },
    ),
    "axk1": Family(
        layer=axk1, mlp=dense_between,
        defaults={
            **_SILU, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 2048,
            "n_routed_experts": 192, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
    ),
    "cohere2_moe": Family(
        layer=cohere2_moe, attention=cohere_window, mlp=dense_between, norm=bare_norm,
        defaults={
            **_SILU, "tie_word_embeddings": True, "head_dim": 128, "sliding_window": 4096,
            "num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 0,
            "first_k_dense_replace": 0, "moe_layer_freq": 1,
            "prefix_dense_sliding_window_pattern": 1, "sliding_window_pattern": 4,
        },
    ),
    "hy_v3": Family(
        layer=hy_v3, mlp=one_dense,
        defaults={
            **_SILU, "num_key_value_heads": 8, "head_dim": 128, "num_experts": 192,
            "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 1536,
        },
    ),
    "mimo_v2_flash": Family(
        layer=mimo, attention=mimo_window, mlp=one_dense,
        defaults={
            **_SILU, "num_key_value_heads": 4, "head_dim": 192, "v_head_dim": 128,
            "sliding_window": 129, "n_routed_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
        },
    ),
    "ernie4_5_moe": Family(
        layer=ernie4_5_moe, head_bias="use_bias", mlp=ernie_sparse,
        defaults={
            **_SILU, "num_key_value_heads": 4, "tie_word_embeddings": True, "moe_num_experts": 64,
            "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
        },
    ),
    "hunyuan_v1_moe": Family(
        layer=hunyuan_moe, mlp=every_layer,
        defaults={**_SILU, "num_experts": 1, "moe_topk": 1},
    ),
    "laguna": Family(
        layer=laguna, attention=listed_or_full, mlp=one_dense,
        defaults={
            **_SILU, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
            "sliding_window": 512, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "gating": True,
        },
    ),
}  # fmt: skip
