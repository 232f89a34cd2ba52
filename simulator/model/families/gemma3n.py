"""The text models of Gemma 3n, whose layers pass more than hidden states to each other.

From layer to layer, a token carries several streams of hidden states, one row of inputs for each
layer, and the keys and values that the last layers read from an earlier one. The embedding looks up
each token in two tables. The first layer computes the streams from these two rows, and the last
layer computes one row from the streams. So both have a few tensors that transformers' model has
outside its layers.
"""

from __future__ import annotations

from typing import Any

from megatrain.simulator.model.families.attention import attend
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.family import Family, Parts, wide_norm
from megatrain.simulator.model.families.gemma4 import unweighted
from megatrain.simulator.model.families.kinds import FULL, SLIDING, Kind
from megatrain.simulator.model.families.part import Kept, Part, Tensors, Traffic
from megatrain.simulator.model.families.parts import (
    gated_mlp,
    linear,
    residual,
    rms_norm,
    rotary,
    shared_input,
)

STORE, REUSE = "store", "reuse"
"""What a layer does with keys and values: it stores its own for later layers, or reuses those of an
earlier layer."""
_PROJECTIONS, _EXITS = "altup_projections", "altup_unembed_projections"
_MODEL, _MODEL_NORM = "per_layer_model_projection", "per_layer_projection_norm"


