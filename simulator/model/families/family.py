"""Family: describes one `model_type`. Also helpers that several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.kinds import Kind
from megatrain.simulator.model.families.parts import (
    Part,
    Tensors,
    centred_norm,
    layer_norm,
    residual,
    rms_norm,
)

Parts = tuple[Part, ...]
"""The parts of a layer, in the order in which transformers registers their tensors."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type`: the parts of its layers, and the rest of its decoder."""

    layer: Callable[[ModelConfig, Kind], Parts]
    """Returns the parts of a decoder layer of a kind."""
    attention: Callable[[ModelConfig], list[str]] | None = None
    """Returns the attention of each layer. None means full attention in all."""
    mlp: Callable[[ModelConfig], list[str]] | None = None
    """Returns the MLP of each layer. None means a dense MLP in all."""
    variants: Callable[[ModelConfig], list[tuple[Any, ...]]] | None = None
    """Returns what else the layers differ in, for each layer. None means nothing."""
    carried: Callable[[ModelConfig], int] | None = None
    """Returns the elements per token that travel from layer to layer. None means the hidden
    size."""
    norm: Callable[[str, int], Part] = rms_norm
    """Returns the final norm, for a name and a width."""
    norm_name: str = "norm"
    """The name of the final norm."""
    embedding: str = "embed_tokens"
    """The name of the embedding."""
    embedding_norm: str = ""
    """The name of the norm between the embedding and the first layer. It is counted in that layer.
    Empty means that there is none."""
    entrance: tuple[str, ...] = ()
    """The names of other modules between the embedding and the first layer. They are counted in
    that layer."""
    exit: tuple[str, ...] = ()
    """The names of the modules between the last layer and the final norm. They are counted in that
    layer."""
    tables: Callable[[ModelConfig], Tensors] | None = None
    """Returns further tables that the embedding looks each token up in: name and shape
    [rows, width]. None means that there are none."""
    positions: Callable[[ModelConfig], Tensors] | None = None
    """Returns tables of learned positions that are added to the embedding's rows: name and shape
    [positions, hidden]. None means that there are none."""
    scaled_from: Callable[[ModelConfig], int | None] | None = None
    """Returns the length from which on some layer scales queries by their position in the row, even
    if the row has several documents. None means that positions restart at each document."""
    unused_positions: int = 0
    """Rows at the start of a table of positions that belong to no token."""
    longest: str = ""
    """The key of config.json with the longest row that the model accepts. Empty means no limit."""
    draws: tuple[str, ...] = ()
    """The keys of config.json that say how widely layers draw at random in training, other than
    dropout. The runtime trains with them. Empty means that layers draw nothing."""
    head: str = "lm_head"
    """The name of the output projection, which is outside of the decoder."""
    head_bias: bool | str = False
    """Whether the output projection has a bias, or the key of config.json that decides it."""
    names: dict[str, str] = {}
    """Keys such as `hidden_size` -> the family's own name for them in config.json."""
    published: Callable[[dict[str, Any], str], dict[str, Any]] | None = None
    """Converts a config that transformers has saved to the form in which it was published. It
    receives the config and where it comes from. None means that the two forms are the same."""
    defaults: dict[str, Any] = {}
    """The defaults of transformers for keys that config.json may leave out."""


def pre_norms(c: ModelConfig, weight: str = "low") -> Parts:
    """Returns the norms before attention and before the MLP, and two residual sums.

    `weight` is the dtype of the norms' weight product, as in `rms_norm`.
    """
    return (
        rms_norm("input_layernorm", c.hidden, first=True, weight=weight),
        rms_norm("post_attention_layernorm", c.hidden, weight=weight),
        residual(c.hidden),
    )


def pre_and_post_norms(
    c: ModelConfig, into: tuple[str, str], out: tuple[str, str], weight: str = "low"
) -> Parts:
    """Returns norms before and after attention and MLP, and two residual sums.

    `into` names the two norms before, and `out` the two norms after.
    """
    return (
        rms_norm(into[0], c.hidden, first=True, weight=weight),
        rms_norm(into[1], c.hidden, weight=weight),
        *(rms_norm(name, c.hidden, projected=False, weight=weight) for name in out),
        residual(c.hidden),
    )


def top_k(c: ModelConfig, of: str) -> tuple[int, int]:
    """Returns the number of experts, and how many of them each token uses.

    transformers has three names for the first: `num_experts`, `num_local_experts` and
    `n_routed_experts`. `of` is the one to expect if config.json has none of them.
    """
    names = [
        name
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
        if c.config.get(name) is not None
    ]
    count = c.size(names[0] if names else of, most=2**16)
    chosen = c.size("num_experts_per_tok")
    if chosen > count:
        raise c.wrong("num_experts_per_tok", f"at most the {count} experts")
    return count, chosen


def bare_norm(name: str, size: int) -> Part:
    """Returns Cohere's final norm."""
    return centred_norm(name, (size,))


def wide_norm(name: str, size: int) -> Part:
    """Returns the final RMS norm of families that multiply with its weight in fp32."""
    return rms_norm(name, size, weight="wide")


def bare_layer_norm(name: str, size: int, *, first: bool = False) -> Part:
    """Returns `layer_norm` without a bias."""
    part = layer_norm(name, size, first=first)
    kept = {field: getattr(part, field) for field in part.__struct_fields__ if field != "tensors"}
    return Part(tensors=part.tensors[:1], **kept)
