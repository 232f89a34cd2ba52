"""The most common families: Llama, Qwen, Gemma, GLM, Granite, DeepSeek and others.

Each function below returns the parts of a decoder layer, in the order in which transformers
registers them. To add a family, write such a function and add it to `DECODERS`, or to the dict of
another file such as `dense` or `mixtures`. Its `defaults` are those of transformers' config class,
for keys that a config.json may leave out. The tests compare the family with transformers' model.
"""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.dense import llama, mistral
from megatrain.simulator.model.families.experts import (
    expert_gate,
    experts,
    gated_delta,
    latent_attention,
    router,
    shared_expert,
)
from megatrain.simulator.model.families.family import (
    Family,
    Parts,
    bare_norm,
    pre_and_post_norms,
    pre_norms,
    top_k,
    wide_norm,
)
from megatrain.simulator.model.families.gemma4 import (
    GEMMA4_DEFAULTS,
    gemma4,
    gemma4_config,
    gemma4_kinds,
)
from megatrain.simulator.model.families.kinds import (
    DENSE,
    FULL,
    LINEAR,
    Kind,
    dense_first,
    every_layer,
    full_first,
    one_window,
    pattern,
    qwen2_moe_window,
    qwen_one_window,
    qwen_sparse,
    qwen_window,
    smollm3_window,
)
from megatrain.simulator.model.families.parts import (
    Kept,
    Part,
    Traffic,
    attend,
    attention,
    centred_norm,
    gated_mlp,
    layer_norm,
    linear,
    plain_mlp,
    residual,
    rms_norm,
    rotary,
    scaled_scores,
    shared_input,
    sink_scores,
    softmax_scores,
)


def qwen2(c: ModelConfig, kind: Kind) -> Parts:
    return (*attention(c, kind.attention, bias=True), *gated_mlp(c), *pre_norms(c))


def qwen3(c: ModelConfig, kind: Kind) -> Parts:
    bias = c.flag("attention_bias")
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias, norms="head"),
        *gated_mlp(c),
        *pre_norms(c),
    )


def gemma(c: ModelConfig, kind: Kind) -> Parts:
    bias = c.flag("attention_bias")
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *gated_mlp(c),
        *pre_norms(c, "wide"),
    )


def _gemma_layer(c: ModelConfig, kind: Kind, norms: str) -> Parts:
    bias, capped = c.flag("attention_bias"), bool(c.get("attn_logit_softcapping"))
    scores = softmax_scores(c.heads, capped=True) if capped else None
    return (
        *attention(
            c, kind.attention, bias=bias, out_bias=bias, norms=norms, weight="wide", scores=scores
        ),
        *gated_mlp(c, act="hidden_activation"),
        rms_norm("input_layernorm", c.hidden, first=True, weight="wide"),
        rms_norm("post_attention_layernorm", c.hidden, projected=False, weight="wide"),
        rms_norm("pre_feedforward_layernorm", c.hidden, weight="wide"),
        rms_norm("post_feedforward_layernorm", c.hidden, projected=False, weight="wide"),
        residual(c.hidden),
    )


def gemma2(c: ModelConfig, kind: Kind) -> Parts:
    return _gemma_layer(c, kind, "")


def gemma3(c: ModelConfig, kind: Kind) -> Parts:
    return _gemma_layer(c, kind, "head")


def phi3(c: ModelConfig, kind: Kind) -> Parts:
    heads, kv_heads, size, hidden = c.heads, c.kv_heads, c.head_dim, c.hidden
    return (
        linear("self_attn.o_proj", heads * size, hidden),
        linear("self_attn.qkv_proj", hidden, (heads + 2 * kv_heads) * size),
        rotary((heads + kv_heads) * size),
        attend(c, kind.attention, copied=True, fused=True),
        *gated_mlp(c, fused=True),
        *pre_norms(c),
    )


