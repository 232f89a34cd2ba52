"""More families with experts, latent attention or linear attention."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from megatrain.simulator.model.families.attention import attend, attention
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.decoders import (
    DEEPSEEK,
    GRANITE_EXPERTS,
    QWEN3_MOE,
    deepseek_mlp,
    gated_attention,
    qwen_experts,
    sunk_attention,
)
from megatrain.simulator.model.families.dense import scaled_queries
from megatrain.simulator.model.families.experts import (
    experts,
    gated_delta,
    latent_attention,
    lightning,
    routed,
    router,
    shared_expert,
)
from megatrain.simulator.model.families.family import (
    Family,
    Parts,
    attends,
    gated,
    linear_or,
    post_norms,
    pre_norms,
    scaled_residuals,
    stacked,
    top_k,
    wide_norm,
)
from megatrain.simulator.model.families.kinds import (
    CHUNKED,
    DENSE,
    FULL,
    LINEAR,
    Kind,
    dense_first,
    dots_window,
    every_layer,
    full_first,
    listed_or_full,
    listed_or_sparse,
    llama4_chunks,
    llama4_scaled_from,
    llama4_sparse,
    one_window,
    pattern,
)
from megatrain.simulator.model.families.part import (
    Kept,
    Part,
    Tensors,
    Traffic,
    merge_parts,
    placed,
)
from megatrain.simulator.model.families.parts import (
    gated_mlp,
    interleaved,
    layer_norm,
    linear,
    residual,
    rms_norm,
    rotary,
    shared_input,
)


def minimax_layers(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or linear attention in layers 1, 3, 5 and so on, and full attention in
    the others.
    """
    if c.count("sliding_window", 0):
        raise c.wrong("sliding_window", "none")
    return c.each_layer("layer_types", (FULL, LINEAR)) or [
        LINEAR if index % 2 else FULL for index in range(c.layers)
    ]


def read_twice(c: ModelConfig, kind: Kind) -> Parts:
    """Returns the norms of `pre_norms`, whose outputs are also the residuals. So they are not
    computed in pieces of tokens.
    """
    return placed("", *pre_norms()(c, kind))


def interleaved_latent_attention(c: ModelConfig, kind: Kind) -> Parts:
    """Returns latent attention with interleaved rotary positions in fp32.

    Pairs of rotated elements become complex numbers, so the rows that contain them must have an
    even number of elements.
    """
    for key in ("qk_nope_head_dim", "kv_lora_rank"):
        if c.size(key) % 2:
            raise c.wrong(key, "an even number")
    rotated = (c.heads + 1) * c.size("qk_rope_head_dim")
    return (*latent_attention(c, kind), interleaved(rotated))


