"""The kind of each decoder layer: its attention and its MLP.

Each function below reads the keys that a family has for this, with the defaults of transformers. It
returns one name for each layer. A key with a list, such as `layer_types`, is used if it is present.
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
HYBRID = "hybrid"
"""Full attention and a state-space mixer on the same input."""
DENSE, SPARSE = "dense", "sparse"


class Kind(NamedTuple):
    """The properties in which decoder layers of one model differ."""

    attention: str
    """One of the constants above: `FULL`, `SLIDING`, `LINEAR`, `CHUNKED` or `HYBRID`."""
    mlp: str
    """`DENSE` or `SPARSE`."""
    entered: bool = False
    """Whether what comes between the embedding and the layers is counted in this layer."""
    left: bool = False
    """Whether what comes between the layers and the final norm is counted in this layer."""
    variant: tuple[Any, ...] = ()
    """Whatever else the family's layers differ in (`Family.variants`)."""


Rule = Callable[[int], bool]
"""Returns whether the layer of an index is of the kind that a rule is for."""


def _attention(c: ModelConfig, rule: Rule, other: str = SLIDING) -> list[str]:
    """Returns `layer_types`, or `other` in the layers of the rule and full attention elsewhere."""
    return c.each_layer("layer_types", (FULL, other)) or [
        other if rule(index) else FULL for index in range(c.layers)
    ]


def _sparse(c: ModelConfig, rule: Rule) -> list[str]:
    """Returns `mlp_layer_types`, or experts in the layers of the rule."""
    return c.each_layer("mlp_layer_types", (DENSE, SPARSE)) or [
        SPARSE if rule(index) else DENSE for index in range(c.layers)
    ]


def pattern(
    every: int, usual: str = SLIDING, key: str = "sliding_window_pattern"
) -> Callable[[ModelConfig], list[str]]:
    """`layer_types`, or full attention in each layer whose number is a multiple of a period.

    The other layers have the `usual` attention. The period is under `key`, `every` by default.
    """

    def kinds(c: ModelConfig) -> list[str]:
        period = c.size(key, every)
        return _attention(c, lambda index: (index + 1) % period != 0, usual)

    return kinds


def full_first(every: int) -> Callable[[ModelConfig], list[str]]:
    """`layer_types`, or in every period of `every` layers a full one first, then sliding ones."""
    return lambda c: _attention(c, lambda index: index % every != 0)


def listed(usual: str) -> Callable[[ModelConfig], list[str]]:
    """`layer_types`, or the `usual` attention in every layer if there is a window."""
    return lambda c: _attention(c, lambda _: bool(c.count("sliding_window", 0)), usual)


def qwen_window(c: ModelConfig) -> list[str]:
    """`layer_types`, or sliding from layer `max_window_layers` on with `use_sliding_window`."""

    def slides(index: int) -> bool:
        on = c.flag("use_sliding_window") and bool(c.count("sliding_window", 4096))
        return on and index >= c.count("max_window_layers", 28)

    return _attention(c, slides)


def one_window(c: ModelConfig) -> list[str]:
    """Sliding in every layer if there is a window."""
    return [SLIDING if c.count("sliding_window", 0) else FULL] * c.layers


def qwen_one_window(c: ModelConfig) -> list[str]:
    """Sliding in every layer with `use_sliding_window`."""
    return [
        SLIDING if c.flag("use_sliding_window") and c.count("sliding_window", 4096) else FULL
    ] * c.layers


def qwen2_moe_window(c: ModelConfig) -> list[str]:
    """`layer_types`, or sliding in every other layer before `max_window_layers` with
    `use_sliding_window`.
    """
    on, most = c.flag("use_sliding_window"), c.count("max_window_layers", 28)
    return _attention(c, lambda index: on and (index + 1) % 2 != 0 and index < most)


