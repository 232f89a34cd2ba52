"""Families with a dense MLP, which differ from Llama in norms, biases, activation or window."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.family import Family, Parts, pre_norms, wide_norm
from megatrain.simulator.model.families.kinds import (
    SLIDING,
    Kind,
    full_first,
    listed,
    one_window,
    pattern,
)
from megatrain.simulator.model.families.parts import (
    Kept,
    Part,
    Traffic,
    attend,
    attention,
    gated_mlp,
    layer_norm,
    linear,
    plain_mlp,
    residual,
    rms_norm,
    rotary,
    shared_input,
    softmax_scores,
    turned_in_pairs,
)


def _layer_norms(c: ModelConfig) -> Parts:
    return (
        layer_norm("input_layernorm", c.hidden, first=True),
        layer_norm("post_attention_layernorm", c.hidden),
        residual(c.hidden),
    )


def llama(c: ModelConfig, kind: Kind) -> Parts:
    bias = c.flag("attention_bias")
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *gated_mlp(c, bias=c.flag("mlp_bias")),
        *pre_norms(c),
    )


def mistral(c: ModelConfig, kind: Kind) -> Parts:
    return (*attention(c, kind.attention), *gated_mlp(c), *pre_norms(c))


def ministral3(c: ModelConfig, kind: Kind) -> Parts:
    """Mistral, with queries that are scaled by their position."""
    return (
        *mistral(c, kind),
        Part(forward=Traffic(2 * c.heads * c.head_dim), backward=Traffic(2 * c.heads * c.head_dim)),
    )


def cwm(c: ModelConfig, kind: Kind) -> Parts:
    return mistral(c, kind)


def ernie4_5(c: ModelConfig, kind: Kind) -> Parts:
    """Llama, with rotary positions that rotate pairs of neighbouring elements, in fp32."""
    bias, turned = c.flag("use_bias"), turned_in_pairs((c.heads + c.kv_heads) * c.head_dim)
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        turned,
        *gated_mlp(c, bias=bias),
        *pre_norms(c),
    )


def helium(c: ModelConfig, kind: Kind) -> Parts:
    bias = c.flag("attention_bias")
    if c.heads * c.head_dim != c.hidden:
        raise c.wrong(
            "head_dim",
            f"hidden_size / num_attention_heads = {c.hidden // c.heads}, since the input of the"
            " output projection has the width hidden_size",
        )
    return (
        *attention(c, kind.attention, bias=bias),
        *gated_mlp(c, bias=c.flag("mlp_bias")),
        *pre_norms(c, "wide"),
    )


def arcee(c: ModelConfig, kind: Kind) -> Parts:
    bias = c.flag("attention_bias")
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *plain_mlp(c, "up_proj", "down_proj", bias=c.flag("mlp_bias")),
        *pre_norms(c),
    )


def nemotron(c: ModelConfig, kind: Kind) -> Parts:
    """Layer norms (the weight is stored minus one) and an MLP without a gate."""
    bias = c.flag("attention_bias")
    mlp = plain_mlp(c, "up_proj", "down_proj", bias=c.flag("mlp_bias"))
    return (*attention(c, kind.attention, bias=bias, out_bias=bias), *mlp, *_layer_norms(c))


def seed_oss(c: ModelConfig, kind: Kind) -> Parts:
    out_bias = c.flag("attention_out_bias")
    return (
        *attention(c, kind.attention, bias=c.flag("attention_bias"), out_bias=out_bias),
        *gated_mlp(c, bias=c.flag("mlp_bias")),
        *pre_norms(c),
    )


def unweighted_norm(hidden: int, *, first: bool = False) -> Part:
    """Returns OLMo's layer norm without weight and bias: one kernel forward and one backward, in
    fp32. `first` says whether its input is that of the layer.
    """
    return Part(
        forward=Traffic(0, 2 * hidden, 2 * hidden),
        backward=Traffic(0, 3 * hidden, 2 * hidden),
        kept=Kept(hidden, 2 + (0 if first else hidden), hidden if first else 0),
    )


def no_norm(_name: str, size: int) -> Part:
    """Returns OLMo's final norm."""
    return unweighted_norm(size)


