"""Family: one `model_type`, as a function to the parts of its layers; and the parts that several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from megatrain.simulator.families.config import Config
from megatrain.simulator.families.kinds import Kind
from megatrain.simulator.families.parts import Part, Tensors, centred_norm, residual, rms_norm

Parts = tuple[Part, ...]


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type`."""

    layer: Callable[[Config, Kind], Parts]
    attention: Callable[[Config], list[str]] | None = None
    """the attention of each layer; None: full"""
    mlp: Callable[[Config], list[str]] | None = None
    """the MLP of each layer; None: dense"""
    norm: Callable[[str, int], Part] = rms_norm
    norm_name: str = "norm"
    embedding: str = "embed_tokens"
    entrance: str = ""
    """the norm between the embedding and the first layer, which is part of that layer here; empty: none"""
    positions: Callable[[Config], Tensors] | None = None
    """tables that are added to the embedding's rows, by name and shape [positions, hidden]; None: positions are the layers' business"""
    scaled_from: Callable[[Config], int | None] | None = None
    """the shortest row in which some layer scales queries by their place in the row; None: whatever layers do counts from a document's start"""
    unused_positions: int = 0
    """rows at the start of such a table that no token's position reaches"""
    longest: str = ""
    """the key that says how long a row may be, where longer ones fail; empty: none"""
    head: str = "lm_head"
    """what the output projection is called; it lies outside of the decoder"""
    head_bias: bool | str = False
    """the projection has a bias; or the key of config.json that says whether"""
    names: dict[str, str] = {}
    """what config.json calls `hidden_size` and its like, where it has names of its own"""
    published: Callable[[dict[str, Any], str], dict[str, Any]] | None = None
    """from a config that transformers has written in another form than it is published in, and its place, to the published form"""
    defaults: dict[str, Any] = {}
    """of keys that config.json may leave out, as transformers has them"""


def before(c: Config, weight: str = "low") -> Parts:
    """A norm before the attention and one before the MLP, and two residual sums."""
    return (
        rms_norm("input_layernorm", c.hidden, first=True, weight=weight), rms_norm("post_attention_layernorm", c.hidden, weight=weight), residual(c.hidden)
    )  # fmt: skip


def sandwich(c: Config, into: tuple[str, str], out: tuple[str, str], weight: str = "low") -> Parts:
    """Norms before and after attention and MLP: names of the two before and of the two after."""
    return (
        rms_norm(into[0], c.hidden, first=True, weight=weight), rms_norm(into[1], c.hidden, weight=weight),
        *(rms_norm(name, c.hidden, projected=False, weight=weight) for name in out), residual(c.hidden),
    )  # fmt: skip


def top_k(c: Config, of: str) -> tuple[int, int]:
    """(experts, how many of them a token uses). transformers calls them `num_experts`, `num_local_experts` or `n_routed_experts`."""
    names = [name for name in ("num_experts", "num_local_experts", "n_routed_experts") if c.config.get(name) is not None]
    count = c.size(names[0] if names else of, most=2**16)
    chosen = c.size("num_experts_per_tok")
    if chosen > count:
        raise c.wrong("num_experts_per_tok", f"at most the {count} experts")
    return count, chosen


def bare_norm(name: str, size: int) -> Part:
    return centred_norm(name, (size,))
