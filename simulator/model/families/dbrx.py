"""DBRX, whose config.json has the sizes of attention and experts in tables of their own."""

from __future__ import annotations

from typing import Any

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.experts import experts, router
from megatrain.simulator.model.families.family import Family, Parts, bare_layer_norm
from megatrain.simulator.model.families.kinds import Kind, every_layer
from megatrain.simulator.model.families.parts import (
    Kept,
    Part,
    Traffic,
    attend,
    linear,
    residual,
    rotary,
    shared_input,
)

_ATTENTION, _EXPERTS = "attn_config", "ffn_config"
_THETA = 10_000.0
_NORMALIZE = "moe_normalize_expert_weights"
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


def dbrx_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the config as it is. Raises UserError for a null that would mean a default later."""
    own = config.get(_EXPERTS)
    if isinstance(own, dict) and own.get(_NORMALIZE, 1) is None:
        raise UserError(
            f"{where}: {_EXPERTS}",
            found=f"{_NORMALIZE} = null",
            allowed="a number",
            fix="use a model that normalises the weights of experts",
        )
    return config


def _table(c: ModelConfig, key: str, defaults: dict[str, Any]) -> ModelConfig:
    """Returns the table under `key` as a config of its own."""
    found = c.get(key)
    if found is not None and not isinstance(found, dict):
        raise c.wrong(key, "an object")
    return ModelConfig(found or {}, f"{c.where}: {key}", defaults)


def _heads(c: ModelConfig) -> int:
    """Returns the number of key-value heads.

    transformers 5.23 requires a `rope_theta` in the table and does not use it. A published DBRX has
    its only one there, and would be trained with positions that it was not made with.
    """
    table = _table(c, _ATTENTION, {"kv_n_heads": 1, "attn_pdrop": 0.0})
    if table.get("attn_pdrop"):
        raise table.wrong("attn_pdrop", "0")
    rope = c.get("rope_parameters")
    turned = rope.get("rope_theta") if isinstance(rope, dict) else None
    used = c.get("rope_theta", _THETA) if turned is None else turned
    if table.get("rope_theta") != used:
        raise table.wrong(
            "rope_theta",
            f"the rope_theta outside of {_ATTENTION}, {used}, which transformers uses instead",
        )
    clip = table.get("clip_qkv")
    if type(clip) not in (int, float) or clip <= 0:
        raise table.wrong("clip_qkv", "a number above 0, without which transformers fails")
    pairs = table.size("kv_n_heads")
    if c.heads % pairs:
        raise table.wrong("kv_n_heads", f"a divisor of the {c.heads} attention heads")
    return pairs


def _mixture(c: ModelConfig) -> Parts:
    """Returns the router and its experts, whose gate and up are projections of their own."""
    table = _table(c, _EXPERTS, {"ffn_hidden_size": 3584, "moe_num_experts": 4, "moe_top_k": 1})
    count, chosen = table.size("moe_num_experts", most=2**16), table.size("moe_top_k")
    hidden, inner = c.hidden, table.size("ffn_hidden_size")
    if chosen > count:
        raise table.wrong("moe_top_k", f"at most the {count} experts")
    if table.get("moe_jitter_eps"):
        raise table.wrong("moe_jitter_eps", "0, since a recompute would draw other numbers")
    act = table.get("ffn_act_fn") or {}
    if not isinstance(act, dict) or act.get("name", "silu") not in _ACTIVATIONS:
        raise table.wrong("ffn_act_fn", f"a name of {', '.join(_ACTIVATIONS)}")
    made = experts("", hidden, inner, count, chosen)
    costs = {field: getattr(made, field) for field in made.__struct_fields__ if field != "tensors"}
    names = (f"ffn.experts.mlp.{name}" for name in ("w1", "v1", "w2"))
    return (
        router("ffn.router.layer", hidden, count),
        Part(tensors=tuple((name, (count * inner, hidden)) for name in names), **costs),
    )


def dbrx(c: ModelConfig, kind: Kind) -> Parts:
    """One projection makes queries, keys and values, which are clipped."""
    hidden, heads, pairs, size = c.hidden, c.heads, _heads(c), c.head_dim
    if size * heads != hidden:
        raise c.wrong("n_heads", f"a divisor of d_model = {hidden}")
    if c.flag("tie_word_embeddings"):
        raise c.wrong("tie_word_embeddings", "false")
    if c.flag("output_router_logits"):
        raise c.wrong("output_router_logits", "false, since the routers' loss is not trained")
    wide = (heads + 2 * pairs) * size
    return (
        bare_layer_norm("norm_attn_norm.norm_1", hidden, first=True),
        linear("norm_attn_norm.attn.Wqkv", hidden, wide),
        linear("norm_attn_norm.attn.out_proj", hidden, hidden),
        bare_layer_norm("norm_attn_norm.norm_2", hidden),
        *_mixture(c),
        rotary((heads + pairs) * size),
        attend(c, kind.attention, query=size, kv_heads=pairs),
        Part(forward=Traffic(2 * wide), backward=Traffic(3 * wide), kept=Kept(2 * wide)),
        shared_input(hidden, 2),
        residual(hidden),
    )


DBRX_FAMILIES: dict[str, Family] = {
    "dbrx": Family(
        layer=dbrx, mlp=every_layer, published=dbrx_config, embedding="wte", norm=bare_layer_norm,
        norm_name="norm_f",
        names={"hidden_size": "d_model", "num_hidden_layers": "n_layers",
               "num_attention_heads": "n_heads"},
        defaults={"d_model": 2048, "n_layers": 24, "n_heads": 16, "vocab_size": 32000},
    ),
}  # fmt: skip