def phi(c: ModelConfig, kind: Kind) -> Parts:
    norms: Parts = ()
    if c.flag("qk_layernorm"):
        norms = tuple(
            layer_norm(f"self_attn.{name}_layernorm", c.head_dim, rows=rows, projected=False)
            for name, rows in (("q", c.heads), ("k", c.kv_heads))
        )
    return (
        *attention(c, kind.attention, bias=True, out_bias=True, out="dense", copied=True),
        *norms,
        *plain_mlp(c, "fc1", "fc2"),
        layer_norm("input_layernorm", c.hidden, first=True),
        shared_input(c.hidden, 2),
        residual(c.hidden),
    )


def olmo2(c: ModelConfig, kind: Kind) -> Parts:
    bias = c.flag("attention_bias")
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias, norms="whole", weight="wide"),
        *gated_mlp(c),
        rms_norm("post_attention_layernorm", c.hidden, projected=False, weight="wide"),
        rms_norm("post_feedforward_layernorm", c.hidden, projected=False, weight="wide"),
        residual(c.hidden),
        Part(kept=Kept(c.hidden)),
    )


def glm(c: ModelConfig, kind: Kind) -> Parts:
    return (
        *attention(c, kind.attention, bias=c.flag("attention_bias"), copied=True),
        *gated_mlp(c, fused=True),
        *pre_norms(c),
    )


def glm4(c: ModelConfig, kind: Kind) -> Parts:
    norms = pre_and_post_norms(
        c,
        ("input_layernorm", "post_attention_layernorm"),
        ("post_self_attn_layernorm", "post_mlp_layernorm"),
    )
    return (
        *attention(c, kind.attention, bias=c.flag("attention_bias"), copied=True),
        *gated_mlp(c, fused=True),
        *norms,
    )


def granite(c: ModelConfig, kind: Kind) -> Parts:
    """Llama, with products that scale the residuals."""
    return (*llama(c, kind), Part(forward=Traffic(4 * c.hidden), backward=Traffic(4 * c.hidden)))


def cohere(c: ModelConfig, kind: Kind) -> Parts:
    """One norm, after which attention and MLP run in parallel. Rotary positions are in fp32."""
    bias = c.flag("attention_bias")
    norms: Parts = ()
    if c.flag("use_qk_norm"):
        norms = tuple(
            centred_norm(f"self_attn.{name}_norm", (rows, c.head_dim), rows, projected=False)
            for name, rows in (("q", c.heads), ("k", c.kv_heads))
        )
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *norms,
        *gated_mlp(c),
        centred_norm("input_layernorm", (c.hidden,)),
        shared_input(c.hidden, 2),
        residual(c.hidden),
    )


def gpt_oss(c: ModelConfig, kind: Kind) -> Parts:
    bias, (count, chosen) = c.flag("attention_bias"), top_k(c, "num_local_experts")
    return (
        Part(tensors=(("self_attn.sinks", (c.heads,)),)),
        *attention(c, kind.attention, bias=bias, out_bias=bias, scores=sink_scores(c.heads)),
        router("mlp.router", c.hidden, count, bias=True),
        experts(
            "mlp.experts",
            c.hidden,
            c.size("intermediate_size"),
            count,
            chosen,
            transposed=True,
            bias=True,
        ),
        *pre_norms(c, "wide"),
    )


def mixtral(c: ModelConfig, kind: Kind) -> Parts:
    count, chosen = top_k(c, "num_local_experts")
    routed = (
        router("mlp.gate", c.hidden, count),
        experts("mlp.experts", c.hidden, c.size("intermediate_size"), count, chosen),
    )
    return (*attention(c, kind.attention), *routed, *pre_norms(c))


def qwen_experts(c: ModelConfig, first: str, shared: bool) -> Parts:
    """Returns Qwen's router and experts.

    `first` is `router` or `experts`, whichever transformers registers first. If `shared`, a gated
    expert for every token is added.
    """
    count, chosen = top_k(c, "num_experts")
    routed: Parts = (
        router("mlp.gate", c.hidden, count),
        experts("mlp.experts", c.hidden, c.size("moe_intermediate_size"), count, chosen),
    )
    if first == "experts":
        routed = routed[::-1]
    if not shared:
        return routed
    return (
        *routed,
        shared_expert(c, "mlp.shared_expert", c.size("shared_expert_intermediate_size")),
        expert_gate("mlp.shared_expert_gate", c.hidden),
    )