def smollm3_window(c: ModelConfig) -> list[str]:
    """`layer_types`, or with `use_sliding_window` sliding in layers without rotary positions."""
    listed, positions = (
        c.each_layer("layer_types", (FULL, SLIDING)),
        c.each_layer("no_rope_layers", (0, 1)),
    )
    period, on = (
        c.size("no_rope_layer_interval", 4),
        c.flag("use_sliding_window") and bool(c.count("sliding_window", 0)),
    )
    positions = positions or [int((index + 1) % period != 0) for index in range(c.layers)]
    return listed or [SLIDING if on and not turned else FULL for turned in positions]


def every_layer(c: ModelConfig) -> list[str]:
    return [SPARSE] * c.layers


def qwen_sparse(c: ModelConfig) -> list[str]:
    """Experts in every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    step, dense = c.size("decoder_sparse_step", 1), set(c.indices("mlp_only_layers"))
    return [
        SPARSE if index not in dense and (index + 1) % step == 0 else DENSE
        for index in range(c.layers)
    ]


def listed_or_full(c: ModelConfig) -> list[str]:
    return _attention(c, lambda _: False)


def listed_or_sparse(c: ModelConfig) -> list[str]:
    return _sparse(c, lambda _: True)


def dots_window(c: ModelConfig) -> list[str]:
    """`layer_types`, or sliding from layer `max_window_layers` on if there is a window."""
    on, first = bool(c.count("sliding_window")), c.count("max_window_layers", 62)
    return _attention(c, lambda index: on and index >= first)


def llama4_chunks(c: ModelConfig) -> list[str]:
    """`layer_types`, or chunked attention in layers with rotary positions.

    `no_rope_layers` has 1 for these layers. Without it, they are all layers except every
    `no_rope_layer_interval`-th.
    """
    positions, period = c.get("no_rope_layers") or None, c.size("no_rope_layer_interval")
    turned = (
        c.each_layer("no_rope_layers", (0, 1))
        if positions
        else [int((index + 1) % period != 0) for index in range(c.layers)]
    )
    return c.each_layer("layer_types", (FULL, CHUNKED)) or [
        CHUNKED if rotary else FULL for rotary in turned or ()
    ]


def llama4_scaled_from(c: ModelConfig) -> int | None:
    """Returns `floor_scale`, if layers without rotary positions scale their queries, or None."""
    return (
        c.size("floor_scale", 8192)
        if c.flag("attn_temperature_tuning", True) and FULL in llama4_chunks(c)
        else None
    )


def llama4_sparse(c: ModelConfig) -> list[str]:
    """Experts in the layers of `moe_layers`, or in every `interleave_moe_layer_step`-th layer."""
    every = c.size("interleave_moe_layer_step")
    named = (
        set(c.indices("moe_layers"))
        if c.get("moe_layers") is not None
        else set(range(every - 1, c.layers, every))
    )
    return [SPARSE if index in named else DENSE for index in range(c.layers)]


def one_dense(c: ModelConfig) -> list[str]:
    """`mlp_layer_types`, or experts in all layers except the first."""
    return _sparse(c, lambda index: index > 0)


def dense_between(c: ModelConfig) -> list[str]:
    """`mlp_layer_types`, or experts from `first_k_dense_replace` on in every `moe_layer_freq`-th
    layer.
    """
    first, every = c.count("first_k_dense_replace"), c.size("moe_layer_freq")
    return _sparse(c, lambda index: index >= first and index % every == 0)


def mimo_window(c: ModelConfig) -> list[str]:
    """`layer_types`, or full attention in the first and in every sixth layer."""
    return _attention(c, lambda index: index > 0 and (index + 1) % 6 != 0)


def ernie_sparse(c: ModelConfig) -> list[str]:
    """Experts in every `moe_layer_interval`-th layer from `moe_layer_start_index` to
    `moe_layer_end_index`, where -1 is the last layer.
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
    """`layer_types`, or full attention in every `sliding_window_pattern`-th layer.

    The dense layers at the start have a period of their own, and counting restarts after them.
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
    """`mlp_layer_types`, or experts in all layers after the first `first_k_dense_replace`."""
    return _sparse(c, lambda index: index >= c.count("first_k_dense_replace"))
