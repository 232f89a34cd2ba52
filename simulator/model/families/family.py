"""Family: describes one `model_type`. The functions make parts that several families share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from megatrain.simulator.model.families.attention import attention
from megatrain.simulator.model.families.config import ModelConfig
from megatrain.simulator.model.families.kinds import DENSE, LINEAR, Kind
from megatrain.simulator.model.families.part import Compiled, Kept, Part, Tensors, Traffic, placed
from megatrain.simulator.model.families.parts import (
    centred_norm,
    gated_mlp,
    interleaved,
    layer_norm,
    plain_mlp,
    residual,
    rms_norm,
)

Parts = tuple[Part, ...]
"""The parts of a layer, in the order in which transformers registers their tensors."""
Layer = Callable[[ModelConfig, Kind], Parts]
"""Returns the parts of a decoder layer of a kind, or of one of its modules."""


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """One `model_type`: the parts of its layers, and the rest of its decoder."""

    layer: Layer
    """Returns the parts of a decoder layer."""
    attention: Callable[[ModelConfig], list[str]] | None = None
    """Returns the attention of each layer (`Kind.attention`). None means full attention in all
    layers."""
    mlp: Callable[[ModelConfig], list[str]] | None = None
    """Returns the MLP of each layer (`Kind.mlp`). None means a dense MLP in all layers."""
    variants: Callable[[ModelConfig], list[tuple[Any, ...]]] | None = None
    """Returns the other properties in which layers differ, for each layer (`Kind.variant`). None
    means that there are none."""
    carried: Callable[[ModelConfig], int] | None = None
    """Returns the elements per token that travel from layer to layer. None means the hidden
    size."""
    carried_by: Literal["", "gemma3n"] = ""
    """The file of `runtime/layers` whose layers take and return all carried elements as one tensor.
    The runtime cannot train a family that has `carried` but no such file."""
    norm: Callable[[str, int], Part] = rms_norm
    """Returns the final norm, given its name and width."""
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
    """Returns additional tables in which the embedding looks up each token: name and shape
    [rows, width]. None means that there are none."""
    positions: Callable[[ModelConfig], Tensors] | None = None
    """Returns tables of learned positions that are added to the embedding's rows: name and shape
    [positions, hidden]. None means that there are none."""
    scaled_from: Callable[[ModelConfig], int | None] | None = None
    """Returns the row length, in tokens, from which on some layer scales queries by their position
    in the row, even if the row has several documents. None means that positions restart at each
    document."""
    unused_positions: int = 0
    """Rows at the start of a table of positions that belong to no token."""
    longest: str = ""
    """The key of config.json with the longest row that the model accepts, in tokens. Empty means no
    limit."""
    draws: tuple[str, ...] = ()
    """The keys of config.json with the magnitude of random noise, other than dropout, that layers
    add in training. The runtime trains with it. Empty means that there is none."""
    head: str = "lm_head"
    """The name of the output projection, which is outside of the decoder."""
    scales_logits: bool = False
    """Whether the model multiplies or divides its logits by a number, even by 1."""
    head_bias: bool | str = False
    """Whether the output projection has a bias, or the key of config.json that decides it."""
    names: dict[str, str] = {}
    """Usual key, such as `hidden_size` -> the family's own name for it in config.json."""
    published: Callable[[dict[str, Any], str], dict[str, Any]] | None = None
    """Returns a config that transformers has saved in the form in which it was published. The
    arguments are the config and where it comes from, for error messages. None means that the two
    forms are the same."""
    defaults: dict[str, Any] = {}
    """The defaults of transformers for keys that config.json may leave out."""


def stacked(*modules: Layer) -> Layer:
    """Returns a layer that consists of `modules`, in the order in which transformers registers
    their tensors.
    """
    return lambda c, kind: tuple(part for module in modules for part in module(c, kind))


def dense_or(*modules: Layer, dense: Layer | None = None) -> Layer:
    """Returns a module that is `modules` in layers with experts, and `dense` in the others.

    `dense` is a gated MLP by default.
    """
    mlp, sparse = dense or gated(), stacked(*modules)
    return lambda c, kind: mlp(c, kind) if kind.mlp == DENSE else sparse(c, kind)


def linear_or(mixer: Layer, full: Layer) -> Layer:
    """Returns a module that is `mixer` in layers with linear attention, and `full` in others."""
    return lambda c, kind: mixer(c, kind) if kind.attention == LINEAR else full(c, kind)


def attends(**options: Any) -> Layer:
    """Returns attention with the options of `parts.attention`."""
    return lambda c, kind: attention(c, kind.attention, **options)


def gated(**options: Any) -> Layer:
    """Returns a gated MLP with the options of `parts.gated_mlp`."""
    return lambda c, _: gated_mlp(c, **options)


def plain(up: str, down: str, bias: bool | str = True) -> Layer:
    """Returns an MLP without a gate, whose projections are called `up` and `down`."""
    return lambda c, _: plain_mlp(c, f"mlp.{up}", f"mlp.{down}", bias=bias)


def pre_norms(
    weight: str = "low", names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
) -> Layer:
    """Returns the norms before attention and before the MLP, and two residual sums.

    `weight` is the dtype of the norms' weight product, as in `rms_norm`.
    """
    return lambda c, _: (
        *placed("first", rms_norm(names[0], c.hidden, first=True, weight=weight)),
        *placed("norm", rms_norm(names[1], c.hidden, weight=weight)),
        residual(c.hidden),
    )