def qwen2_moe(c: ModelConfig, kind: Kind) -> Parts:
    mlp = gated_mlp(c) if kind.mlp == DENSE else qwen_experts(c, "router", True)
    return (*attention(c, kind.attention, bias=c.flag("qkv_bias", True)), *mlp, *pre_norms(c))


def qwen3_moe(c: ModelConfig, kind: Kind) -> Parts:
    bias, mlp = (
        c.flag("attention_bias"),
        gated_mlp(c) if kind.mlp == DENSE else qwen_experts(c, "experts", False),
    )
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias, norms="head"),
        *mlp,
        *pre_norms(c),
    )


def gated_attention(c: ModelConfig) -> Parts:
    """Returns attention whose output is scaled by a sigmoid of half of its query projection."""
    query, key, hidden, bias = (
        c.heads * c.head_dim,
        c.kv_heads * c.head_dim,
        c.hidden,
        c.flag("attention_bias"),
    )
    return (
        linear("self_attn.q_proj", hidden, 2 * query, bias),
        linear("self_attn.k_proj", hidden, key, bias),
        linear("self_attn.v_proj", hidden, key, bias),
        linear("self_attn.o_proj", query, hidden, bias),
        rms_norm("self_attn.q_norm", c.head_dim, rows=c.heads, projected=False, weight="wide"),
        rms_norm("self_attn.k_norm", c.head_dim, rows=c.kv_heads, projected=False, weight="wide"),
        rotary(query + key),
        attend(c, FULL, copied=True),
        shared_input(hidden, 3),
        # the sigmoid and its product with the output
        Part(forward=Traffic(7 * query), backward=Traffic(15 * query), kept=Kept(2 * query)),
    )


def qwen3_next(c: ModelConfig, kind: Kind) -> Parts:
    mlp = gated_mlp(c) if kind.mlp == DENSE else qwen_experts(c, "router", True)
    if kind.attention == LINEAR:
        return (*gated_delta(c), *mlp, *pre_norms(c, "wide"))
    return (*gated_attention(c), *mlp, *pre_norms(c, "wide"))


def deepseek_mlp(c: ModelConfig, kind: Kind, *, bias: bool = False) -> Parts:
    """Returns a dense MLP, or DeepSeek's experts with a router in fp32 and shared experts."""
    if kind.mlp == DENSE:
        return gated_mlp(c, bias=bias)
    (count, chosen), inner = top_k(c, "n_routed_experts"), c.size("moe_intermediate_size")
    return (
        experts("mlp.experts", c.hidden, inner, count, chosen),
        router("mlp.gate", c.hidden, count, wide=True),
        shared_expert(c, "mlp.shared_experts", inner * c.size("n_shared_experts"), bias=bias),
    )


def deepseek(c: ModelConfig, kind: Kind) -> Parts:
    return (*latent_attention(c, kind.attention), *deepseek_mlp(c, kind), *pre_norms(c))


def glm4_moe(c: ModelConfig, kind: Kind) -> Parts:
    norms = "head" if c.flag("use_qk_norm") else ""
    return (
        *attention(c, kind.attention, bias=c.flag("attention_bias"), norms=norms, copied=True),
        *deepseek_mlp(c, kind),
        *pre_norms(c),
    )


def olmoe(c: ModelConfig, kind: Kind) -> Parts:
    if c.heads * c.head_dim != c.hidden:
        raise c.wrong(
            "head_dim",
            f"hidden_size / num_attention_heads = {c.hidden // c.heads}, since the norm of queries"
            " has the width hidden_size",
        )
    bias, (count, chosen) = c.flag("attention_bias"), top_k(c, "num_experts")
    routed = (
        router("mlp.gate", c.hidden, count),
        experts("mlp.experts", c.hidden, c.size("intermediate_size"), count, chosen),
    )
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias, norms="whole"),
        *routed,
        *pre_norms(c),
    )


