"""The kind of each decoder layer: its attention and its MLP.

Each function below follows the rule of one or a few families, with the defaults of transformers. It
returns one name for each layer. If the config has a list with one entry per layer, such as
`layer_types`, that list is used. In the docstrings below, *full*, *sliding* and so on are the
constants `FULL`, `SLIDING` and so on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from megatrain.simulator.model.families.config import ModelConfig

FULL, SLIDING, LINEAR, CHUNKED = (
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "chunked_attention",
)
"""Attention to all tokens before a token, to the last ones in a window, to all of them by linear
attention, or to those in the token's chunk of the row."""
HYBRID = "hybrid"
"""Full attention and a state-space mixer on the same input."""
DENSE, SPARSE = "dense", "sparse"
"""A plain MLP, and a router with experts."""


class Kind(NamedTuple):
    """The properties in which the decoder layers of a model may differ."""

    attention: str
    """One of the constants above: `FULL`, `SLIDING`, `LINEAR`, `CHUNKED` or `HYBRID`."""
    mlp: str
    """`DENSE` or `SPARSE`."""
    entered: bool = False
    """Whether the modules between the embedding and the layers are counted in this layer."""
    left: bool = False
    """Whether the modules between the layers and the final norm are counted in this layer."""
    variant: tuple[Any, ...] = ()
    """Other properties in which the family's layers differ (`Family.variants`)."""


Rule = Callable[[int], bool]
"""Returns whether the layer with an index, from 0, is an exception from the usual kind."""


def _attention(c: ModelConfig, rule: Rule, other: str = SLIDING) -> list[str]:
    """Returns `layer_types`, or `other` in layers for which `rule` is true and full elsewhere."""
    return c.each_layer("layer_types", (FULL, other)) or [
        other if rule(index) else FULL for index in range(c.layers)
    ]


def _sparse(c: ModelConfig, rule: Rule) -> list[str]:
    """Returns `mlp_layer_types`, or sparse in layers for which `rule` is true, dense elsewhere."""
    return c.each_layer("mlp_layer_types", (DENSE, SPARSE)) or [
        SPARSE if rule(index) else DENSE for index in range(c.layers)
    ]


def pattern(
    every: int, usual: str = SLIDING, key: str = "sliding_window_pattern"
) -> Callable[[ModelConfig], list[str]]:
    """Returns a function for `Family.attention`. It returns `layer_types`, or full attention in
    each layer whose number, from 1, is a multiple of a period, and `usual` in the others.

    The period is the value of `key`, or `every` if the config does not have this key.
    """

    def kinds(c: ModelConfig) -> list[str]:
        period = c.size(key, every)
        return _attention(c, lambda index: (index + 1) % period != 0, usual)

    return kinds


def full_first(every: int) -> Callable[[ModelConfig], list[str]]:
    """Returns a function for `Family.attention`. It returns `layer_types`, or full in the first of
    every `every` layers, and sliding in the others.
    """
    return lambda c: _attention(c, lambda index: index % every != 0)


def listed(usual: str) -> Callable[[ModelConfig], list[str]]:
    """Returns a function for `Family.attention`. It returns `layer_types`, or `usual` in all layers
    if the config has a window, and full otherwise.
    """
    return lambda c: _attention(c, lambda _: bool(c.count("sliding_window", 0)), usual)


