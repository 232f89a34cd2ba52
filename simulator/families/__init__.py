"""What transformers' decoder families are made of, and what each part costs: the knowledge that ModelSpec is built on."""

from __future__ import annotations

import functools
from typing import Any

from megatrain.simulator.errors import UserError, suggestion
from megatrain.simulator.families.config import NULLS, ZERO_FOR_NULL, Config, essential, nulls_of
from megatrain.simulator.families.decoders import DECODERS
from megatrain.simulator.families.dense import DENSE_FAMILIES
from megatrain.simulator.families.entered import ENTERED_FAMILIES
from megatrain.simulator.families.family import Family
from megatrain.simulator.families.gpt import GPT_FAMILIES
from megatrain.simulator.families.hybrid import HYBRID_FAMILIES
from megatrain.simulator.families.kinds import DENSE, FULL, Kind
from megatrain.simulator.families.mixtures import MIXTURE_FAMILIES
from megatrain.simulator.families.multimodal import INSIDE
from megatrain.simulator.families.parts import Kept, Part, Tensors, joined
from megatrain.simulator.families.refused import NOT_YET, REFUSED, UNDESCRIBED
from megatrain.simulator.families.shared_experts import SHARED_EXPERT_FAMILIES
from megatrain.simulator.families.written import WRITTEN_FAMILIES

__all__ = [
    "ALWAYS_MASKED",
    "FAMILIES",
    "FROM_THE_ROW",
    "INSIDE",
    "KEEP_ATTENTION",
    "NOT_YET",
    "REFUSED",
    "UNDESCRIBED",
    "WIDE_HEADS",
    "WRITTEN_OUT",
    "Architecture",
    "Kept",
    "Kind",
    "Part",
    "Tensors",
    "cut",
    "essential",
    "nulls_of",
    "text_config",
    "with_nulls",
]

_FILES = (DECODERS, DENSE_FAMILIES, MIXTURE_FAMILIES, SHARED_EXPERT_FAMILIES, GPT_FAMILIES, WRITTEN_FAMILIES, HYBRID_FAMILIES, ENTERED_FAMILIES)
FAMILIES: dict[str, Family] = {name: family for file in _FILES for name, family in file.items()}
"""by `model_type`"""
KEEP_ATTENTION = ("llama", "mistral", "qwen2", "qwen3")
"""families of which `runtime/layers/attention.py` can keep a layer's attention: one kernel, causal, without a mask"""
FROM_THE_ROW = {
    "biogpt": "whose mask knows no documents",
    "bloom": "whose mask knows no documents",
    "falcon": "whose mask knows no documents",
    "minimax": "whose linear attention lets a document see the ones before it",
    "mpt": "whose mask knows no documents",
}
"""families that cannot keep the documents of a row apart, with the reason"""
WRITTEN_OUT = ("bloom", "codegen", "gemma2", "gpt_oss", "gptj", "granite_swa", "granitemoe_swa", "mimo_v2_flash", "mpt", "vaultgemma")
"""families of which transformers computes the scores one by one, for a soft cap or sinks: no fused kernel has these"""
WIDE_HEADS = ("gemma4_text",)
"""families with heads of more than 256 elements, which no fused kernel takes that is given documents' lengths"""
ALWAYS_MASKED = ("falcon",)
"""families whose models make a mask for rows of one document too"""
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types", "layer_rope_theta", "num_attention_heads_per_layer")
"""keys with an entry for each layer"""


