"""Families with a dense MLP, which differ from Llama in norms, biases, activation or window."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.attention import attend, attention, capped_scores
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.family import (
    Family,
    Parts,
    attends,
    gated,
    heads_of_hidden_size,
    interleaved_rotary,
    layer_norms,
    output_norms,
    plain,
    post_norms,
    pre_norms,
    query_key_norms,
    scaled_residuals,
    stacked,
    wide_norm,
)
from megatrain.simulator.model.families.kinds import (
    SLIDING,
    Kind,
    full_first,
    listed,
    one_window,
    pattern,
)
from megatrain.simulator.model.families.part import Compiled, Kept, Part, Traffic
from megatrain.simulator.model.families.parts import (
    gated_mlp,
    last_product,
    layer_norm,
    linear,
    plain_mlp,
    residual,
    rotary,
    shared_input,
)

LLAMA = stacked(attends(bias="attention_bias"), gated(bias="mlp_bias"), pre_norms())
"""The layers of Llama."""
MISTRAL = stacked(attends(), gated(), pre_norms())
"""The layers of Mistral."""


def scaled_queries(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the product that scales queries by their position."""
    elements = 2 * c.heads * c.head_dim
    return (Part(forward=Traffic(elements), backward=Traffic(elements)),)


def unweighted_norm(hidden: int, *, first: bool = False) -> Part:
    """Returns OLMo's layer norm, without weight and bias, in fp32. It is one kernel forward and one
    backward. `first` says whether its input is the layer's input.
    """
    return Part(
        forward=Traffic(0, 2 * hidden, 2 * hidden),
        backward=Traffic(0, 3 * hidden, 2 * hidden),
        kept=Kept(hidden, 2 + (0 if first else hidden), hidden if first else 0),
        compiled=Compiled(Kept(hidden * (1 if first else 2), 2)),
    )


def no_norm(_name: str, size: int) -> Part:
    """Returns OLMo's final norm, which has no parameters and therefore no name."""
    return unweighted_norm(size)