def granite_shared(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the shared expert of Granite, if the config has one."""
    inner, hidden = c.count("shared_intermediate_size"), c.hidden
    if not inner:
        return ()
    shared = merge_parts(gated_mlp(c, inner=inner, fused=True, label=False))
    tensors = (
        ("shared_mlp.input_linear.weight", (2 * inner, hidden)),
        ("shared_mlp.output_linear.weight", (hidden, inner)),
    )
    added = Part(forward=Traffic(3 * hidden), backward=Traffic(3 * hidden), mlp=f"+{inner}")
    return placed("mlp", msgspec.structs.replace(shared, tensors=tensors, linears=tensors), added)


_CHOSEN = "num_experts_per_tok"
JETMOE_DEFAULTS: dict[str, Any] = {
    "activation_function": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "num_key_value_heads": 16,
    "num_local_experts": 8,
    _CHOSEN: 2,
    "kv_channels": 128,
}
"""The defaults of JetMoE."""
_DRAWN = 2
"""Experts that Phi-3.5-MoE draws for each token. `num_experts_per_tok` does not change it. Only the
loss of the router uses that key."""


def drawing_router(name: str, hidden: int, experts: int) -> Part:
    """Returns the router of Phi-3.5-MoE, which draws an expert at random among those with nearly
    the best score, and then a second one.

    All tensors are in the compute dtype. Forward, for each of the two experts: the best score (1),
    magnitudes (2), a bound (2), distances (2), a ratio (3), a comparison (2), a mask (3), noise
    (1), its logarithm (2), a difference (3), the largest (1) and a softmax (2). Backward: the
    gradient of the scores (7). Autograd saves a mask of bytes, the softmax and four indices for
    each of the two.
    """
    return Part(
        tensors=((f"{name}.weight", (experts, hidden)),),
        active=experts * hidden,
        forward=Traffic(_DRAWN * 24 * experts),
        backward=Traffic(_DRAWN * 7 * experts),
        kept=Kept(_DRAWN * 3 * experts // 2, _DRAWN * 8),
    )


def phimoe(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of Phi-3.5-MoE: Mixtral with layer norms, biases, and a router that draws
    experts at random.
    """
    rope = c.get("rope_parameters") or c.get("rope_scaling")
    if isinstance(rope, dict):
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type not in ("default", "longrope"):
            raise c.wrong("rope_parameters", "a rope_type of default or longrope")
    count = top_k(c, "num_local_experts")[0]
    if count < _DRAWN:
        raise c.wrong("num_local_experts", f"at least the {_DRAWN} experts of a token")
    # The hidden states are multiplied with noise in place, before the router and inside it.
    noise = Part(
        forward=Traffic(2 * 4 * c.hidden),
        backward=Traffic(2 * 3 * c.hidden),
        kept=Kept(2 * c.hidden),
    )
    return (
        *attention(c, kind.attention, bias="attention_bias"),
        drawing_router("mlp.router", c.hidden, count),
        experts("mlp.experts", c.hidden, c.size("intermediate_size"), count, _DRAWN),
        layer_norm("input_layernorm", c.hidden, first=True),
        layer_norm("post_attention_layernorm", c.hidden),
        *((noise,) if c.get("input_jitter_noise") else ()),
        residual(c.hidden),
    )


def jetmoe_config(config: dict[str, Any], _where: str) -> dict[str, Any]:
    """Returns the config with the number of attention heads, which transformers computes: the
    number of key-value heads times the number of experts that each token uses.
    """
    kv_heads, chosen = (
        config.get(key, JETMOE_DEFAULTS[key]) for key in ("num_key_value_heads", _CHOSEN)
    )
    known = isinstance(kv_heads, int) and isinstance(chosen, int)
    return {**config, "num_attention_heads": kv_heads * chosen} if known else config


def jetmoe(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of JetMoE. The MLP has experts, and so have the projections of queries and of
    attention's output.

    Each expert of attention has as many query heads as there are key-value heads. Keys and values
    are repeated for every expert.
    """
    if c.flag("output_router_logits"):
        raise c.wrong("output_router_logits", "false, since this model's router loss is not known")
    count, chosen = top_k(c, "num_local_experts")
    if chosen > 2:
        raise c.wrong(
            _CHOSEN, "at most 2, since recompute could add the outputs of more in another order"
        )
    hidden, inner, size = c.hidden, c.size("intermediate_size"), c.kv_heads * c.head_dim
    queries, rows = chosen * size, chosen * hidden
    mlp, name = experts("", hidden, inner, count, chosen), "self_attention"
    # Autograd also saves the outputs that are summed over a token's experts.
    attention_experts = Part(
        active=2 * rows * size,
        idle=(count - chosen) * 2 * hidden * size,
        forward=Traffic(9 * rows + 7 * queries + 4 * size),
        backward=Traffic(16 * rows + 10 * queries + 6 * size),
        kept=Kept(3 * rows + 2 * queries, 8 * chosen),
    )
    scores = msgspec.structs.replace(router("", hidden, count), tensors=())
    tensors = _jetmoe_experts("mlp", hidden, (2 * inner, inner), count)
    return (
        *placed(
            "mlp", msgspec.structs.replace(mlp, tensors=tensors), Part(kept=Kept(rows)), scores
        ),
        rms_norm("input_layernorm", hidden, first=True),
        rms_norm("post_attention_layernorm", hidden),
        residual(hidden),
        Part(tensors=_jetmoe_experts(f"{name}.experts", hidden, (size, size), count)),
        attention_experts,
        scores,
        linear(f"{name}.kv_proj", hidden, 2 * size),
        rotary(queries + size),
        attend(c, kind.attention, kv_heads=c.heads),
        shared_input(hidden, 3),
    )


def _jetmoe_experts(name: str, hidden: int, widths: tuple[int, int], count: int) -> Tensors:
    """Returns the tensors of JetMoE's experts. `widths` are the output width of the first and the
    input width of the second projection.
    """
    first, second = widths
    return (
        (f"{name}.bias", (hidden,)),
        (f"{name}.input_linear.weight", (count, first, hidden)),
        (f"{name}.output_linear.weight", (count, hidden, second)),
        (f"{name}.router.layer.weight", (count, hidden)),
    )


def llama4_attention(c: ModelConfig, kind: Kind) -> Parts:
    """Returns attention inside chunks of tokens with rotary positions, or full attention without
    them, according to `kind`.
    """
    bias, heads, hidden, size = c.flag("attention_bias"), c.heads, c.hidden, c.head_dim
    projections = tuple(
        linear(f"self_attn.{name}_proj", hidden, size * count, bias)
        for name, count in (("q", heads), ("k", c.kv_heads), ("v", c.kv_heads))
    )
    mixer: Parts = (
        *projections,
        linear("self_attn.o_proj", heads * size, hidden, bias),
        shared_input(hidden, 3),
    )
    if kind.attention != CHUNKED:
        return (*mixer, attend(c, FULL), *scaled_queries(c, kind))
    rotated = (heads + c.kv_heads) * size
    norms = Part(
        forward=Traffic(0, 7 * rotated, 2 * rotated),
        backward=Traffic(0, 17 * rotated, 2 * rotated),
        kept=Kept(0, rotated + heads),
    )
    return (
        *mixer,
        interleaved(rotated),
        attend(c, FULL, window=c.size("attention_chunk_size"), chunked=True),
        norms if c.flag("use_qk_norm") else Part(),
    )


def llama4_mlp(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a gated MLP, or experts in layers with experts.

    transformers runs each token through every expert. For experts to which the token is not routed,
    the input is zero. So all experts count as active.
    """
    if kind.mlp == DENSE:
        return gated_mlp(c, name="feed_forward", inner=c.size("intermediate_size_mlp"))
    count, inner = top_k(c, "num_local_experts")[0], c.size("intermediate_size")
    return placed(
        "mlp",
        experts(
            "feed_forward.experts", c.hidden, inner, count, count, transposed=True, inputs=True
        ),
        router("feed_forward.router", c.hidden, count),
        shared_expert(c, "feed_forward.shared_expert", inner),
    )


_SILU: dict[str, Any] = {"hidden_act": "silu"}
_LATENT: dict[str, Any] = {
    **_SILU,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DELTA: dict[str, Any] = {
    **_SILU,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

_QWEN3_5 = stacked(
    linear_or(functools.partial(gated_delta, separate=True), gated_attention),
    qwen_experts(shared=True),
    pre_norms("wide"),
)
_QWEN3_5_PATTERN = pattern(4, LINEAR, "full_attention_interval")

MIXTURE_FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(
        layer=stacked(
            interleaved_latent_attention, deepseek_mlp(bias="mlp_bias"), pre_norms()
        ),
        mlp=dense_first,
        defaults={
            **_LATENT, "first_k_dense_replace": 0, "moe_intermediate_size": 1407,
            "n_routed_experts": 64, "n_shared_experts": 2,
        },
    ),
    "dots1": Family(
        layer=stacked(
            attends(bias="attention_bias", norms="head"), deepseek_mlp(), pre_norms()
        ),
        attention=dots_window, mlp=dense_first,
        defaults={
            **_SILU, "num_key_value_heads": 32, "sliding_window": 4096, "first_k_dense_replace": 0,
            "moe_intermediate_size": 1408,
        },
    ),
    "exaone_moe": Family(
        layer=stacked(
            attends(norms="head"), deepseek_mlp("num_experts", "num_shared_experts"), pre_norms()
        ),
        attention=pattern(4), mlp=dense_first,
        defaults={
            **_SILU, "num_key_value_heads": 32, "sliding_window": 4096, "first_k_dense_replace": 1,
            "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
            "num_shared_experts": 1,
        },
    ),
    "flex_olmo": Family(
        layer=stacked(
            attends(bias="attention_bias", norms="whole", weight="wide"),
            routed(inner="intermediate_size"),
            post_norms("wide"),
        ),
        mlp=every_layer, norm=wide_norm,
        defaults={**_SILU, "num_experts": 7, "num_experts_per_tok": 5},
    ),
    "glm4_moe_lite": Family(
        layer=DEEPSEEK, mlp=dense_first,
        defaults={
            **_LATENT, "q_lora_rank": 768, "qk_nope_head_dim": 192, "v_head_dim": 256,
            "first_k_dense_replace": 1, "moe_intermediate_size": 1536, "n_routed_experts": 64,
            "n_shared_experts": 1, "num_experts_per_tok": 4,
        },
    ),
    "granitemoe_swa": Family(
        layer=stacked(sunk_attention, GRANITE_EXPERTS, granite_shared), attention=full_first(4),
        mlp=every_layer, scales_logits=True,
        defaults={
            **_SILU, "num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 0, "sliding_window": 128,
        },
    ),
    "granitemoeshared": Family(
        layer=stacked(
            attends(bias="attention_bias"), GRANITE_EXPERTS, granite_shared
        ),
        mlp=every_layer, scales_logits=True,
        defaults={
            **_SILU, "num_local_experts": 8, "num_experts_per_tok": 2,
            "shared_intermediate_size": 0,
        },
    ),
    "jetmoe": Family(
        layer=jetmoe, mlp=every_layer, published=jetmoe_config, defaults=JETMOE_DEFAULTS,
        names={"head_dim": "kv_channels"},
    ),
    "llama4_text": Family(
        layer=stacked(llama4_attention, llama4_mlp, pre_norms()), attention=llama4_chunks,
        mlp=llama4_sparse, scaled_from=llama4_scaled_from,
        defaults={
            **_SILU, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
            "num_experts_per_tok": 1, "intermediate_size_mlp": 16384, "use_qk_norm": True,
            "attention_chunk_size": 8192, "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4, "attn_temperature_tuning": True, "floor_scale": 8192,
        },
    ),
    "mellum": Family(
        layer=QWEN3_MOE, attention=listed_or_full, mlp=listed_or_sparse,
        defaults={
            **_SILU, "num_key_value_heads": 4, "head_dim": 128, "sliding_window": 1024,
            "moe_intermediate_size": 896, "num_local_experts": 64, "num_experts_per_tok": 8,
        },
    ),
    "minicpm3": Family(
        layer=stacked(
            latent_attention, gated(bias="mlp_bias"), pre_norms(), scaled_residuals
        ),
        defaults={
            **_SILU, "tie_word_embeddings": True, "q_lora_rank": 768, "kv_lora_rank": 256,
            "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        },
    ),
    "minimax": Family(
        # The residuals are the outputs of the norms.
        layer=stacked(
            linear_or(lightning, attends()),
            read_twice,
            routed(number="num_local_experts", inner="intermediate_size"),
        ),
        attention=minimax_layers, mlp=every_layer,
        defaults={
            **_SILU, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
            "block_size": 256,
        },
    ),
    "minimax_m2": Family(
        layer=stacked(
            attends(norms="whole", copied=True),
            routed(number="num_local_experts", inner="intermediate_size", wide=True),
            pre_norms(),
        ),
        mlp=every_layer,
        defaults={
            **_SILU, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
    ),
    "phimoe": Family(
        layer=phimoe, attention=one_window, mlp=every_layer, norm=layer_norm,
        draws=("router_jitter_noise", "input_jitter_noise"), head_bias="lm_head_bias",
        defaults={
            **_SILU, "num_key_value_heads": 8, "num_local_experts": 16, "num_experts_per_tok": 2,
        },
    ),
    "qwen3_5_moe_text": Family(
        layer=_QWEN3_5, attention=_QWEN3_5_PATTERN, mlp=every_layer, norm=wide_norm,
        defaults={
            **_DELTA, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3_5_text": Family(
        layer=_QWEN3_5, attention=_QWEN3_5_PATTERN, norm=wide_norm,
        defaults={**_DELTA, "num_key_value_heads": 4},
    ),
    "solar_open": Family(
        layer=stacked(
            attends(bias="attention_bias", out_bias=False, copied=True), deepseek_mlp(), pre_norms()
        ),
        mlp=every_layer,
        defaults={
            **_SILU, "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1280,
            "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
        },
    ),
    "youtu": Family(
        layer=stacked(latent_attention, gated(), pre_norms()),
        defaults={**_LATENT, "tie_word_embeddings": True},
    ),
}  # fmt: skip
"""`model_type` -> family."""
