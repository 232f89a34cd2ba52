"""Families with a table of learned positions, which are added to the embedding, such as GPT-2."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.attention import attend
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.family import Family, Parts
from megatrain.simulator.model.families.kinds import Kind
from megatrain.simulator.model.families.part import Part, Tensors, Traffic
from megatrain.simulator.model.families.parts import (
    activation,
    hidden_of_mlp,
    layer_norm,
    linear,
    plain_mlp,
    residual,
)


def _transposed(name: str, source: int, target: int) -> Part:
    """Returns a projection with a bias. The weight is stored as [in, out], as in GPT-2."""
    tensors: Tensors = ((f"{name}.weight", (source, target)), (f"{name}.bias", (target,)))
    return Part(tensors=tensors, active=source * target, backward=Traffic(low=target))


def _inner(c: ModelConfig) -> int:
    """Returns the width between the projections of the MLP."""
    return c.count("n_inner", 0) or 4 * c.hidden


def gpt2(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of GPT-2."""
    hidden, inner = c.hidden, _inner(c)
    for key in (
        "add_cross_attention",
        "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn",
    ):
        if c.flag(key):
            raise c.wrong(key, "false")
    return (
        layer_norm("ln_1", hidden, first=True),
        _transposed("attn.c_attn", hidden, 3 * hidden),
        _transposed("attn.c_proj", hidden, hidden),
        layer_norm("ln_2", hidden),
        _transposed("mlp.c_fc", hidden, inner),
        _transposed("mlp.c_proj", inner, hidden),
        activation(c, inner, "activation_function"),
        hidden_of_mlp(c, inner, "activation_function", biased=True),
        attend(c, kind.attention, fused=True),
        residual(hidden),
    )


def gpt_bigcode(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of GPTBigCode: GPT-2 with one key-value head for all query heads."""
    hidden = c.hidden
    if c.flag("add_cross_attention") or not c.flag("multi_query"):
        raise c.wrong("multi_query", "true, without cross-attention")
    return (
        layer_norm("ln_1", hidden, first=True),
        linear("attn.c_attn", hidden, hidden + 2 * c.head_dim, True),
        linear("attn.c_proj", hidden, hidden, True),
        layer_norm("ln_2", hidden),
        *plain_mlp(c, "mlp.c_fc", "mlp.c_proj", inner=_inner(c), act="activation_function"),
        attend(c, kind.attention, kv_heads=1, fused=True),
        residual(hidden),
    )


def _opt_layer(c: ModelConfig, inner: int, act: str, attended: Part) -> Parts:
    """Returns a layer of OPT.

    Args:
        c: The config.
        inner: The width between the projections of the MLP.
        act: The key of the activation.
        attended: Attention without its projections.
    """
    names = ("k", "v", "q", "out")
    return (
        *(linear(f"self_attn.{name}_proj", c.hidden, c.hidden, True) for name in names),
        layer_norm("self_attn_layer_norm", c.hidden, first=True),
        *plain_mlp(c, "fc1", "fc2", inner=inner, act=act),
        layer_norm("final_layer_norm", c.hidden),
        attended,
        residual(c.hidden),
    )


def opt(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of OPT."""
    hidden = c.hidden
    if c.size("word_embed_proj_dim", hidden) != hidden:
        raise c.wrong(
            "word_embed_proj_dim",
            f"hidden_size = {hidden}, since a projected embedding is not predicted",
        )
    for key in ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine"):
        if not c.flag(key, True):
            raise c.wrong(key, "true")
    if c.flag("_remove_final_layer_norm"):
        raise c.wrong("_remove_final_layer_norm", "false")
    attended = attend(c, kind.attention, copied=True)
    return _opt_layer(c, c.size("ffn_dim"), "activation_function", attended)


def biogpt(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of BioGPT: OPT with another activation."""
    return _opt_layer(c, c.size("intermediate_size"), "hidden_act", attend(c, kind.attention))


def _table(name: str, key: str, offset: int = 0) -> Any:
    """Returns a function for `Family.positions`. The table has as many rows as the config says
    under `key`, and `offset` more.
    """
    return lambda c: ((f"{name}.weight", (c.size(key) + offset, c.hidden)),)


_NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT2: dict[str, Any] = {
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "tie_word_embeddings": True,
    "resid_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "attn_pdrop": 0.1,
}

GPT_FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        layer=gpt2, norm=layer_norm, norm_name="ln_f", embedding="wte",
        positions=_table("wpe", "n_positions"), names=_NAMES,
        defaults={**_GPT2, "activation_function": "gelu_new"},
    ),
    "gpt_bigcode": Family(
        layer=gpt_bigcode, norm=layer_norm, norm_name="ln_f", embedding="wte",
        positions=_table("wpe", "n_positions"), names=_NAMES,
        defaults={**_GPT2, "activation_function": "gelu_pytorch_tanh", "multi_query": True},
    ),
    "biogpt": Family(
        layer=biogpt, head="output_projection", unused_positions=2, norm=layer_norm,
        norm_name="layer_norm", positions=_table("embed_positions", "max_position_embeddings", 2),
        defaults={
            "hidden_act": "gelu", "max_position_embeddings": 1024, "tie_word_embeddings": True,
            "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        },
    ),
    "opt": Family(
        layer=opt, unused_positions=2, norm=layer_norm, norm_name="final_layer_norm",
        positions=_table("embed_positions", "max_position_embeddings", 2),
        defaults={
            "activation_function": "relu", "ffn_dim": 3072, "max_position_embeddings": 2048,
            "tie_word_embeddings": True, "dropout": 0.1,
        },
    ),
}  # fmt: skip
"""`model_type` -> family."""
