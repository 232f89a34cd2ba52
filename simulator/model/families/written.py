"""Older families, whose attention scores transformers writes out in some or all models."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.attention import attend, softmax_scores
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.family import Family, Parts, bare_layer_norm
from megatrain.simulator.model.families.kinds import Kind
from megatrain.simulator.model.families.part import Compiled, Kept, Part, Traffic
from megatrain.simulator.model.families.parts import (
    interleaved,
    last_product,
    layer_norm,
    linear,
    plain_mlp,
    residual,
    rotary,
    shared_input,
)

_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}


def gptj(c: ModelConfig, kind: Kind, *, fused: bool = False) -> Parts:
    """Returns a layer of GPT-J: one norm, after which attention and MLP run in parallel.

    Rotary positions are interleaved. Queries and keys are multiplied in fp32. With `fused`, one
    projection computes queries, keys and values.
    """
    hidden, inner = c.hidden, c.count("n_inner", 0) or 4 * c.hidden
    rotated = c.size("rotary_dim", c.head_dim, most=c.head_dim)
    names = (
        (("qkv_proj", 3 * hidden), ("out_proj", hidden))
        if fused
        else (("k_proj", hidden), ("v_proj", hidden), ("q_proj", hidden), ("out_proj", hidden))
    )
    return (
        layer_norm("ln_1", hidden, first=True),
        *(linear(f"attn.{name}", hidden, size) for name, size in names),
        *plain_mlp(c, "mlp.fc_in", "mlp.fc_out", inner=inner, act="activation_function"),
        rotary(2 * c.heads * rotated),
        interleaved(2 * c.heads * rotated),
        attend(c, kind.attention, kv_heads=c.heads, scores=softmax_scores(c, wide=True)),
        Part(kept=Kept(4 * rotated, 0, hidden), compiled=Compiled(Kept(0, 0, hidden))),
        shared_input(hidden, 2 if fused else 4),
        Part(parallel=True),
        residual(hidden),
    )


def codegen(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of CodeGen: GPT-J with one projection for queries, keys and values."""
    if c.heads % 4:
        raise c.wrong("n_head", "a multiple of 4")
    return gptj(c, kind, fused=True)


def mpt(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of MPT, without biases. Each head has a slope, and the slope times the
    position is added to the scores.
    """
    hidden, table = c.hidden, c.get("attn_config") or {}
    if not isinstance(table, dict):
        raise c.wrong("attn_config", "an object")
    for key, wanted in (
        ("attn_pdrop", 0),
        ("qk_ln", False),
        ("prefix_lm", False),
        ("alibi", True),
        ("attn_type", "multihead_attention"),
    ):
        if table.get(key, wanted) != wanted:
            raise c.wrong("attn_config", f"{key} = {wanted!r}")
    clipped = (
        Part(forward=Traffic(6 * hidden), backward=Traffic(9 * hidden), kept=Kept(3 * hidden))
        if table.get("clip_qkv")
        else Part()
    )
    between = Part(
        forward=Traffic(8 * hidden),
        backward=Traffic(12 * hidden),
        kept=Kept(8 * hidden),
        compiled=Compiled(Kept(8 * hidden), (), Kept(8 * hidden), longer=hidden),
        freed=Kept(8 * hidden),
        early=(Kept(3 * 4 * hidden),),
        gradients=(4 * hidden,),
        last=last_product("ffn.down_proj", 4 * hidden, hidden),
        down=4 * hidden * hidden,
        projections=8 * hidden * hidden,
        inner=4 * hidden,
        mlp=str(4 * hidden),
    )
    return (
        bare_layer_norm("norm_1", hidden, first=True),
        linear("attn.Wqkv", hidden, 3 * hidden),
        linear("attn.out_proj", hidden, hidden),
        bare_layer_norm("norm_2", hidden),
        linear("ffn.up_proj", hidden, 4 * hidden),
        linear("ffn.down_proj", 4 * hidden, hidden),
        between,
        clipped,
        attend(c, kind.attention, kv_heads=c.heads, scores=softmax_scores(c)),
        residual(hidden),
    )


def falcon(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of Falcon, with one projection for queries, keys and values.

    If one key-value head is shared by all query heads, no fused kernel is used, and PyTorch writes
    out the scores.
    """
    hidden, heads, size, bias = c.hidden, c.heads, c.head_dim, c.flag("bias")
    groups, several, parallel = (
        c.flag("new_decoder_architecture"),
        not c.flag("multi_query", True),
        c.flag("parallel_attn", True),
    )
    if c.flag("alibi"):
        raise c.wrong("alibi", "false, with rotary positions")
    if c.flag("output_attentions"):
        # With it, transformers adds its boolean mask to the scores, which hides no later tokens.
        raise c.wrong("output_attentions", "false")
    kv_heads = c.size("num_kv_heads", heads) if groups else (heads if several else 1)
    if heads % kv_heads:
        raise c.wrong("num_kv_heads", f"a divisor of the {heads} attention heads")
    norms = ("input_layernorm",) if parallel else ("post_attention_layernorm", "input_layernorm")
    if parallel and (
        c.get("num_ln_in_parallel_attn") == 2
        or (groups and c.get("num_ln_in_parallel_attn") is None)
    ):
        norms = ("ln_attn", "ln_mlp")
    inner = c.count("ffn_hidden_size", 0) or 4 * hidden
    scores = None if groups or several else softmax_scores(c)
    return (
        linear("self_attention.query_key_value", hidden, (heads + 2 * kv_heads) * size, bias),
        linear("self_attention.dense", hidden, hidden, bias),
        *plain_mlp(
            c, "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", inner=inner, act="activation", bias=bias
        ),
        *(layer_norm(name, hidden, first=parallel or name == "input_layernorm") for name in norms),
        rotary((heads + kv_heads) * size),
        attend(c, kind.attention, kv_heads=heads, copied=True, scores=scores),
        Part(kept=Kept(hidden if scores is None else 0)),
        shared_input(hidden, 3 - len(norms)),
        Part(parallel=parallel),
        residual(hidden),
    )


_GPTJ: dict[str, Any] = {
    "n_embd": 4096,
    "n_layer": 28,
    "n_head": 16,
    "n_positions": 2048,
    "vocab_size": 50400,
    "rotary_dim": 64,
    "activation_function": "gelu_new",
}

WRITTEN_FAMILIES: dict[str, Family] = {
    "codegen": Family(
        layer=codegen, norm=layer_norm, norm_name="ln_f", embedding="wte", head_bias=True,
        names=_NAMES, longest="n_positions", defaults=_GPTJ,
    ),
    "falcon": Family(
        layer=falcon, norm=layer_norm, norm_name="ln_f", embedding="word_embeddings",
        defaults={"activation": "gelu", "tie_word_embeddings": True, "num_attention_heads": 71},
    ),
    "gptj": Family(
        layer=gptj, norm=layer_norm, norm_name="ln_f", embedding="wte", head_bias=True,
        names=_NAMES, longest="n_positions", defaults=_GPTJ,
    ),
    "mpt": Family(
        layer=mpt, norm=bare_layer_norm, norm_name="norm_f",
        embedding="wte", longest="max_seq_len",
        names={
            "hidden_size": "d_model", "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
        },
        defaults={
            "d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
"""`model_type` -> family."""
