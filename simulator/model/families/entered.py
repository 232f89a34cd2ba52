"""Families with a norm between the embedding and the first decoder layer: BLOOM and NanoChat.

The norm is counted in the first layer and recomputed with it. So the embedding is only a lookup,
whose backward pass needs no weights.
"""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.attention import attend, attention, softmax_scores
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.family import Family, Parts
from megatrain.simulator.model.families.gemma4 import unweighted
from megatrain.simulator.model.families.kinds import Kind
from megatrain.simulator.model.families.part import Kept, Part, Traffic
from megatrain.simulator.model.families.parts import (
    last_product,
    layer_norm,
    linear,
    plain_mlp,
    residual,
)

_BLOOM_NORM = "word_embeddings_layernorm"


def bloom(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of BLOOM.

    Each head has a slope. The slope times the position is added to the scores. The GELU is an
    autograd function that saves only its input.
    """
    hidden, inner = c.hidden, 4 * c.hidden
    if hidden % c.heads:
        raise c.wrong("n_head", f"a divisor of hidden_size = {hidden}")
    if c.size("pretraining_tp", 1) > 1 and c.flag("slow_but_exact"):
        raise c.wrong("slow_but_exact", "false, since sliced matrix products are not predicted")
    gelu = Part(
        forward=Traffic(21 * inner),
        backward=Traffic(45 * inner),
        kept=Kept(2 * inner),
        freed=Kept(2 * inner),
        early=(Kept(6 * inner),),
        last=last_product("mlp.dense_4h_to_h", inner, hidden),
        down=inner * hidden,
        projections=2 * inner * hidden,
        inner=inner,
        mlp=str(inner),
    )
    return (
        *((layer_norm(_BLOOM_NORM, hidden, first=True),) if kind.entered else ()),
        layer_norm("input_layernorm", hidden, first=True),
        linear("self_attention.query_key_value", hidden, 3 * hidden, True),
        linear("self_attention.dense", hidden, hidden, True),
        layer_norm("post_attention_layernorm", hidden),
        linear("mlp.dense_h_to_4h", hidden, inner, True),
        linear("mlp.dense_4h_to_h", inner, hidden, True),
        gelu,
        attend(c, kind.attention, kv_heads=c.heads, scores=softmax_scores(c)),
        residual(hidden),
    )


def nanochat(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of NanoChat. Its norms have no weights. Queries and keys have norms after
    their rotary positions.
    """
    hidden, size = c.hidden, c.head_dim
    return (
        *attention(c, kind.attention, bias="attention_bias"),
        unweighted(size, c.heads),
        unweighted(size, c.kv_heads),
        *plain_mlp(c, "mlp.fc1", "mlp.fc2", bias=False),
        *((unweighted(hidden, first=True),) if kind.entered else ()),
        unweighted(hidden, first=not kind.entered),
        unweighted(hidden),
        Part(kept=Kept(2 * hidden)),
        residual(hidden),
    )


def _final_norm(_name: str, size: int) -> Part:
    """Returns NanoChat's final norm, which has no weight and therefore no name."""
    return unweighted(size)


_BLOOM: dict[str, Any] = {
    "n_embed": 64,
    "n_layer": 2,
    "n_head": 8,
    "vocab_size": 250_880,
    "tie_word_embeddings": True,
}

ENTERED_FAMILIES: dict[str, Family] = {
    "bloom": Family(
        layer=bloom, embedding_norm=_BLOOM_NORM, norm=layer_norm, norm_name="ln_f",
        embedding="word_embeddings", defaults=_BLOOM,
        names={
            "hidden_size": "n_embed", "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
        },
    ),
    "nanochat": Family(
        layer=nanochat, embedding_norm="norm", norm=_final_norm,
        defaults={"hidden_act": "relu2", "final_logit_softcapping": 15.0},
    ),
}  # fmt: skip
"""`model_type` -> family."""
