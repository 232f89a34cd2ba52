"""The decoder families of transformers: the tensors of their layers, and the cost of each part.

`Architecture` reads a config.json and has both for one model. `ModelSpec` is built on it.
"""

from __future__ import annotations

import functools
from typing import Any

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.names import suggestion
from megatrain.simulator.model.families.config import (
    NULLS,
    ZERO_FOR_NULL,
    ModelConfig,
    essential,
    nulls_of,
)
from megatrain.simulator.model.families.dbrx import DBRX_FAMILIES
from megatrain.simulator.model.families.decoders import DECODERS
from megatrain.simulator.model.families.dense import DENSE_FAMILIES
from megatrain.simulator.model.families.entered import ENTERED_FAMILIES
from megatrain.simulator.model.families.gemma3n import GEMMA3N_FAMILIES
from megatrain.simulator.model.families.gpt import GPT_FAMILIES
from megatrain.simulator.model.families.hybrid import HYBRID_FAMILIES
from megatrain.simulator.model.families.installed import Families
from megatrain.simulator.model.families.kinds import DENSE, FULL, Kind
from megatrain.simulator.model.families.mixtures import MIXTURE_FAMILIES
from megatrain.simulator.model.families.multimodal import INSIDE
from megatrain.simulator.model.families.part import (
    Kept,
    LayerPieces,
    Part,
    Tensors,
    layer_pieces,
    merge_parts,
    with_flash,
)
from megatrain.simulator.model.families.refused import NOT_YET, REFUSED, UNDESCRIBED
from megatrain.simulator.model.families.shared_experts import SHARED_EXPERT_FAMILIES
from megatrain.simulator.model.families.written import WRITTEN_FAMILIES

__all__ = [
    "ALWAYS_MASKED",
    "FAMILIES",
    "CANNOT_SEPARATE_DOCUMENTS",
    "INSIDE",
    "CAN_SAVE_ATTENTION",
    "NOT_YET",
    "REFUSED",
    "UNDESCRIBED",
    "WIDE_HEADS",
    "UNFUSED_ATTENTION",
    "Architecture",
    "Kept",
    "Kind",
    "LayerPieces",
    "Part",
    "Tensors",
    "cut",
    "essential",
    "nulls_of",
    "text_config",
    "with_nulls",
]

