"""The most common families: Llama, Qwen, Gemma, GLM, Granite, DeepSeek and others.

`DECODERS` lists the modules of each family's decoder layer, in the order in which transformers
registers them. The functions below are modules of one or a few families. To add a family, add it to
`DECODERS`, or to the dict of another file such as `dense` or `mixtures`. Its `defaults` are those
of transformers' config class, for keys that a config.json may leave out. The tests compare the
family with transformers' model.
"""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.attention import (
    attend,
    attention,
    capped_scores,
    scaled_scores,
    sink_scores,
)
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.dense import LLAMA, MISTRAL
from megatrain.simulator.model.families.experts import (
    expert_gate,
    gated_delta,
    latent_attention,
    routed,
    shared_experts,
)
from megatrain.simulator.model.families.family import (
    Family,
    Layer,
    Parts,
    attends,
    bare_norm,
    dense_or,
    gated,
    heads_of_hidden_size,
    layer_norms,
    linear_or,
    output_norms,
    plain,
    post_norms,
    pre_and_post_norms,
    pre_norms,
    scaled_residuals,
    stacked,
    wide_norm,
)
from megatrain.simulator.model.families.gemma4 import (
    GEMMA4_DEFAULTS,
    gemma4,
    gemma4_config,
    gemma4_kinds,
)
from megatrain.simulator.model.families.kinds import (
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
from megatrain.simulator.model.families.part import Compiled, Kept, Part, Traffic, placed
from megatrain.simulator.model.families.parts import (
    centred_norm,
    gated_mlp,
    layer_norm,
    linear,
    plain_mlp,
    residual,
    rms_norm,
    rotary,
    shared_input,
)


def phi3_attention(c: ModelConfig, kind: Kind) -> Parts:
    """Returns attention with one projection for queries, keys and values."""
    heads, kv_heads, size, hidden = c.heads, c.kv_heads, c.head_dim, c.hidden
    return (
        linear("self_attn.o_proj", heads * size, hidden),
        linear("self_attn.qkv_proj", hidden, (heads + 2 * kv_heads) * size),
        rotary((heads + kv_heads) * size),
        attend(c, kind.attention, copied=True, fused=True),
        Part(inputs=hidden * (heads + 2 * kv_heads) * size),
    )


def phi(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of Phi: one norm, after which attention and MLP run in parallel."""
    heads = (("q", c.heads), ("k", c.kv_heads)) if c.flag("qk_layernorm") else ()
    return (
        *attention(c, kind.attention, bias=True, out="dense", copied=True),
        *(
            layer_norm(f"self_attn.{name}_layernorm", c.head_dim, rows=rows, projected=False)
            for name, rows in heads
        ),
        *plain_mlp(c, "mlp.fc1", "mlp.fc2"),
        layer_norm("input_layernorm", c.hidden, first=True),
        shared_input(c.hidden, 2),
        Part(parallel=True),
        residual(c.hidden),
    )


def cohere(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of Cohere: one norm, after which attention and MLP run in parallel.

    Rotary positions are in fp32.
    """
    heads = (("q", c.heads), ("k", c.kv_heads)) if c.flag("use_qk_norm") else ()
    return (
        *attention(c, kind.attention, bias="attention_bias"),
        *(
            centred_norm(f"self_attn.{name}_norm", (rows, c.head_dim), rows, projected=False)
            for name, rows in heads
        ),
        *gated_mlp(c),
        centred_norm("input_layernorm", (c.hidden,), first=True),
        shared_input(c.hidden, 2),
        Part(parallel=True),
        residual(c.hidden),
    )


def sinks(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the learned number of each head that an attention sink needs."""
    return (Part(tensors=(("self_attn.sinks", (c.heads,)),)),)


def qwen_experts(*, experts_first: bool = False, shared: bool = False) -> Layer:
    """Returns a gated MLP, or Qwen's router and experts in layers with experts.

    With `shared`, these layers also have a gated expert that every token uses. `experts_first` is
    as in `routed`.
    """
    shared_expert = stacked(
        shared_experts(inner="shared_expert_intermediate_size", name="shared_expert"),
        lambda c, _: placed("mlp", expert_gate("mlp.shared_expert_gate", c.hidden)),
    )
    return dense_or(routed(experts_first=experts_first), *([shared_expert] if shared else []))


def gated_attention(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns attention whose output is scaled by the sigmoid of a gate. The query projection also
    computes the gate.
    """
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
        Part(
            forward=Traffic(7 * query),
            backward=Traffic(15 * query),
            kept=Kept(2 * query),
            compiled=Compiled(Kept(2 * query), longer=query),
        ),
    )


def deepseek_mlp(
    number: str = "n_routed_experts", shared: str = "n_shared_experts", bias: bool | str = False
) -> Layer:
    """Returns a gated MLP, or DeepSeek's router in fp32 and experts in layers with experts.

    `number` and `shared` are the keys of the numbers of routed and shared experts. `bias` says
    whether gated MLP and shared experts have a bias, or is the key that decides it.
    """
    return dense_or(
        routed(number=number, wide=True, experts_first=True),
        shared_experts(shared, bias=bias),
        dense=gated(bias=bias),
    )


def glm4_moe(c: ModelConfig, kind: Kind) -> Parts:
    """Returns attention as in GLM-4.5, with norms of queries and keys if the config says so."""
    norms = "head" if c.flag("use_qk_norm") else ""
    return attention(
        c, kind.attention, bias="attention_bias", out_bias=False, norms=norms, copied=True
    )


def sunk_attention(c: ModelConfig, kind: Kind) -> Parts:
    """Returns attention with sinks, whose output is scaled by a sigmoid of each head's log-sum-exp
    and a learned number. Autograd saves the output, unless a flash kernel computes attention.
    """
    c.each_layer("layer_rope_theta")  # checks that it has one entry for each layer
    output = c.heads * c.head_dim
    scaled = Part(
        forward=Traffic(3 * output),
        backward=Traffic(6 * output),
        kept=Kept(output + c.heads, 2 * c.heads),
        flash=Part(),
    )
    mixer = attention(c, kind.attention, bias="attention_bias", scores=scaled_scores, sinks=True)
    return (*sinks(c, kind), *mixer, scaled)


GRANITE_EXPERTS = stacked(
    pre_norms(),
    routed(
        number="num_local_experts",
        inner="intermediate_size",
        name="block_sparse_moe",
        gate="router",
    ),
    scaled_residuals,
)
"""The modules after attention in a layer of Granite with experts."""


def gpt_neox(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of GPT-NeoX, in which attention and MLP may run in parallel."""
    bias, hidden = c.flag("attention_bias", True), c.hidden
    parallel = c.flag("use_parallel_residual", True)
    return (
        layer_norm("input_layernorm", hidden, first=True),
        layer_norm("post_attention_layernorm", hidden, first=parallel),
        linear("attention.query_key_value", hidden, 3 * hidden, bias),
        linear("attention.dense", hidden, hidden, bias),
        *plain_mlp(c, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        rotary(2 * hidden),
        attend(c, kind.attention, copied=True, fused=True),
        Part(parallel=parallel, inputs=3 * hidden * hidden),
        residual(hidden),
    )


_GLM = stacked(
    attends(bias="attention_bias", out_bias=False, copied=True), gated(fused=True), pre_norms()
)
_OLMO2 = stacked(
    attends(bias="attention_bias", norms="whole", weight="wide"), gated(), post_norms("wide")
)
QWEN3_MOE = stacked(
    attends(bias="attention_bias", norms="head"), qwen_experts(experts_first=True), pre_norms()
)
"""The layers of Qwen3 with experts."""
DEEPSEEK = stacked(latent_attention, deepseek_mlp(), pre_norms())
"""The layers of DeepSeek-V3."""


def _gemma(norms: str) -> Layer:
    """Returns a layer of Gemma 2 and 3. `norms` are the norms of queries and keys, as in
    `attention`.
    """
    return stacked(
        attends(bias="attention_bias", norms=norms, weight="wide", scores=capped_scores),
        gated(act="hidden_activation"),
        pre_and_post_norms,
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
    "llama": Family(layer=LLAMA, defaults=_SILU),
    "mistral": Family(
        layer=MISTRAL, attention=one_window,
        defaults={**_SILU, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        layer=stacked(attends(bias=True, out_bias=False), gated(), pre_norms()),
        attention=qwen_window,
        defaults={**_QWEN_WINDOW, "num_key_value_heads": 32},
    ),
    "qwen3": Family(
        layer=stacked(attends(bias="attention_bias", norms="head"), gated(), pre_norms()),
        attention=qwen_window,
        defaults={**_QWEN_WINDOW, "num_key_value_heads": 32, "head_dim": 128},
    ),
    "gemma": Family(
        layer=stacked(attends(bias="attention_bias"), gated(), pre_norms("wide")), norm=wide_norm,
        defaults={
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256,
            "num_key_value_heads": 16,
        },
    ),
    "gemma2": Family(
        layer=_gemma(""), attention=pattern(2), norm=wide_norm,
        defaults={
            **_GELU, "sliding_window": 4096, "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3_text": Family(
        layer=_gemma("head"), attention=pattern(6), norm=wide_norm,
        # The text_config of Gemma 3 with images leaves these keys out.
        defaults={**_GELU, "sliding_window": 4096, "num_attention_heads": 8, "vocab_size": 262_208},
    ),
    "gemma4_text": Family(
        layer=gemma4, attention=gemma4_kinds, norm=wide_norm, published=gemma4_config,
        defaults=GEMMA4_DEFAULTS,
    ),
    "phi3": Family(
        layer=stacked(phi3_attention, gated(fused=True), pre_norms()), attention=one_window,
        defaults=_SILU,
    ),
    "phi": Family(
        layer=phi, norm=layer_norm, norm_name="final_layernorm", head_bias=True,
        defaults={"hidden_act": "gelu_new"},
    ),
    "olmo2": Family(layer=_OLMO2, norm=wide_norm, defaults=_SILU),
    "olmo3": Family(
        layer=_OLMO2, attention=pattern(4), norm=wide_norm,
        defaults={**_SILU, "sliding_window": 4096},
    ),
    "glm": Family(
        layer=_GLM,
        defaults={**_SILU, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    ),
    "glm4": Family(
        layer=stacked(_GLM, output_norms("post_self_attn_layernorm", "post_mlp_layernorm")),
        defaults={**_SILU, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": True},
    ),
    "glm4_moe": Family(
        layer=stacked(glm4_moe, deepseek_mlp(), pre_norms()), mlp=dense_first,
        defaults={
            **_SILU, "num_key_value_heads": 8, "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408, "n_routed_experts": 128, "n_shared_experts": 1,
            "num_experts_per_tok": 8,
        },
    ),
    "granite": Family(
        layer=stacked(LLAMA, scaled_residuals), scales_logits=True, defaults=_SILU
    ),
    "granite_swa": Family(
        layer=stacked(
            sunk_attention, gated(bias="mlp_bias"), pre_norms(), scaled_residuals
        ),
        attention=full_first(4), scales_logits=True,
        defaults={
            **_SILU, "num_key_value_heads": 4, "sliding_window": 128, "tie_word_embeddings": True,
        },
    ),
    "granitemoe": Family(
        layer=stacked(attends(bias="attention_bias"), GRANITE_EXPERTS), mlp=every_layer,
        scales_logits=True,
        defaults={**_SILU, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "cohere": Family(
        layer=cohere, norm=bare_norm, scales_logits=True,
        defaults={**_SILU, "tie_word_embeddings": True},
    ),
    "cohere2": Family(
        layer=cohere, attention=pattern(4), norm=bare_norm, scales_logits=True,
        defaults={**_SILU, "tie_word_embeddings": True, "sliding_window": 4096},
    ),
    "smollm3": Family(
        layer=LLAMA, attention=smollm3_window,
        defaults={**_SILU, "tie_word_embeddings": True, "num_key_value_heads": 4},
    ),
    "gpt_oss": Family(
        layer=stacked(
            sinks,
            attends(bias="attention_bias", scores=sink_scores, sinks=True),
            routed(
                number="num_local_experts", inner="intermediate_size", gate="router",
                transposed=True, bias=True,
            ),
            pre_norms("wide"),
        ),
        attention=pattern(2), mlp=every_layer, norm=wide_norm,
        defaults={
            "num_local_experts": 128, "num_experts_per_tok": 4, "num_key_value_heads": 8,
            "head_dim": 64, "sliding_window": 128, "attention_bias": True,
        },
    ),
    "mixtral": Family(
        layer=stacked(
            attends(),
            routed(number="num_local_experts", inner="intermediate_size"),
            pre_norms(),
        ),
        attention=one_window, mlp=every_layer, defaults=_MIXTRAL,
    ),
    "qwen2_moe": Family(
        layer=stacked(
            attends(bias="qkv_bias", out_bias=False), qwen_experts(shared=True), pre_norms()
        ),
        attention=qwen2_moe_window, mlp=qwen_sparse,
        defaults={
            **_QWEN_WINDOW, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
            "qkv_bias": True, "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    "qwen3_moe": Family(
        layer=QWEN3_MOE, attention=qwen_one_window, mlp=qwen_sparse,
        defaults={
            **_QWEN_WINDOW, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    "qwen3_next": Family(
        layer=stacked(
            linear_or(gated_delta, gated_attention), qwen_experts(shared=True), pre_norms("wide")
        ),
        attention=pattern(4, LINEAR, "full_attention_interval"), mlp=qwen_sparse, norm=wide_norm,
        defaults={
            **_SILU, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
        },
    ),
    "deepseek_v3": Family(
        layer=DEEPSEEK, mlp=dense_first,
        defaults={
            **_SILU, "first_k_dense_replace": 3, "moe_intermediate_size": 2048,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128,
        },
    ),
    "olmoe": Family(
        layer=stacked(
            heads_of_hidden_size("the norm of queries"),
            attends(bias="attention_bias", norms="whole"),
            routed(inner="intermediate_size"),
            pre_norms(),
        ),
        mlp=every_layer,
        defaults={**_SILU, "num_key_value_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
    ),
    "starcoder2": Family(
        layer=stacked(
            attends(bias="use_bias"), plain("c_fc", "c_proj", "use_bias"), layer_norms
        ),
        attention=one_window, norm=layer_norm,
        defaults={
            "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True,
            "num_key_value_heads": 2, "use_bias": True,
        },
    ),
    "gpt_neox": Family(
        layer=gpt_neox, norm=layer_norm, norm_name="final_layer_norm", embedding="embed_in",
        defaults={"hidden_act": "gelu"},
    ),
}  # fmt: skip
"""`model_type` -> family."""