def _types(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or full attention in every fifth layer and sliding in the others."""
    return c.each_layer("layer_types", (FULL, SLIDING)) or [
        SLIDING if (index + 1) % 5 else FULL for index in range(c.layers)
    ]


def _sizes(c: ModelConfig) -> list[int]:
    """Returns the width of each layer's MLP."""
    key = "intermediate_size"
    if not isinstance(c.get(key), list):
        return [c.size(key, 16384)] * c.layers
    sizes = c.each_layer(key) or []
    if not all(type(size) is int and size > 0 for size in sizes):
        raise c.wrong(key, "sizes")
    return sizes


def _sparsities(c: ModelConfig) -> list[float]:
    """Returns, for each layer, the share of the MLP's gate that is set to zero, from 0 to 1."""
    key = "activation_sparsity_pattern"
    if c.get(key) is None:
        sparse = 10 if c.layers > 10 else 0
        return [0.95] * sparse + [0.0] * (c.layers - sparse)
    shares = c.each_layer(key) or []
    if not all(type(share) in (int, float) and 0 <= share < 1 for share in shares):
        raise c.wrong(key, "numbers of at least 0 and below 1")
    return shares


def _sharing(c: ModelConfig) -> list[str]:
    """Returns what each layer does with keys and values: `STORE`, `REUSE`, or "" for neither.

    The last `num_kv_shared_layers` layers reuse the keys and values of the last layer of their type
    that comes before all of them.
    """
    types, shared = _types(c), c.count("num_kv_shared_layers", most=c.layers)
    before = types[: c.layers - shared]
    if not shared:
        return [""] * c.layers
    if set(before) != set(types):
        raise c.wrong("num_kv_shared_layers", "fewer, so that each layer type has a layer before")
    last = {kind: index for index, kind in enumerate(before)}
    return [STORE if last[kind] == index else "" for index, kind in enumerate(before)] + [
        REUSE
    ] * shared


def _variants(c: ModelConfig) -> list[tuple[Any, ...]]:
    """Returns (sharing of keys and values, width of the MLP, sparsity of the MLP) of each layer."""
    return list(zip(_sharing(c), _sizes(c), _sparsities(c), strict=True))


def _input_width(c: ModelConfig) -> int:
    """Returns the elements per token of the additional inputs of one layer."""
    return c.size("hidden_size_per_layer_input")


def _streams(c: ModelConfig) -> int:
    """Returns the number of streams of hidden states."""
    return c.size("altup_num_inputs", most=64)


def _carried(c: ModelConfig) -> int:
    """Returns the carried elements per token: the streams, the inputs of all layers, and the shared
    keys and values of each type of layer.
    """
    shared = len(set(_types(c))) if c.count("num_kv_shared_layers") else 0
    pairs = 2 * shared * c.kv_heads * c.head_dim
    return _streams(c) * c.hidden + c.layers * _input_width(c) + pairs


def _tables(c: ModelConfig) -> Tensors:
    """Returns the second table of the embedding, with the inputs of all layers in each row."""
    shape = c.size("vocab_size_per_layer_input"), c.layers * _input_width(c)
    return (("embed_tokens_per_layer.weight", shape),)


def _norm(name: str, size: int, *, rows: int = 1, first: bool = False, out: bool = False) -> Part:
    """Returns an RMS norm. `out` says whether a projection reads its output. The other arguments
    are as in `rms_norm`.
    """
    return rms_norm(name, size, rows=rows, first=first, projected=out, weight="wide")


def _attention(c: ModelConfig, kind: Kind) -> Parts:
    """Returns attention with norms of each head's query, key and value. The norm of values has no
    weight.
    """
    hidden, heads, kv_heads, size = c.hidden, c.heads, c.kv_heads, c.head_dim
    bias, (sharing, *_) = c.flag("attention_bias"), kind.variant
    if size % 2:
        raise c.wrong("head_dim", "an even number, since positions turn halves of a head")
    queries = (
        linear("self_attn.q_proj", hidden, heads * size, bias),
        _norm("self_attn.q_norm", size, rows=heads),
    )
    if sharing == REUSE:
        # Keys and values are a part of the layer's input, which is not saved again.
        keys_values: Parts = (rotary(heads * size), Part(kept=Kept(-2 * kv_heads * size)))
    else:
        keys_values = (
            linear("self_attn.k_proj", hidden, kv_heads * size, bias),
            linear("self_attn.v_proj", hidden, kv_heads * size, bias),
            _norm("self_attn.k_norm", size, rows=kv_heads),
            unweighted(size, kv_heads),
            rotary((heads + kv_heads) * size),
            shared_input(hidden, 3),
            Part(backward=Traffic(8 * kv_heads * size if sharing == STORE else 0)),
        )
    return (
        *queries,
        *keys_values,
        linear("self_attn.o_proj", heads * size, hidden, bias),
        attend(c, kind.attention),
        Part(attention=sharing),
    )


def _mlp(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a gated MLP. If it is sparse, gates below a cutoff, which is a number of standard
    deviations above their mean, are set to zero: mean (1), deviation (1), difference (2), and relu
    (2), which saves its output.
    """
    _, inner, sparsity = kind.variant
    cut = Part(
        forward=Traffic(6 * inner),
        backward=Traffic(15 * inner),
        kept=Kept(inner),
        mlp=f"s{sparsity}",
    )
    return (*gated_mlp(c, inner=inner, act="hidden_activation"), *((cut,) if sparsity else ()))


def _altup(c: ModelConfig) -> Parts:
    """Returns the prediction of all streams before the layer, and their correction after it.

    A router with a norm computes the coefficients of both, so it runs twice. Single streams are
    read by an index and added in place. For each such operation, the backward pass writes a
    gradient of all streams and adds it. This is most of the backward traffic, which is 62 per
    element of the streams.
    """
    hidden, streams = c.hidden, _streams(c)
    all_streams, square = streams * hidden, streams**2
    router = Part(
        active=hidden * streams, forward=Traffic(2 * hidden), backward=Traffic(5 * hidden)
    )
    norm = _norm("altup.router_norm", hidden, first=True, out=True)
    again = _norm("altup.router_norm", hidden, out=True)
    predicted = Part(
        state=2 * hidden * square,
        forward=Traffic(5 * all_streams),
        backward=Traffic(3 * all_streams),
    )
    corrected = Part(
        forward=Traffic(7 * all_streams + 4 * hidden),
        backward=Traffic(59 * all_streams - 10 * hidden),
        kept=Kept(all_streams),
    )
    scaled = Part(forward=Traffic(4 * hidden), backward=Traffic(8 * hidden), kept=Kept(2 * hidden))
    plain = Part(kept=Kept(hidden))
    return (
        Part(tensors=(("altup.correct_output_scale", (hidden,)),)),
        linear("altup.correction_coefs", streams, streams),
        linear("altup.prediction_coefs", streams, square),
        linear("altup.modality_router", hidden, streams),
        norm,
        Part(**{field: getattr(again, field) for field in ("forward", "backward", "kept")}),
        router,
        predicted,
        corrected,
        scaled if c.flag("altup_correct_scale", True) else plain,
    )


def _inputs(c: ModelConfig) -> Parts:
    """Returns the modules that add the layer's own inputs to all streams but the first."""
    hidden, width, streams = c.hidden, _input_width(c), _streams(c)
    gated = Part(
        forward=Traffic(5 * width + 3 * (streams - 1) * hidden),
        backward=Traffic(9 * width + 4 * (streams - 1) * hidden),
        kept=Kept(3 * width),
    )
    return (
        linear("per_layer_input_gate", hidden, width),
        linear("per_layer_projection", width, hidden),
        _norm("post_per_layer_input_norm", hidden),
        gated,
    )


def _resized(c: ModelConfig) -> Part:
    """Returns the scaling of all streams but the first to the magnitude of the first: square (2),
    mean (1), product (2) and quotient (2).
    """
    others = (_streams(c) - 1) * c.hidden
    return Part(
        forward=Traffic(7 * others + 2 * c.hidden),
        backward=Traffic(20 * others + 4 * c.hidden),
        kept=Kept(2 * others),
    )


def _entrance(c: ModelConfig) -> Parts:
    """Returns the modules before the first layer. They compute the streams from a token's row in
    the embedding, and the inputs of all layers from its rows in both tables.
    """
    hidden, width, streams = c.hidden, _input_width(c), _streams(c)
    inputs = c.layers * width
    return (
        linear(_MODEL, hidden, inputs),
        _norm(_MODEL_NORM, width, rows=c.layers),
        *(linear(f"{_PROJECTIONS}.{index}", hidden, hidden) for index in range(streams - 1)),
        _resized(c),
        Part(
            forward=Traffic(7 * inputs + 2 * streams * hidden),
            backward=Traffic(6 * inputs + 10 * streams * hidden),
            kept=Kept(streams * hidden),
        ),
    )


def _exit(c: ModelConfig) -> Parts:
    """Returns the modules after the last layer. They compute one row from the streams, which is
    their mean.

    The backward pass writes a gradient of all streams (3) for each stream.
    """
    hidden, streams = c.hidden, _streams(c)
    return (
        *(linear(f"{_EXITS}.{index}", hidden, hidden) for index in range(streams - 1)),
        _resized(c),
        Part(
            forward=Traffic(3 * streams * hidden),
            backward=Traffic((3 * streams + 8) * streams * hidden),
            kept=Kept(streams * hidden),
        ),
    )


def gemma3n(c: ModelConfig, kind: Kind) -> Parts:
    """Returns a layer of Gemma 3n."""
    hidden, rank = c.hidden, c.size("laurel_rank")
    if not 0 <= c.count("altup_active_idx") < _streams(c):
        raise c.wrong("altup_active_idx", f"below altup_num_inputs = {_streams(c)}")
    return (
        *_attention(c, kind),
        *_mlp(c, kind),
        _norm("input_layernorm", hidden, out=True),
        _norm("post_attention_layernorm", hidden),
        _norm("pre_feedforward_layernorm", hidden, out=True),
        _norm("post_feedforward_layernorm", hidden),
        *_altup(c),
        linear("laurel.linear_left", hidden, rank),
        linear("laurel.linear_right", rank, hidden),
        _norm("laurel.post_laurel_norm", hidden),
        Part(kept=Kept(rank)),
        *_inputs(c),
        residual(hidden, 4),
        Part(forward=Traffic(2 * hidden), backward=Traffic(2 * hidden)),
        # The carried elements are split into their parts, and concatenated again.
        Part(forward=Traffic(2 * _carried(c)), backward=Traffic(2 * _carried(c))),
        *(_entrance(c) if kind.entered else ()),
        *(_exit(c) if kind.left else ()),
    )


_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_400,
    "hidden_size": 2048,
    "num_hidden_layers": 35,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "altup_num_inputs": 4,
    "num_kv_shared_layers": 15,
    "laurel_rank": 64,
    "final_logit_softcapping": 30.0,
}

GEMMA3N_FAMILIES: dict[str, Family] = {
    "gemma3n_text": Family(
        layer=gemma3n, attention=_types, variants=_variants, norm=wide_norm, carried=_carried,
        carried_by="gemma3n", tables=_tables, entrance=(_MODEL, _MODEL_NORM, _PROJECTIONS),
        exit=(_EXITS,), defaults=_DEFAULTS,
    ),
}  # fmt: skip
"""`model_type` -> family."""
