"""DBRX, whose config.json has the sizes of attention and of experts in two nested tables."""

from __future__ import annotations

from typing import Any

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families.attention import attend
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.experts import experts, router
from megatrain.simulator.model.families.family import Family, Parts, bare_layer_norm
from megatrain.simulator.model.families.kinds import Kind, every_layer
from megatrain.simulator.model.families.part import Kept, Part, Traffic, placed
from megatrain.simulator.model.families.parts import linear, residual, rotary, shared_input

_ATTENTION, _EXPERTS = "attn_config", "ffn_config"
_THETA = 10_000.0
_NORMALIZE = "moe_normalize_expert_weights"
_ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


def dbrx_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns the config unchanged. Raises UserError for a null that would be lost when the config
    is stored, and would then mean a default.
    """
    table = config.get(_EXPERTS)
    if isinstance(table, dict) and table.get(_NORMALIZE, 1) is None:
        raise UserError(
            f"{where}: {_EXPERTS}",
            found=f"{_NORMALIZE} = null",
            allowed="a number",
            fix="use a model that normalises the weights of experts",
        )
    return config


def _table(c: ModelConfig, key: str, defaults: dict[str, Any]) -> ModelConfig:
    """Returns the nested table under `key` as a config."""
    table = c.get(key)
    if table is not None and not isinstance(table, dict):
        raise c.wrong(key, "an object")
    return ModelConfig(table or {}, f"{c.where}: {key}", defaults)


def _kv_heads(c: ModelConfig) -> int:
    """Returns the number of key-value heads, after checks of the attention table.

    transformers 5.23 requires a `rope_theta` in this table, but uses another one. A published DBRX
    has its only `rope_theta` in this table, so it would be trained with wrong positions. Raises
    UserError for such a config.
    """
    table = _table(c, _ATTENTION, {"kv_n_heads": 1, "attn_pdrop": 0.0})
    if table.get("attn_pdrop"):
        raise table.wrong("attn_pdrop", "0")
    rope = c.get("rope_parameters")
    theta = rope.get("rope_theta") if isinstance(rope, dict) else None
    used = c.get("rope_theta", _THETA) if theta is None else theta
    if table.get("rope_theta") != used:
        raise table.wrong(
            "rope_theta",
            f"the rope_theta outside of {_ATTENTION}, {used}, which transformers uses instead",
        )
    clip = table.get("clip_qkv")
    if type(clip) not in (int, float) or clip <= 0:
        raise table.wrong("clip_qkv", "a number above 0, without which transformers fails")
    kv_heads = table.size("kv_n_heads")
    if c.heads % kv_heads:
        raise table.wrong("kv_n_heads", f"a divisor of the {c.heads} attention heads")
    return kv_heads


def _mixture(c: ModelConfig) -> Parts:
    """Returns the router and its experts, in which gate and up are separate projections."""
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
    names = (f"ffn.experts.mlp.{name}" for name in ("w1", "v1", "w2"))
    tensors = tuple((name, (count * inner, hidden)) for name in names)
    return placed(
        "mlp",
        router("ffn.router.layer", hidden, count),
        msgspec.structs.replace(experts("", hidden, inner, count, chosen), tensors=tensors),
    )


def dbrx(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of DBRX. One projection computes queries, keys and values, which are clipped
    to a range.
    """
    hidden, heads, kv_heads, size = c.hidden, c.heads, _kv_heads(c), c.head_dim
    if size * heads != hidden:
        raise c.wrong("head_dim", f"d_model = {hidden} divided by the {heads} attention heads")
    if c.flag("tie_word_embeddings"):
        raise c.wrong("tie_word_embeddings", "false")
    if c.flag("output_router_logits"):
        raise c.wrong("output_router_logits", "false, since the routers' loss is not trained")
    projected = (heads + 2 * kv_heads) * size
    return (
        bare_layer_norm("norm_attn_norm.norm_1", hidden, first=True),
        linear("norm_attn_norm.attn.Wqkv", hidden, projected),
        linear("norm_attn_norm.attn.out_proj", hidden, hidden),
        bare_layer_norm("norm_attn_norm.norm_2", hidden),
        *_mixture(c),
        rotary((heads + kv_heads) * size),
        attend(c, kind.attention, query=size, kv_heads=kv_heads),
        Part(
            forward=Traffic(2 * projected),
            backward=Traffic(3 * projected),
            kept=Kept(2 * projected),
        ),
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
"""`model_type` -> family."""
