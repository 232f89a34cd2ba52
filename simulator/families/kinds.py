"""Which decoder layer is of which kind: its attention and its MLP, from the keys that each family has for it, with transformers' defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megatrain.simulator.families.config import Config

FULL, SLIDING, LINEAR, CHUNKED = "full_attention", "sliding_attention", "linear_attention", "chunked_attention"
HYBRID = "hybrid"
"""full attention, and beside it a mixer with a state"""
DENSE, SPARSE = "dense", "sparse"


class Kind(NamedTuple):
    """What makes layers of one model differ."""

    attention: str
    mlp: str
    entered: bool = False
    """the norm that follows the embedding is part of it"""


def pattern(every: int, usual: str = SLIDING, key: str = "sliding_window_pattern") -> Callable[[Config], list[str]]:
    """`layer_types`, or every so many layers a full one; all full where the window is off."""

    def kinds(c: Config) -> list[str]:
        listed = c.each_layer("layer_types", (FULL, usual))
        period = c.size(key, every)
        return listed or [usual if (index + 1) % period else FULL for index in range(c.layers)]

    return kinds


def full_first(every: int) -> Callable[[Config], list[str]]:
    """`layer_types`, or a full one and then sliding ones, over and over."""
    return lambda c: c.each_layer("layer_types", (FULL, SLIDING)) or [SLIDING if index % every else FULL for index in range(c.layers)]


def listed(usual: str) -> Callable[[Config], list[str]]:
    """`layer_types`, or the same attention in every layer."""
    return lambda c: c.each_layer("layer_types", (FULL, usual)) or [usual if c.count("sliding_window", 0) else FULL] * c.layers


def qwen_window(c: Config) -> list[str]:
    """`layer_types`, or sliding from `max_window_layers` on where `use_sliding_window` says so."""
    listed = c.each_layer("layer_types", (FULL, SLIDING))
    if listed is not None:
        return listed
    on, first = c.flag("use_sliding_window") and bool(c.count("sliding_window", 4096)), c.count("max_window_layers", 28)
    return [SLIDING if on and index >= first else FULL for index in range(c.layers)]


def one_window(c: Config) -> list[str]:
    """The same window in every layer, where there is one."""
    return [SLIDING if c.count("sliding_window", 0) else FULL] * c.layers


def qwen_one_window(c: Config) -> list[str]:
    return [SLIDING if c.flag("use_sliding_window") and c.count("sliding_window", 4096) else FULL] * c.layers


def qwen2_moe_window(c: Config) -> list[str]:
    listed = c.each_layer("layer_types", (FULL, SLIDING))
    on, most = c.flag("use_sliding_window"), c.count("max_window_layers", 28)
    return listed or [SLIDING if on and (index + 1) % 2 and index < most else FULL for index in range(c.layers)]


def smollm3_window(c: Config) -> list[str]:
    listed, positions = c.each_layer("layer_types", (FULL, SLIDING)), c.each_layer("no_rope_layers", (0, 1))
    period, on = c.size("no_rope_layer_interval", 4), c.flag("use_sliding_window") and bool(c.count("sliding_window", 0))
    positions = positions or [int((index + 1) % period != 0) for index in range(c.layers)]
    return listed or [SLIDING if on and not turned else FULL for turned in positions]


def every_layer(c: Config) -> list[str]:
    return [SPARSE] * c.layers


def qwen_sparse(c: Config) -> list[str]:
    """Experts in every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    step, dense = c.size("decoder_sparse_step", 1), set(c.indices("mlp_only_layers"))
    return [SPARSE if index not in dense and (index + 1) % step == 0 else DENSE for index in range(c.layers)]


def listed_or_full(c: Config) -> list[str]:
    return c.each_layer("layer_types", (FULL, SLIDING)) or [FULL] * c.layers


def listed_or_sparse(c: Config) -> list[str]:
    return c.each_layer("mlp_layer_types", (DENSE, SPARSE)) or [SPARSE] * c.layers


def dots_window(c: Config) -> list[str]:
    """`layer_types`, or sliding from `max_window_layers` on."""
    on, first = bool(c.count("sliding_window", 0)), c.count("max_window_layers", 62)
    return c.each_layer("layer_types", (FULL, SLIDING)) or [SLIDING if on and index >= first else FULL for index in range(c.layers)]


def llama4_chunks(c: Config) -> list[str]:
    """`layer_types`, or chunks where `no_rope_layers` has positions (1), or but in every so many layers."""
    positions, period = c.get("no_rope_layers") or None, c.size("no_rope_layer_interval")
    turned = c.each_layer("no_rope_layers", (0, 1)) if positions else [int((index + 1) % period != 0) for index in range(c.layers)]
    return c.each_layer("layer_types", (FULL, CHUNKED)) or [CHUNKED if here else FULL for here in turned or ()]


def llama4_scaled_from(c: Config) -> int | None:
    """`floor_scale`, where layers without positions scale their queries."""
    return c.size("floor_scale", 8192) if c.flag("attn_temperature_tuning", True) and FULL in llama4_chunks(c) else None


def llama4_sparse(c: Config) -> list[str]:
    """Experts where `moe_layers` says so, or in every so many layers."""
    every = c.size("interleave_moe_layer_step")
    named = set(c.indices("moe_layers")) if c.get("moe_layers") is not None else set(range(every - 1, c.layers, every))
    return [SPARSE if index in named else DENSE for index in range(c.layers)]


def one_dense(c: Config) -> list[str]:
    """`mlp_layer_types`, or the first layer dense."""
    return c.each_layer("mlp_layer_types", (DENSE, SPARSE)) or [SPARSE if index else DENSE for index in range(c.layers)]


def dense_between(c: Config) -> list[str]:
    """`mlp_layer_types`, or experts from `first_k_dense_replace` on in every `moe_layer_freq`-th layer."""
    first, every = c.count("first_k_dense_replace"), c.size("moe_layer_freq")
    listed = c.each_layer("mlp_layer_types", (DENSE, SPARSE))
    return listed or [SPARSE if index >= first and index % every == 0 else DENSE for index in range(c.layers)]


def mimo_window(c: Config) -> list[str]:
    """`layer_types`, or the first layer full and every sixth."""
    listed = c.each_layer("layer_types", (FULL, SLIDING))
    return listed or [SLIDING if index and (index + 1) % 6 else FULL for index in range(c.layers)]


def ernie_sparse(c: Config) -> list[str]:
    """Experts in every so many layers from one to another; -1 is the last."""
    first, last, every = c.count("moe_layer_start_index"), c.get("moe_layer_end_index"), c.size("moe_layer_interval")
    last = c.layers - 1 if last == -1 else c.count("moe_layer_end_index")
    return [SPARSE if (index + 1) % every == 0 and first <= index <= last else DENSE for index in range(c.layers)]


def cohere_window(c: Config) -> list[str]:
    """`layer_types`, or every so many layers a full one, counted anew after the dense layers that come first."""
    listed, first = c.each_layer("layer_types", (FULL, SLIDING)), c.count("first_k_dense_replace", 0, most=c.layers)
    parts = ((first, c.size("prefix_dense_sliding_window_pattern")), (c.layers - first, c.size("sliding_window_pattern")))
    return listed or [SLIDING if (index + 1) % period else FULL for count, period in parts for index in range(count)]


def dense_first(c: Config) -> list[str]:
    """`mlp_layer_types`, or the first few dense."""
    listed = c.each_layer("mlp_layer_types", (DENSE, SPARSE))
    if listed is not None:
        return listed
    first = c.count("first_k_dense_replace")
    return [DENSE if index < first else SPARSE for index in range(c.layers)]