def olmo(c: ModelConfig, kind: Kind) -> Parts:
    bias = c.flag("attention_bias")
    norms = (unweighted_norm(c.hidden, first=True), unweighted_norm(c.hidden), residual(c.hidden))
    return (*attention(c, kind.attention, bias=bias, out_bias=bias), *gated_mlp(c), *norms)


def _norms_of_heads(c: ModelConfig, of: str, heads: int) -> Part:
    """Returns layer norms of queries (`of` is "q") or keys ("k") without bias.

    Each head has a weight of its own. A copy concatenates the heads.
    """
    size = c.head_dim
    return Part(
        tensors=tuple(
            (f"self_attn.{of}_layernorm.norms.{head}.weight", (size,)) for head in range(heads)
        ),
        forward=Traffic(4 * heads * size),
        backward=Traffic(7 * heads * size),
        kept=Kept(heads * size, 2 * heads),
    )


def stablelm(c: ModelConfig, kind: Kind) -> Parts:
    own: Parts = (
        (_norms_of_heads(c, "q", c.heads), _norms_of_heads(c, "k", c.kv_heads))
        if c.flag("qk_layernorm")
        else ()
    )
    norms: Parts = (layer_norm("input_layernorm", c.hidden, first=True), residual(c.hidden))
    norms += (
        (shared_input(c.hidden, 2),)
        if c.flag("use_parallel_residual")
        else (layer_norm("post_attention_layernorm", c.hidden),)
    )
    return (
        *attention(c, kind.attention, bias=c.flag("use_qkv_bias"), copied=True),
        *own,
        *gated_mlp(c),
        *norms,
    )


def hyperclovax(c: ModelConfig, kind: Kind) -> Parts:
    """Granite, with norms after attention and MLP if the config has them."""
    bias, after = (
        c.flag("attention_bias"),
        ("post_norm1", "post_norm2") if c.flag("use_post_norm") else (),
    )
    norms = tuple(rms_norm(name, c.hidden, projected=False) for name in after)
    scaled = Part(forward=Traffic(4 * c.hidden), backward=Traffic(4 * c.hidden))
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *gated_mlp(c, bias=c.flag("mlp_bias")),
        *pre_norms(c),
        *norms,
        scaled,
    )


def jais2(c: ModelConfig, kind: Kind) -> Parts:
    bias = c.flag("attention_bias")
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *plain_mlp(c, "up_proj", "down_proj", bias=c.flag("mlp_bias")),
        *_layer_norms(c),
    )


def exaone4(c: ModelConfig, kind: Kind) -> Parts:
    """Norms after attention and MLP only. Layers with a window have rotary positions."""
    return (
        *attention(c, kind.attention, norms="head"),
        *gated_mlp(c),
        rms_norm("post_attention_layernorm", c.hidden, projected=False),
        rms_norm("post_feedforward_layernorm", c.hidden, projected=False),
        residual(c.hidden),
        Part(kept=Kept(c.hidden)),
    )


def vaultgemma(c: ModelConfig, kind: Kind) -> Parts:
    bias, capped = c.flag("attention_bias"), bool(c.get("attn_logit_softcapping"))
    scores = softmax_scores(c.heads, capped=True) if capped else None
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias, scores=scores),
        *gated_mlp(c, act="hidden_activation"),
        rms_norm("input_layernorm", c.hidden, first=True, weight="wide"),
        rms_norm("pre_feedforward_layernorm", c.hidden, weight="wide"),
        residual(c.hidden),
    )


def hunyuan(c: ModelConfig, kind: Kind) -> Parts:
    bias, heads, kv_heads, size = c.flag("attention_bias"), c.heads, c.kv_heads, c.head_dim
    norms = tuple(
        rms_norm(f"self_attn.{name}_layernorm", size, rows=rows, projected=False)
        for name, rows in (("query", heads), ("key", kv_heads))
    )
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias),
        *norms,
        *gated_mlp(c),
        *pre_norms(c),
    )