_FILES = (
    DECODERS,
    DENSE_FAMILIES,
    MIXTURE_FAMILIES,
    SHARED_EXPERT_FAMILIES,
    GPT_FAMILIES,
    WRITTEN_FAMILIES,
    HYBRID_FAMILIES,
    ENTERED_FAMILIES,
    GEMMA3N_FAMILIES,
    DBRX_FAMILIES,
)
FAMILIES = Families({name: family for file in _FILES for name, family in file.items()})
"""`model_type` -> its family."""
CAN_SAVE_ATTENTION = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose attention output can be saved (`runtime/layers/attention.py`), so that recompute
skips attention. Their attention is one causal kernel without a mask."""
ONE_KERNEL = "full causal attention in every layer, in the families " + ", ".join(
    CAN_SAVE_ATTENTION
)
"""What `CAN_SAVE_ATTENTION` allows, for error texts."""
CANNOT_SEPARATE_DOCUMENTS = {
    "biogpt": "whose attention mask does not separate documents",
    "bloom": "whose attention mask does not separate documents",
    "falcon": "whose attention mask does not separate documents",
    "minimax": "whose linear attention carries its state from one document to the next",
    "mpt": "whose attention mask does not separate documents",
}
"""Families that cannot keep the documents of a row apart -> the reason."""
UNFUSED_ATTENTION = (
    "bloom",
    "codegen",
    "gemma2",
    "gpt_oss",
    "gptj",
    "granite_swa",
    "granitemoe_swa",
    "mimo_v2_flash",
    "mpt",
    "vaultgemma",
)
"""Families whose attention scores transformers writes out to memory, because no fused kernel
supports them. They have soft caps, sinks, or slopes that are added to the scores. If the workload
names the flash kernel, it computes the scores with sinks (`ModelSpec.fuses_scores`)."""
WIDE_HEADS = ("gemma4_text",)
"""Families with heads of more than 256 elements. The fused kernels that receive the lengths of
documents do not support such heads."""
ALWAYS_MASKED = ("falcon",)
"""Families whose models make an attention mask even for rows with one document."""
_PER_LAYER = (
    "layer_types",
    "no_rope_layers",
    "mlp_layer_types",
    "layer_rope_theta",
    "num_attention_heads_per_layer",
    "activation_sparsity_pattern",
    "intermediate_size",
)
"""Keys with one entry for each layer."""


class Architecture:
    """A checked config, with the kind of each decoder layer and the parts of each kind."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        """Reads the keys of a config.json, as returned by `text_config`.

        `where` says where the config comes from, for error messages. Raises UserError if the family
        is unknown or not supported, or if a value is wrong.
        """
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise _unknown_family(model_type, where)
        self.name, self.family = model_type, FAMILIES[model_type]
        self.config = ModelConfig(config, where, self.family.defaults, self.family.names)
        c = self.config
        self.layers, self.hidden, self.vocabulary, self.tied = (
            c.layers,
            c.hidden,
            c.vocabulary,
            c.flag("tie_word_embeddings"),
        )
        attentions = self.family.attention(c) if self.family.attention else [FULL] * c.layers
        mlps = self.family.mlp(c) if self.family.mlp else [DENSE] * c.layers
        variants = self.family.variants(c) if self.family.variants else [()] * c.layers
        has_entrance = bool(self.family.embedding_norm or self.family.entrance)
        self.kinds = [
            Kind(
                attention,
                mlp,
                entered=has_entrance and index == 0,
                left=bool(self.family.exit) and index == c.layers - 1,
                variant=variant,
            )
            for index, (attention, mlp, variant) in enumerate(
                zip(attentions, mlps, variants, strict=True)
            )
        ]
        """The kind of each decoder layer."""
        self.carried = self.family.carried(c) if self.family.carried else c.hidden
        """Elements per token that travel from layer to layer."""
        self.tables = self.family.tables(c) if self.family.tables else ()
        """Additional tables in which the embedding looks up each token."""
        self.positions = self.family.positions(c) if self.family.positions else ()
        """Tables of learned positions that are added to the embedding's rows."""
        self.head_bias = c.is_on(self.family.head_bias)
        """Whether the output projection has a bias."""
        parts = {kind: self.family.layer(c, kind) for kind in dict.fromkeys(self.kinds)}
        self.decoders = {kind: merge_parts(of_kind) for kind, of_kind in parts.items()}
        """Kind -> all parts of a decoder layer of this kind, merged into one."""
        self.with_flash = {
            kind: merge_parts(with_flash(of_kind)) for kind, of_kind in parts.items()
        }
        """The same for a workload that names the flash kernel."""
        self.pieces = {kind: layer_pieces(of_kind) for kind, of_kind in parts.items()}
        """Kind -> the parts of a decoder layer of this kind that can be computed in pieces of
        tokens, or None if its MLP cannot be."""

    @functools.cached_property
    def scaled_from(self) -> int | None:
        """The row length, in tokens, from which on some layer scales queries by their position in
        the row, even if the row has several documents. None if no layer does.
        """
        return self.family.scaled_from(self.config) if self.family.scaled_from else None

    @functools.cached_property
    def norm(self) -> Part:
        """The final norm."""
        return self.family.norm(self.family.norm_name, self.hidden)

    def signature(self, kind: Kind) -> str:
        """Returns a text that is equal for layers whose ops take the same time for the same number
        of tokens.
        """
        part = self.decoders[kind]
        ends = ("-entered" if kind.entered else "") + ("-left" if kind.left else "")
        carried = f"c{self.carried}" if self.family.carried else ""
        sizes = f"{self.hidden}{carried}x{part.mlp}-{part.attention}-v{self.vocabulary}"
        return f"{self.name}-{sizes}{ends}"