def _after_attention(c: ModelConfig, norm: Part) -> Part:
    """Returns the norm of attention's output, whose gradient is not that of the residual."""
    return msgspec.structs.replace(norm, compiled=norm.in_compiled._replace(longer=c.hidden))


def _computed_sum(c: ModelConfig) -> Part:
    """Returns the elements that a layer saves less if norms of attention's output and of the MLP's
    input follow each other. A compiled layer computes the residual sum between them again.
    """
    return Part(place="norm", compiled=Compiled(Kept(-c.hidden)))


def post_norms(weight: str = "low") -> Layer:
    """Returns norms after attention and MLP, and two residual sums. `weight` is as in
    `pre_norms`.
    """
    return lambda c, _: (
        _after_attention(
            c, rms_norm("post_attention_layernorm", c.hidden, projected=False, weight=weight)
        ),
        rms_norm("post_feedforward_layernorm", c.hidden, projected=False, weight=weight),
        residual(c.hidden),
        Part(kept=Kept(c.hidden)),
    )


def output_norms(*names: str, wanted: bool | str = True) -> Layer:
    """Returns norms of the outputs of attention and MLP, with these names, in addition to norms of
    their inputs.

    `wanted` is False for no norms. It may be the key of config.json that decides it.
    """

    def norms(c: ModelConfig, _kind: Kind) -> Parts:
        attended, *others = (rms_norm(name, c.hidden, projected=False) for name in names)
        wants = c.is_on(wanted)
        return (_after_attention(c, attended), *others, _computed_sum(c)) if wants else ()

    return norms


def pre_and_post_norms(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns Gemma's norms before and after attention and MLP, and two residual sums."""
    return (
        *placed("first", rms_norm("input_layernorm", c.hidden, first=True, weight="wide")),
        _after_attention(
            c, rms_norm("post_attention_layernorm", c.hidden, projected=False, weight="wide")
        ),
        *placed("norm", rms_norm("pre_feedforward_layernorm", c.hidden, weight="wide")),
        rms_norm("post_feedforward_layernorm", c.hidden, projected=False, weight="wide"),
        _computed_sum(c),
        residual(c.hidden),
    )


def layer_norms(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns layer norms before attention and before the MLP, and two residual sums."""
    return (
        *placed("first", layer_norm("input_layernorm", c.hidden, first=True)),
        *placed("norm", layer_norm("post_attention_layernorm", c.hidden)),
        residual(c.hidden),
    )


def query_key_norms(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns Hunyuan's norms of queries and keys, one row per head."""
    return tuple(
        rms_norm(f"self_attn.{name}_layernorm", c.head_dim, rows=rows, projected=False)
        for name, rows in (("query", c.heads), ("key", c.kv_heads))
    )


def interleaved_rotary(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the additional costs of interleaved rotary positions of queries and keys."""
    return (interleaved((c.heads + c.kv_heads) * c.head_dim),)


def scaled_residuals(c: ModelConfig, _kind: Kind) -> Parts:
    """Returns the products that scale the two residuals."""
    scaling = Traffic(4 * c.hidden)
    return (Part(forward=scaling, backward=scaling, compiled=Compiled(longer=c.hidden)),)


def heads_of_hidden_size(reason: str) -> Layer:
    """Returns a check as a module without parts.

    It raises UserError if all heads together do not have `hidden_size` elements. `reason` names the
    module that requires it.
    """

    def check(c: ModelConfig, _kind: Kind) -> Parts:
        if c.heads * c.head_dim != c.hidden:
            raise c.wrong(
                "head_dim",
                f"hidden_size / num_attention_heads = {c.hidden // c.heads}, since {reason} has"
                " the width hidden_size",
            )
        return ()

    return check


def top_k(c: ModelConfig, number: str, chosen: str = "num_experts_per_tok") -> tuple[int, int]:
    """Returns the number of experts, and how many of them each token uses.

    Args:
        c: The config.
        number: The key of the number of experts. transformers has three usual keys for it:
            `num_experts`, `num_local_experts` and `n_routed_experts`. If `number` is one of these,
            config.json may have any of the three, and `number` is the one in error messages.
        chosen: The key of the number of experts that each token uses.

    Raises UserError if a token would use more experts than there are.
    """
    usual = ("num_experts", "num_local_experts", "n_routed_experts")
    names = [name for name in usual if number in usual and c.config.get(name) is not None]
    count, used = c.size(names[0] if names else number, most=2**16), c.size(chosen)
    if used > count:
        raise c.wrong(chosen, f"at most the {count} experts")
    return count, used


def bare_norm(name: str, size: int) -> Part:
    """Returns the final norm of Cohere, which has no bias."""
    return centred_norm(name, (size,))


def wide_norm(name: str, size: int) -> Part:
    """Returns the final RMS norm of families that multiply with the weight in fp32."""
    return rms_norm(name, size, weight="wide")


def bare_layer_norm(name: str, size: int, *, first: bool = False) -> Part:
    """Returns `layer_norm` without a bias."""
    part = layer_norm(name, size, first=first)
    return msgspec.structs.replace(part, tensors=part.tensors[:1])