def persimmon(c: ModelConfig, kind: Kind) -> Parts:
    """One projection for queries, keys and values, layer norms of queries and keys, and an MLP
    without a gate.
    """
    hidden, heads, size = c.hidden, c.heads, c.head_dim
    norms: Parts = ()
    if c.flag("qk_layernorm", True):  # their input is the projection, which attention saves anyway
        norms = tuple(
            layer_norm(f"self_attn.{name}_layernorm", size, rows=heads, first=True, projected=False)
            for name in "qk"
        )
    return (
        linear("self_attn.query_key_value", hidden, 3 * hidden, True),
        linear("self_attn.dense", hidden, hidden, True),
        *norms,
        rotary(2 * hidden),
        attend(c, kind.attention, copied=True, fused=True),
        *plain_mlp(c, "dense_h_to_4h", "dense_4h_to_h"),
        *_layer_norms(c),
    )


def apertus(c: ModelConfig, kind: Kind) -> Parts:
    """Llama, with norms of queries and keys, and an MLP whose activation has two parameters."""
    bias, hidden, inner = c.flag("attention_bias"), c.hidden, c.size("intermediate_size")
    if c.get("hidden_act") != "xielu":
        raise c.wrong("hidden_act", "xielu")
    # transformers writes xIELU out in 14 elementwise kernels. Autograd saves its input, three
    # results, and a mask of one byte per element.
    between = Part(
        tensors=(("mlp.act_fn.alpha_p", (1,)), ("mlp.act_fn.alpha_n", (1,))),
        forward=Traffic(38 * inner),
        backward=Traffic(60 * inner),
        kept=Kept(5 * inner, inner // 4),
        inner=inner,
        mlp=f"xielu{inner}",
    )
    return (
        *attention(c, kind.attention, bias=bias, out_bias=bias, norms="head"),
        linear("mlp.up_proj", hidden, inner),
        linear("mlp.down_proj", inner, hidden),
        between,
        rms_norm("attention_layernorm", hidden, first=True),
        rms_norm("feedforward_layernorm", hidden),
        residual(hidden),
    )


_SILU: dict[str, Any] = {"hidden_act": "silu"}

DENSE_FAMILIES: dict[str, Family] = {
    "apertus": Family(layer=apertus, defaults={"hidden_act": "xielu"}),
    "arcee": Family(layer=arcee, defaults={"hidden_act": "relu2", "num_key_value_heads": 32}),
    "cwm": Family(
        layer=cwm, attention=full_first(4),
        defaults={**_SILU, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192},
    ),
    "ernie4_5": Family(
        layer=ernie4_5,
        defaults={**_SILU, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "exaone4": Family(
        layer=exaone4, attention=pattern(4),
        defaults={**_SILU, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "helium": Family(
        layer=helium, norm=wide_norm,
        defaults={**_SILU, "num_key_value_heads": 20, "head_dim": 128},
    ),
    "hunyuan_v1_dense": Family(layer=hunyuan, defaults=_SILU),
    "hyperclovax": Family(
        layer=hyperclovax,
        defaults={**_SILU, "num_key_value_heads": 32, "use_post_norm": True},
    ),
    "internlm3": Family(layer=llama, defaults={**_SILU, "num_key_value_heads": 2, "head_dim": 128}),
    "iquestcoder": Family(
        layer=llama,
        defaults={**_SILU, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "jais2": Family(
        layer=jais2, norm=layer_norm,
        defaults={
            "hidden_act": "relu2", "num_key_value_heads": 26, "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "ministral": Family(
        layer=mistral, attention=listed(SLIDING),
        defaults={**_SILU, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "ministral3": Family(
        layer=ministral3, attention=one_window,
        defaults={**_SILU, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "nemotron": Family(layer=nemotron, norm=layer_norm, defaults={"hidden_act": "relu2"}),
    "olmo": Family(layer=olmo, norm=no_norm, defaults=_SILU),
    "persimmon": Family(
        layer=persimmon, norm=layer_norm, norm_name="final_layernorm",
        defaults={"hidden_act": "relu2"},
    ),
    "seed_oss": Family(
        layer=seed_oss,
        defaults={
            **_SILU, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
            "attention_dropout": 0.1, "residual_dropout": 0.1,
        },
    ),
    "stablelm": Family(
        layer=stablelm, norm=layer_norm,
        defaults={**_SILU, "num_key_value_heads": 32},
    ),
    "vaultgemma": Family(
        layer=vaultgemma, attention=pattern(2), norm=wide_norm,
        defaults={
            "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
            "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
        },
    ),
}  # fmt: skip