def _unknown_family(model_type: object, where: str) -> UserError:
    """Returns the error for a `model_type` that is not supported.

    It gives the reason if the family is known, or suggests a similar name if it is unknown.
    """
    where, allowed = (
        f"{where}: model_type",
        f"one of {len(FAMILIES)} families, which `megatrain list families` prints",
    )
    if not isinstance(model_type, str):
        return UserError(
            where,
            found=repr(model_type),
            allowed=allowed,
            fix="give a model folder whose config.json has a model_type",
        )
    if model_type in REFUSED:
        return UserError(
            where,
            found=f"{model_type!r}, {REFUSED[model_type]}",
            allowed=allowed,
            fix="use a model of one of these families",
        )
    if model_type in UNDESCRIBED:
        return UserError(
            where,
            found=f"{model_type!r}, which transformers has, but which is {NOT_YET}",
            allowed=allowed,
            fix="use a model of one of these families, or add this one (docs/adding.md)",
        )
    fix = suggestion(
        model_type,
        FAMILIES,
        suggestion(model_type, [*REFUSED, *UNDESCRIBED], "check model_type in config.json"),
    )
    return UserError(
        where, found=f"{model_type!r}, an unknown model_type", allowed=allowed, fix=fix
    )


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns the config of the model that has only the first `layers` layers."""
    shorter = {
        key: value[:layers] if key in _PER_LAYER and isinstance(value, list) else value
        for key, value in config.items()
    }
    for key in ("mlp_only_layers", "moe_layers"):
        if isinstance(config.get(key), list):
            # Entries that are not numbers are kept. The function that reads the key refuses them.
            shorter[key] = [
                index for index in config[key] if not isinstance(index, int) or index < layers
            ]
    family = FAMILIES.get(str(config.get("model_type")))
    known = {**family.defaults, **config} if family else config
    shared, all_layers = known.get("num_kv_shared_layers"), known.get("num_hidden_layers")
    if isinstance(shared, int) and isinstance(all_layers, int):
        # The layers that share keys and values are the last ones.
        shorter["num_kv_shared_layers"] = max(0, shared - (all_layers - layers))
    return {
        **shorter,
        (
            family.names.get("num_hidden_layers", "num_hidden_layers")
            if family
            else "num_hidden_layers"
        ): layers,
    }


def with_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a stored config with nulls, and with floats that JSON does not have, as transformers
    expects it. It is the inverse of `essential`.
    """
    restored = {
        key: None if value == 0 and key in ZERO_FOR_NULL else _with_floats(value)
        for key, value in config.items()
        if key != NULLS
    }
    return {**restored, **dict.fromkeys(nulls_of(config))}


def text_config(config: Any, where: str) -> dict[str, Any]:
    """Returns the keys of a config.json that affect training.

    For a multimodal model, these are the keys of its language model. `where` says where the config
    comes from, for error messages. Raises UserError if `config` is not a JSON object, or if the
    model is an encoder-decoder.
    """
    if not isinstance(config, dict):
        raise UserError(
            where,
            found=f"a JSON {type(config).__name__}",
            allowed="a Hugging Face config.json, one JSON object",
            fix="give a model folder",
        )
    inner = config.get("text_config")
    if isinstance(inner, dict) and str(config.get("model_type")) not in FAMILIES:
        inside = INSIDE.get(str(config.get("model_type")))
        tied = (
            inside.tie_of(config)
            if inside
            else inner.get("tie_word_embeddings", config.get("tie_word_embeddings"))
        )
        known = {} if tied is None else {"tie_word_embeddings": tied}
        config = {
            **{key: value for key, value in inner.items() if key != "tie_word_embeddings"},
            **known,
        }
    if config.get("is_encoder_decoder"):
        raise UserError(
            f"{where}: is_encoder_decoder",
            found="true",
            allowed="a decoder-only model",
            fix="use a decoder-only model",
        )
    family = FAMILIES.get(str(config.get("model_type")))
    try:
        return essential(family.published(config, where) if family and family.published else config)
    except RecursionError:
        raise UserError(
            where,
            found="values that are nested too deeply",
            allowed="a Hugging Face config.json",
            fix="give a model folder",
        ) from None


def _with_floats(value: Any) -> Any:
    """Returns `value`, any part of a config.json, with the floats that JSON does not have.

    transformers writes infinity, as in Falcon-H1's `time_step_limit`, as {"__float__": "Infinity"}.
    `decode_config` returns a bare `Infinity` in the same form. Plans and checkpoints also store it
    in this form, because a checkpoint's manifest is JSON.
    """
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("__float__") if len(value) == 1 else None
    if isinstance(name, str) and name in ("Infinity", "-Infinity", "NaN"):
        return float(name)
    return {key: _with_floats(item) for key, item in value.items()}