def _olmo_norms(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns OLMo's norms before attention and before the MLP, and two residual sums."""
    return (unweighted_norm(c.hidden, first=True), unweighted_norm(c.hidden), residual(c.hidden))


def _norms_of_heads(c: ModelConfig, name: str, heads: int) -> Part:
    """Returns layer norms without bias of queries (`name` is "q") or keys ("k").

    Each head has its own weight. A copy concatenates the heads.
    """
    size = c.head_dim
    return Part(
        tensors=tuple(
            (f"self_attn.{name}_layernorm.norms.{head}.weight", (size,)) for head in range(heads)
        ),
        forward=Traffic(4 * heads * size),
        backward=Traffic(7 * heads * size),
        kept=Kept(heads * size, 2 * heads),
    )


def stablelm(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of StableLM, in which attention and MLP may run in parallel."""
    heads = (("q", c.heads), ("k", c.kv_heads)) if c.flag("qk_layernorm") else ()
    second = (
        shared_input(c.hidden, 2)
        if c.flag("use_parallel_residual")
        else layer_norm("post_attention_layernorm", c.hidden)
    )
    return (
        *attention(c, kind.attention, bias="use_qkv_bias", out_bias=False, copied=True),
        *(_norms_of_heads(c, name, count) for name, count in heads),
        *gated_mlp(c),
        layer_norm("input_layernorm", c.hidden, first=True),
        second,
        Part(parallel=c.flag("use_parallel_residual")),
        residual(c.hidden),
    )


def persimmon(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of Persimmon: one projection for queries, keys and values, layer norms of
    queries and keys, and an MLP without a gate.
    """
    hidden, heads, size = c.hidden, c.heads, c.head_dim
    # The input of these norms is the projection, which attention saves anyway.
    norms = tuple(
        layer_norm(f"self_attn.{name}_layernorm", size, rows=heads, first=True, projected=False)
        for name in ("qk" if c.flag("qk_layernorm", True) else "")
    )
    return (
        linear("self_attn.query_key_value", hidden, 3 * hidden, True),
        linear("self_attn.dense", hidden, hidden, True),
        *norms,
        rotary(2 * hidden),
        attend(c, kind.attention, copied=True, fused=True),
        *plain_mlp(c, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        *layer_norms(c, kind),
    )


def xielu_mlp(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the MLP of Apertus, whose activation has two parameters."""
    hidden, inner = c.hidden, c.size("intermediate_size")
    if c.get("hidden_act") != "xielu":
        raise c.wrong("hidden_act", "xielu")
    # In transformers, xIELU is 14 elementwise kernels. Autograd saves its input, three results, and
    # a mask of one byte per element.
    between = Part(
        tensors=(("mlp.act_fn.alpha_p", (1,)), ("mlp.act_fn.alpha_n", (1,))),
        forward=Traffic(38 * inner),
        backward=Traffic(60 * inner),
        kept=Kept(5 * inner, inner // 4),
        freed=Kept(5 * inner, inner // 4),
        early=(Kept(4 * inner),),
        last=last_product("mlp.down_proj", inner, hidden),
        down=inner * hidden,
        projections=2 * inner * hidden,
        inner=inner,
        mlp=f"xielu{inner}",
    )
    return (linear("mlp.up_proj", hidden, inner), linear("mlp.down_proj", inner, hidden), between)


_NEMOTRON = stacked(
    attends(bias="attention_bias"), plain("up_proj", "down_proj", "mlp_bias"), layer_norms
)


def _copied_output(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the copy of attention's output that a compiled layer saves.

    Only a part of each query and key is rotated, and then the parts are concatenated. The output of
    attention has the layout of the result, and is copied into the layout of the projection.
    """
    return (Part(compiled=Compiled(Kept(c.heads * c.head_dim))),)


_SILU: dict[str, Any] = {"hidden_act": "silu"}

DENSE_FAMILIES: dict[str, Family] = {
    "apertus": Family(
        layer=stacked(
            attends(bias="attention_bias", norms="head"),
            xielu_mlp,
            pre_norms(names=("attention_layernorm", "feedforward_layernorm")),
        ),
        defaults={"hidden_act": "xielu"},
    ),
    "arcee": Family(
        layer=stacked(
            attends(bias="attention_bias"), plain("up_proj", "down_proj", "mlp_bias"), pre_norms()
        ),
        defaults={"hidden_act": "relu2", "num_key_value_heads": 32},
    ),
    "cwm": Family(
        layer=MISTRAL, attention=full_first(4),
        defaults={**_SILU, "num_key_value_heads": 8, "head_dim": 128, "sliding_window": 8192},
    ),
    "ernie4_5": Family(
        layer=stacked(
            attends(bias="use_bias"), interleaved_rotary, gated(bias="use_bias"), pre_norms()
        ),
        defaults={**_SILU, "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True},
    ),
    "exaone4": Family(
        # Norms after attention and MLP only. Layers with a window have rotary positions.
        layer=stacked(attends(norms="head"), gated(), post_norms()), attention=pattern(4),
        defaults={**_SILU, "num_key_value_heads": 32, "sliding_window": 4096},
    ),
    "helium": Family(
        layer=stacked(
            heads_of_hidden_size("the input of the output projection"),
            attends(bias="attention_bias", out_bias=False),
            gated(bias="mlp_bias"),
            pre_norms("wide"),
        ),
        norm=wide_norm,
        defaults={**_SILU, "num_key_value_heads": 20, "head_dim": 128},
    ),
    "hunyuan_v1_dense": Family(
        layer=stacked(attends(bias="attention_bias"), query_key_norms, gated(), pre_norms()),
        defaults=_SILU,
    ),
    "hyperclovax": Family(
        layer=stacked(
            LLAMA,
            output_norms("post_norm1", "post_norm2", wanted="use_post_norm"),
            scaled_residuals,
        ),
        scales_logits=True,
        defaults={**_SILU, "num_key_value_heads": 32, "use_post_norm": True},
    ),
    "internlm3": Family(layer=LLAMA, defaults={**_SILU, "num_key_value_heads": 2, "head_dim": 128}),
    "iquestcoder": Family(
        layer=LLAMA,
        defaults={**_SILU, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "jais2": Family(
        layer=_NEMOTRON, norm=layer_norm,
        defaults={
            "hidden_act": "relu2", "num_key_value_heads": 26, "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "ministral": Family(
        layer=MISTRAL, attention=listed(SLIDING),
        defaults={**_SILU, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "ministral3": Family(
        layer=stacked(MISTRAL, scaled_queries), attention=one_window,
        defaults={**_SILU, "num_key_value_heads": 8, "head_dim": 128},
    ),
    "nemotron": Family(
        layer=stacked(_NEMOTRON, _copied_output), norm=layer_norm, defaults={"hidden_act": "relu2"}
    ),
    "olmo": Family(
        layer=stacked(attends(bias="attention_bias"), gated(), _olmo_norms), norm=no_norm,
        defaults=_SILU,
    ),
    "persimmon": Family(
        layer=persimmon, norm=layer_norm, norm_name="final_layernorm",
        defaults={"hidden_act": "relu2"},
    ),
    "seed_oss": Family(
        layer=stacked(
            attends(bias="attention_bias", out_bias="attention_out_bias"),
            gated(bias="mlp_bias"),
            pre_norms(),
        ),
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
        layer=stacked(
            attends(bias="attention_bias", scores=capped_scores),
            gated(act="hidden_activation"),
            pre_norms("wide", ("input_layernorm", "pre_feedforward_layernorm")),
        ),
        attention=pattern(2), norm=wide_norm,
        defaults={
            "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
            "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        },
    ),
}  # fmt: skip
"""`model_type` -> family."""