def qwen_window(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or sliding from layer `max_window_layers` on if `use_sliding_window`
    is true, and full in the others.
    """

    def slides(index: int) -> bool:
        on = c.flag("use_sliding_window") and bool(c.count("sliding_window", 4096))
        return on and index >= c.count("max_window_layers", 28)

    return _attention(c, slides)


def one_window(c: ModelConfig) -> list[str]:
    """Returns sliding in all layers if the config has a window, and full otherwise."""
    return [SLIDING if c.count("sliding_window", 0) else FULL] * c.layers


def qwen_one_window(c: ModelConfig) -> list[str]:
    """Returns sliding in all layers if `use_sliding_window` is true and the config has a window,
    and full otherwise.
    """
    return [
        SLIDING if c.flag("use_sliding_window") and c.count("sliding_window", 4096) else FULL
    ] * c.layers


def qwen2_moe_window(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or sliding in layers 0, 2, 4 and so on before `max_window_layers` if
    `use_sliding_window` is true, and full in the others.
    """
    on, most = c.flag("use_sliding_window"), c.count("max_window_layers", 28)
    return _attention(c, lambda index: on and (index + 1) % 2 != 0 and index < most)


def smollm3_window(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or sliding in layers without rotary positions if `use_sliding_window`
    is true, and full in the others.
    """
    listed, positions = (
        c.each_layer("layer_types", (FULL, SLIDING)),
        c.each_layer("no_rope_layers", (0, 1)),
    )
    period, on = (
        c.size("no_rope_layer_interval", 4),
        c.flag("use_sliding_window") and bool(c.count("sliding_window", 0)),
    )
    positions = positions or [int((index + 1) % period != 0) for index in range(c.layers)]
    return listed or [SLIDING if on and not rotary else FULL for rotary in positions]


def every_layer(c: ModelConfig) -> list[str]:
    """Returns sparse in all layers."""
    return [SPARSE] * c.layers


def qwen_sparse(c: ModelConfig) -> list[str]:
    """Returns sparse in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`, and
    dense in the others.
    """
    step, dense = c.size("decoder_sparse_step", 1), set(c.indices("mlp_only_layers"))
    return [
        SPARSE if index not in dense and (index + 1) % step == 0 else DENSE
        for index in range(c.layers)
    ]


def listed_or_full(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or full in all layers."""
    return _attention(c, lambda _: False)


def listed_or_sparse(c: ModelConfig) -> list[str]:
    """Returns `mlp_layer_types`, or sparse in all layers."""
    return _sparse(c, lambda _: True)


def dots_window(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or sliding from layer `max_window_layers` on if the config has a
    window, and full in the others.
    """
    on, first = bool(c.count("sliding_window")), c.count("max_window_layers", 62)
    return _attention(c, lambda index: on and index >= first)


def llama4_chunks(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or chunked in layers with rotary positions, and full in the others.

    `no_rope_layers` has a 1 for each layer with rotary positions. Without this key, they are all
    layers except every `no_rope_layer_interval`-th.
    """
    period = c.size("no_rope_layer_interval")
    positions = (
        c.each_layer("no_rope_layers", (0, 1))
        if c.get("no_rope_layers")
        else [int((index + 1) % period != 0) for index in range(c.layers)]
    )
    return c.each_layer("layer_types", (FULL, CHUNKED)) or [
        CHUNKED if rotary else FULL for rotary in positions or ()
    ]


def llama4_scaled_from(c: ModelConfig) -> int | None:
    """Returns `floor_scale` if layers without rotary positions scale their queries, and None
    otherwise.
    """
    return (
        c.size("floor_scale")
        if c.flag("attn_temperature_tuning") and FULL in llama4_chunks(c)
        else None
    )


def llama4_sparse(c: ModelConfig) -> list[str]:
    """Returns sparse in the layers of `moe_layers`, or in every `interleave_moe_layer_step`-th
    layer, and dense in the others.
    """
    every = c.size("interleave_moe_layer_step")
    named = (
        set(c.indices("moe_layers"))
        if c.get("moe_layers") is not None
        else set(range(every - 1, c.layers, every))
    )
    return [SPARSE if index in named else DENSE for index in range(c.layers)]


def one_dense(c: ModelConfig) -> list[str]:
    """Returns `mlp_layer_types`, or sparse in all layers except the first."""
    return _sparse(c, lambda index: index > 0)


def dense_between(c: ModelConfig) -> list[str]:
    """Returns `mlp_layer_types`, or sparse in layers whose index is a multiple of `moe_layer_freq`
    and at least `first_k_dense_replace`, and dense in the others.
    """
    first, every = c.count("first_k_dense_replace"), c.size("moe_layer_freq")
    return _sparse(c, lambda index: index >= first and index % every == 0)


def mimo_window(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or full in the first layer and in every sixth, and sliding in the
    others.
    """
    return _attention(c, lambda index: index > 0 and (index + 1) % 6 != 0)


def ernie_sparse(c: ModelConfig) -> list[str]:
    """Returns sparse in every `moe_layer_interval`-th layer from `moe_layer_start_index` to
    `moe_layer_end_index`, and dense in the others. An end of -1 is the last layer.
    """
    first, last, every = (
        c.count("moe_layer_start_index"),
        c.get("moe_layer_end_index"),
        c.size("moe_layer_interval"),
    )
    last = c.layers - 1 if last == -1 else c.count("moe_layer_end_index")
    return [
        SPARSE if (index + 1) % every == 0 and first <= index <= last else DENSE
        for index in range(c.layers)
    ]


def cohere_window(c: ModelConfig) -> list[str]:
    """Returns `layer_types`, or full in every `sliding_window_pattern`-th layer, and sliding in the
    others.

    For the dense layers at the start, the period is `prefix_dense_sliding_window_pattern`. Counting
    restarts after them.
    """
    listed, first = (
        c.each_layer("layer_types", (FULL, SLIDING)),
        c.count("first_k_dense_replace", 0, most=c.layers),
    )
    parts = (
        (first, c.size("prefix_dense_sliding_window_pattern")),
        (c.layers - first, c.size("sliding_window_pattern")),
    )
    return listed or [
        SLIDING if (index + 1) % period else FULL
        for count, period in parts
        for index in range(count)
    ]


def dense_first(c: ModelConfig) -> list[str]:
    """Returns `mlp_layer_types`, or sparse in all layers after the first `first_k_dense_replace`,
    which are dense.
    """
    return _sparse(c, lambda index: index >= c.count("first_k_dense_replace"))
