"""The decoder families of transformers: the tensors of their layers, and what each part costs.

`Architecture` reads a config.json and returns these for one model. `ModelSpec` is built on it.
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
from megatrain.simulator.model.families.parts import (
    Kept,
    LayerPieces,
    Part,
    Tensors,
    layer_pieces,
    merge_parts,
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
"""Families whose attention scores transformers writes out, because no fused kernel supports them:
soft caps, sinks, or slopes that are added to the scores."""
WIDE_HEADS = ("gemma4_text",)
"""Families with heads of more than 256 elements. No fused kernel that receives the lengths of
documents supports such heads."""
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
    """A model's config, checked, with the kind of each decoder layer and the parts of each kind."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        """Reads a config. `where` says where it comes from, for error messages.

        Raises UserError if the family is unknown or refused, or if a value is wrong.
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
        attention = self.family.attention(c) if self.family.attention else [FULL] * c.layers
        mlp = self.family.mlp(c) if self.family.mlp else [DENSE] * c.layers
        variants = self.family.variants(c) if self.family.variants else [()] * c.layers
        enters, leaves = (
            bool(self.family.embedding_norm or self.family.entrance),
            bool(self.family.exit),
        )
        self.kinds = [
            Kind(
                *pair,
                entered=enters and index == 0,
                left=leaves and index == c.layers - 1,
                variant=variant,
            )
            for index, (pair, variant) in enumerate(
                zip(zip(attention, mlp, strict=True), variants, strict=True)
            )
        ]
        self.carried = self.family.carried(c) if self.family.carried else c.hidden
        """Elements per token that travel from layer to layer."""
        self.tables = self.family.tables(c) if self.family.tables else ()
        """Further tables that the embedding looks each token up in."""
        self.positions = self.family.positions(c) if self.family.positions else ()
        """Tables of learned positions that are added to the embedding's rows."""
        self.head_bias = c.is_on(self.family.head_bias)
        """Whether the output projection has a bias."""
        parts = {kind: self.family.layer(c, kind) for kind in dict.fromkeys(self.kinds)}
        self.decoders = {kind: merge_parts(each) for kind, each in parts.items()}
        """Kind -> the parts of such a decoder layer, joined."""
        self.pieces = {kind: layer_pieces(each) for kind, each in parts.items()}
        """Kind -> the parts of such a decoder layer that can be computed in pieces of tokens, or
        None if its MLP cannot."""

    @functools.cached_property
    def scaled_from(self) -> int | None:
        """The row length from which on some layer scales queries by their position in the row, even
        if the row has several documents. None if no layer does.
        """
        return self.family.scaled_from(self.config) if self.family.scaled_from else None

    @functools.cached_property
    def norm(self) -> Part:
        """The final norm."""
        return self.family.norm(self.family.norm_name, self.hidden)

    def signature(self, kind: Kind) -> str:
        """Returns a text that is equal for layers whose ops take equally long for equal tokens."""
        part = self.decoders[kind]
        ends = ("-entered" if kind.entered else "") + ("-left" if kind.left else "")
        carried = f"c{self.carried}" if self.family.carried else ""
        sizes = f"{self.hidden}{carried}x{part.mlp}-{part.attention}-v{self.vocabulary}"
        return f"{self.name}-{sizes}{ends}"


def _unknown_family(model_type: object, where: str) -> UserError:
    """Returns the error for a `model_type` that is not supported.

    It names the reason if the family is refused, or a similar name if the family is unknown.
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
        found, fix = (
            f"{model_type!r}, which transformers has, but which is {NOT_YET}",
            "use a model of one of these families, or add this one (docs/adding.md)",
        )
        return UserError(where, found=found, allowed=allowed, fix=fix)
    fix = suggestion(
        model_type,
        FAMILIES,
        suggestion(model_type, [*REFUSED, *UNDESCRIBED], "check model_type in config.json"),
    )
    return UserError(
        where, found=f"{model_type!r}, an unknown model_type", allowed=allowed, fix=fix
    )


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Returns the config of a model with the first `layers` layers only."""
    shorter = {
        key: value[:layers] if key in _PER_LAYER and isinstance(value, list) else value
        for key, value in config.items()
    }
    for key in ("mlp_only_layers", "moe_layers"):
        if isinstance(config.get(key), list):
            # Entries that are not numbers stay, and are refused where the key is read.
            shorter[key] = [
                index for index in config[key] if not isinstance(index, int) or index < layers
            ]
    family = FAMILIES.get(str(config.get("model_type")))
    known = {**family.defaults, **config} if family else config
    shared, all_layers = known.get("num_kv_shared_layers"), known.get("num_hidden_layers")
    if isinstance(shared, int) and isinstance(all_layers, int):
        # The layers that share keys and values are the last ones.
        shorter["num_kv_shared_layers"] = max(0, shared - max(0, all_layers - layers))
    return {
        **shorter,
        (
            family.names.get("num_hidden_layers", "num_hidden_layers")
            if family
            else "num_hidden_layers"
        ): layers,
    }


def with_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the config with nulls and with floats that JSON does not have, as transformers
    expects it. This reverses `essential`.
    """
    given = {
        key: None if value == 0 and key in ZERO_FOR_NULL else _with_floats(value)
        for key, value in config.items()
        if key != NULLS
    }
    return {**given, **dict.fromkeys(nulls_of(config))}


def text_config(config: Any, where: str) -> dict[str, Any]:
    """Returns the keys of a config.json that affect training.

    For a multimodal model, these are the keys of its language model. Raises UserError if `config`
    is not a JSON object, or if it is that of an encoder-decoder.
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
    `decode_config` returns a bare `Infinity` so too. Plans and checkpoints keep it so, because the
    latter are JSON as well.
    """
    if isinstance(value, list):
        return [_with_floats(item) for item in value]
    if not isinstance(value, dict):
        return value
    name = value.get("__float__") if len(value) == 1 else None
    if isinstance(name, str) and name in ("Infinity", "-Infinity", "NaN"):
        return float(name)
    return {key: _with_floats(item) for key, item in value.items()}
