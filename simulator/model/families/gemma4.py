"""The Gemma 4 language models that are a plain stack of decoder layers: 31B and 26B-A4B.

The small models (E2B, E4B) are refused. Each of their layers also reads rows of a second embedding
table, and their last layers attend to keys and values of an earlier layer.
"""

from __future__ import annotations

from typing import Any

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.families.attention import attend
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.experts import experts
from megatrain.simulator.model.families.family import Parts, pre_and_post_norms
from megatrain.simulator.model.families.kinds import FULL, SLIDING, Kind
from megatrain.simulator.model.families.part import Compiled, Kept, Part, Traffic
from megatrain.simulator.model.families.parts import (
    gated_mlp,
    linear,
    residual,
    rms_norm,
    rotary,
    shared_input,
)

_PER_LAYER = "per_layer_config"
GEMMA4_DEFAULTS: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "vocab_size": 262_144,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
"""The defaults of Gemma 4."""


def gemma4_kinds(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or full attention in every sixth layer. The last layer always has full
    attention.
    """
    kinds = c.each_layer("layer_types", (FULL, SLIDING)) or [
        SLIDING if (index + 1) % 6 else FULL for index in range(c.layers)
    ]
    return [*kinds[:-1], FULL]


def gemma4_config(config: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns a config in the form in which it was published.

    transformers saves the config with the sizes of each layer with full attention instead. Raises
    UserError if these sizes differ between layers, which the published form cannot express.
    """
    if not isinstance(per_layer := config.get(_PER_LAYER), dict):
        return config
    types = config.get("layer_types")
    full = (
        {str(index) for index, kind in enumerate(types) if kind == FULL}
        if isinstance(types, list)
        else set()
    )
    first: dict[str, Any] = next(iter(per_layer.values()), {})
    heads = {"num_key_value_heads"} if config.get("attention_k_eq_v") else set()
    if (
        {str(key) for key in per_layer} not in (full, set())  # empty: the usual sizes
        or any(value != first for value in per_layer.values())
        or not first.keys() <= {"head_dim"} | heads
    ):
        raise UserError(
            f"{where}: {_PER_LAYER}",
            found=per_layer,
            allowed=(
                "the same head_dim for every full_attention layer, and with attention_k_eq_v the"
                " same num_key_value_heads"
            ),
            fix="correct config.json",
        )
    named = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    # With per_layer_config, transformers ignores the sizes of the published form.
    usual = {key: config.get(key, GEMMA4_DEFAULTS[key]) for key in ("head_dim", *heads)}
    sizes = {named[key]: value for key, value in {**usual, **first}.items()}
    return {**{key: value for key, value in config.items() if key != _PER_LAYER}, **sizes}


def unweighted(size: int, rows: int = 1, *, first: bool = False) -> Part:
    """Returns an RMS norm in fp32 without a weight, for `rows` rows of `size` elements per token.

    `first` says that another part saves the input in the compute dtype.
    """
    elements = rows * size
    return Part(
        forward=Traffic(0, 5 * elements, 2 * elements),
        backward=Traffic(0, 17 * elements, 2 * elements),
        kept=Kept(0, rows + (0 if first else elements), elements if first else 0),
        compiled=Compiled(Kept(0 if first else elements, rows)),
    )


def _attention(c: ModelConfig, kind: str) -> Parts:
    """Returns attention with norms of each head's query, key and value. The norm of values has no
    weight.

    With `attention_k_eq_v`, layers with full attention have no projection for values.
    """
    same = kind == FULL and c.flag("attention_k_eq_v")
    size = c.size("global_head_dim") if kind == FULL else c.head_dim
    kv_heads = c.size("num_global_key_value_heads", c.kv_heads) if same else c.kv_heads
    heads, hidden, bias = c.heads, c.hidden, c.flag("attention_bias")
    if heads % kv_heads:
        raise c.wrong("num_global_key_value_heads", f"a divisor of the {heads} attention heads")
    values = () if same else (linear("self_attn.v_proj", hidden, kv_heads * size, bias),)
    return (
        linear("self_attn.q_proj", hidden, heads * size, bias),
        rms_norm("self_attn.q_norm", size, rows=heads, projected=False, weight="wide"),
        rms_norm("self_attn.k_norm", size, rows=kv_heads, projected=False, weight="wide"),
        linear("self_attn.k_proj", hidden, kv_heads * size, bias),
        *values,
        linear("self_attn.o_proj", heads * size, hidden, bias),
        unweighted(size, kv_heads),
        rotary((heads + kv_heads) * size),
        attend(c, kind, query=size, kv_heads=kv_heads),
        shared_input(hidden, 2 if same else 3),
    )


def _mixture(c: ModelConfig) -> Parts:
    """Returns the experts that run in addition to the dense MLP.

    The router has its own norm and scales. There are three more norms.
    """
    hidden, count, chosen = c.hidden, c.size("num_experts", most=2**16), c.size("top_k_experts")
    if chosen > count:
        raise c.wrong("top_k_experts", f"at most the {count} experts")
    scale = Part(
        tensors=(("router.scale", (hidden,)), ("router.per_expert_scale", (count,))),
        forward=Traffic(4 * hidden),
        backward=Traffic(8 * hidden),
        kept=Kept(2 * hidden, 4 * chosen),
    )
    score = Part(
        forward=Traffic(0, 4 * count, count),
        backward=Traffic(0, 6 * count, count),
        kept=Kept(0, count),
    )
    return (
        unweighted(hidden, first=True),
        scale,
        linear("router.proj", hidden, count),
        score,
        experts("experts", hidden, c.size("moe_intermediate_size"), count, chosen),
        rms_norm("post_feedforward_layernorm_1", hidden, projected=False, weight="wide"),
        rms_norm("post_feedforward_layernorm_2", hidden, projected=False, weight="wide"),
        rms_norm("pre_feedforward_layernorm_2", hidden, weight="wide"),
        residual(hidden, 1),
    )


def gemma4(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of Gemma 4. Raises UserError for a small model."""
    if c.count("hidden_size_per_layer_input"):
        raise c.wrong(
            "hidden_size_per_layer_input",
            "0, since layers that also read rows of a second embedding table are not supported",
        )
    if c.count("num_kv_shared_layers", 0):
        raise c.wrong(
            "num_kv_shared_layers",
            "0, since layers that attend to keys and values of an earlier layer are not supported",
        )
    hidden = c.hidden
    return (
        *_attention(c, kind.attention),
        *gated_mlp(c, act="hidden_activation"),
        *pre_and_post_norms(c, kind),
        *(_mixture(c) if c.flag("enable_moe_block") else ()),
        # scales the layer's output in place
        Part(forward=Traffic(2 * hidden), backward=Traffic(2 * hidden)),
    )