def sunk_attention(c: ModelConfig, kind: Kind) -> Parts:
    """Returns attention with sinks: a sigmoid of each head's log-sum-exp and a learned number
    scales the output, which autograd saves.
    """
    c.each_layer("layer_rope_theta")  # checks that it has one entry for each layer
    bias, output = c.flag("attention_bias"), c.heads * c.head_dim
    scaled = Part(
        forward=Traffic(3 * output),
        backward=Traffic(6 * output),
        kept=Kept(output + c.heads, 2 * c.heads),
    )
    mixer = attention(c, kind.attention, bias=bias, out_bias=bias, scores=scaled_scores(c.heads))
    return (Part(tensors=(("self_attn.sinks", (c.heads,)),)), *mixer, scaled)


def granite_swa(c: ModelConfig, kind: Kind) -> Parts:
    scaled = Part(forward=Traffic(4 * c.hidden), backward=Traffic(4 * c.hidden))
    return (*sunk_attention(c, kind), *gated_mlp(c, bias=c.flag("mlp_bias")), *pre_norms(c), scaled)


def granitemoe(c: ModelConfig, kind: Kind, *, sunk: bool = False) -> Parts:
    bias, (count, chosen), name = (
        c.flag("attention_bias"),
        top_k(c, "num_local_experts"),
        "block_sparse_moe",
    )
    routed = (
        router(f"{name}.router", c.hidden, count),
        experts(f"{name}.experts", c.hidden, c.size("intermediate_size"), count, chosen),
    )
    scaled = Part(forward=Traffic(4 * c.hidden), backward=Traffic(4 * c.hidden))
    mixer = (
        sunk_attention(c, kind) if sunk else attention(c, kind.attention, bias=bias, out_bias=bias)
    )
    return (*mixer, *pre_norms(c), *routed, scaled)


def starcoder2(c: ModelConfig, kind: Kind) -> Parts:
    bias = c.flag("use_bias", True)
    norms = (
        layer_norm("input_layernorm", c.hidden, first=True),
        layer_norm("post_attention_layernorm", c.hidden),
        residual(c.hidden),
    )
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *plain_mlp(c, "c_fc", "c_proj", bias=bias),
        *norms,
    )


def gpt_neox(c: ModelConfig, kind: Kind) -> Parts:
    bias, hidden = c.flag("attention_bias", True), c.hidden
    inside = 1 if c.flag("use_parallel_residual", True) else 0
    return (
        layer_norm("input_layernorm", hidden, first=True),
        layer_norm("post_attention_layernorm", hidden, first=bool(inside)),
        linear("attention.query_key_value", hidden, 3 * hidden, bias),
        linear("attention.dense", hidden, hidden, bias),
        *plain_mlp(c, "dense_h_to_4h", "dense_4h_to_h"),
        rotary(2 * hidden),
        attend(c, kind.attention, copied=True, fused=True),
        residual(hidden),
    )