class Architecture:
    """A config, understood: sizes checked, a kind for each decoder layer, and the parts of each kind. Raises UserError in one line."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in FAMILIES:
            raise _unknown_family(model_type, where)
        self.name, self.family = model_type, FAMILIES[model_type]
        self.config = Config(config, where, self.family.defaults, self.family.names)
        c = self.config
        self.layers, self.hidden, self.vocabulary, self.tied = c.layers, c.hidden, c.vocabulary, c.flag("tie_word_embeddings")
        attention = self.family.attention(c) if self.family.attention else [FULL] * c.layers
        mlp = self.family.mlp(c) if self.family.mlp else [DENSE] * c.layers
        self.kinds = [Kind(*pair, entered=bool(self.family.entrance) and not index) for index, pair in enumerate(zip(attention, mlp, strict=True))]
        self.positions = self.family.positions(c) if self.family.positions else ()
        """tables that are added to the embedding's rows"""
        biased = self.family.head_bias
        self.head_bias = c.flag(biased) if isinstance(biased, str) else biased
        """the output projection has a bias"""
        self.decoders = {kind: joined(self.family.layer(c, kind)) for kind in dict.fromkeys(self.kinds)}
        """a decoder layer of each kind"""

    @functools.cached_property
    def scaled_from(self) -> int | None:
        """The shortest row in which some layer scales queries by their place in the row, whatever documents are in it; None where no layer does."""
        return self.family.scaled_from(self.config) if self.family.scaled_from else None

    @functools.cached_property
    def norm(self) -> Part:
        """The final norm."""
        return self.family.norm(self.family.norm_name, self.hidden)

    def signature(self, kind: Kind) -> str:
        """What the duration of the layer's ops depends on besides the tokens."""
        part = self.decoders[kind]
        return f"{self.name}-{self.hidden}x{part.mlp}-{part.attention}-v{self.vocabulary}{'-entered' if kind.entered else ''}"


def _unknown_family(model_type: object, where: str) -> UserError:
    """What is known of a `model_type` that is no family: why it is refused, that nobody has described it, or how it might be spelt."""
    where, allowed = f"{where}: model_type", f"one of {len(FAMILIES)} families, which `python -m megatrain.experiments.families` lists"
    if not isinstance(model_type, str):
        return UserError(where, found=repr(model_type), allowed=allowed, fix="name a model folder whose config.json has a model_type")
    if model_type in REFUSED:
        return UserError(where, found=f"{model_type!r}, {REFUSED[model_type]}", allowed=allowed, fix="use a model of one of these families")
    if model_type in UNDESCRIBED:
        found, fix = f"{model_type!r}, which is known to transformers and {NOT_YET}", "use a model of one of these families, or describe it (docs/adding.md)"
        return UserError(where, found=found, allowed=allowed, fix=fix)
    fix = suggestion(model_type, FAMILIES, suggestion(model_type, [*REFUSED, *UNDESCRIBED], "check model_type in config.json"))
    return UserError(where, found=f"{model_type!r}, an unknown model_type", allowed=allowed, fix=fix)


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The config of the first `layers` layers."""
    shorter = {key: value[:layers] if key in _PER_LAYER and isinstance(value, list) else value for key, value in config.items()}
    for key in ("mlp_only_layers", "moe_layers"):
        if isinstance(config.get(key), list):
            shorter[key] = [index for index in config[key] if not isinstance(index, int) or index < layers]  # what is no number is refused where it matters
    family = FAMILIES.get(str(config.get("model_type")))
    return {**shorter, family.names.get("num_hidden_layers", "num_hidden_layers") if family else "num_hidden_layers": layers}


def with_nulls(config: dict[str, Any]) -> dict[str, Any]:
    """The config as transformers wants it: null where `essential` put 0 for it, or named it in the list of nulls."""
    given = {key: None if value == 0 and key in ZERO_FOR_NULL else value for key, value in config.items() if key != NULLS}
    return {**given, **dict.fromkeys(nulls_of(config))}


def text_config(config: Any, where: str) -> dict[str, Any]:
    """The keys that matter of a config.json; of a multimodal model, those of its language model. Raises UserError for what is neither."""
    if not isinstance(config, dict):
        raise UserError(where, found=f"a JSON {type(config).__name__}", allowed="a Hugging Face config.json, one JSON object", fix="name a model folder")
    inner = config.get("text_config")
    if isinstance(inner, dict) and str(config.get("model_type")) not in FAMILIES:
        inside = INSIDE.get(str(config.get("model_type")))
        tied = inside.tie_of(config) if inside else inner.get("tie_word_embeddings", config.get("tie_word_embeddings"))
        said = {} if tied is None else {"tie_word_embeddings": tied}
        config = {**{key: value for key, value in inner.items() if key != "tie_word_embeddings"}, **said}
    if config.get("is_encoder_decoder"):
        raise UserError(f"{where}: is_encoder_decoder", found="true", allowed="a decoder alone", fix="use a decoder-only model")
    family = FAMILIES.get(str(config.get("model_type")))
    try:
        return essential(family.published(config, where) if family and family.published else config)
    except RecursionError:
        raise UserError(where, found="lists nested in lists without end", allowed="a Hugging Face config.json", fix="name a model folder") from None