_SILU: dict[str, Any] = {"hidden_act": "silu"}
_QWEN_WINDOW: dict[str, Any] = {**_SILU, "sliding_window": 4096, "use_sliding_window": False}
_GELU: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
}
_MIXTRAL: dict[str, Any] = {
    **_SILU,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

DECODERS: dict[str, Family] = {
    "llama": Family(layer=llama, defaults=_SILU),
    "mistral": Family(
        layer=mistral, attention=one_window,
        defaults={**_SILU, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        layer=qwen2, attention=qwen_window,
        defaults={**_QWEN_WINDOW, "num_key_value_heads": 32},
    ),
    "qwen3": Family(
        layer=qwen3, attention=qwen_window,
        defaults={**_QWEN_WINDOW, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma": Family(
        layer=gemma, norm=wide_norm,
        defaults={
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256,
            "num_key_value_heads": 16,
        },
    ),
    "gemma2": Family(
        layer=gemma2, attention=pattern(2), norm=wide_norm,
        defaults={**_GELU, "sliding_window": 4096, "attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": Family(
        layer=gemma3, attention=pattern(6), norm=wide_norm,
        # The text_config of Gemma 3 with images leaves these keys out.
        defaults={**_GELU, "sliding_window": 4096, "num_attention_heads": 8, "vocab_size": 262_208},
    ),
    "gemma4_text": Family(
        layer=gemma4, attention=gemma4_kinds, norm=wide_norm, published=gemma4_config,
        defaults=GEMMA4_DEFAULTS,
    ),
    "phi3": Family(layer=phi3, attention=one_window, defaults=_SILU),
    "phi": Family(
        layer=phi, norm=layer_norm, norm_name="final_layernorm", head_bias=True,
        defaults={"hidden_act": "gelu_new"},
    ),
    "olmo2": Family(layer=olmo2, norm=wide_norm, defaults=_SILU),
    "olmo3": Family(
        layer=olmo2, attention=pattern(4), norm=wide_norm,
        defaults={**_SILU, "sliding_window": 4096},
    ),
    "glm": Family(
        layer=glm,
        defaults={**_SILU, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    ),
    "glm4": Family(
        layer=glm4,
        defaults={**_SILU, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    ),
    "glm4_moe": Family(
        layer=glm4_moe, mlp=dense_first,
        defaults={
            **_SILU, "num_key_value_heads": 8, "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_experts_per_tok": 8,
        },
    ),
    "granite": Family(layer=granite, defaults=_SILU),
    "granite_swa": Family(
        layer=granite_swa, attention=full_first(4),
        defaults={
            **_SILU, "num_key_value_heads": 4, "sliding_window": 128, "tie_word_embeddings": True,
        },
    ),
    "granitemoe": Family(
        layer=granitemoe, mlp=every_layer,
        defaults={**_SILU, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "cohere": Family(layer=cohere, norm=bare_norm, defaults={**_SILU, "tie_word_embeddings": True}),
    "cohere2": Family(
        layer=cohere, attention=pattern(4), norm=bare_norm,
        defaults={**_SILU, "tie_word_embeddings": True, "sliding_window": 4096},
    ),
    "smollm3": Family(
        layer=llama, attention=smollm3_window,
        defaults={**_SILU, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "gpt_oss": Family(
        layer=gpt_oss, attention=pattern(2), mlp=every_layer, norm=wide_norm,
        defaults={
            "num_local_experts": 128, "num_experts_per_tok": 4, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": 128, "attention_bias": True,
        },
    ),
    "mixtral": Family(layer=mixtral, attention=one_window, mlp=every_layer, defaults=_MIXTRAL),
    "qwen2_moe": Family(
        layer=qwen2_moe, attention=qwen2_moe_window, mlp=qwen_sparse,
        defaults={
            **_QWEN_WINDOW, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": Family(
        layer=qwen3_moe, attention=qwen_one_window, mlp=qwen_sparse,
        defaults={
            **_QWEN_WINDOW, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "qwen3_next": Family(
        layer=qwen3_next, attention=pattern(4, LINEAR, "full_attention_interval"), mlp=qwen_sparse,
        norm=wide_norm,
        defaults={
            **_SILU, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
    ),
    "deepseek_v3": Family(
        layer=deepseek, mlp=dense_first,
        defaults={
            **_SILU, "first_k_dense_replace": 3, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
    ),
    "olmoe": Family(
        layer=olmoe, mlp=every_layer,
        defaults={**_SILU, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "starcoder2": Family(
        layer=starcoder2, attention=one_window, norm=layer_norm,
        defaults={
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
            "num_key_value_heads": 2,
        },
    ),
    "gpt_neox": Family(
        layer=gpt_neox, norm=layer_norm, norm_name="final_layer_norm", embedding="embed_in",
        defaults={"hidden_act": "gelu"},
    ),
}  # fmt: skip
