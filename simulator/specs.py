"""What is trained, on what, how: ModelSpec, HardwareSpec, Workload.

A model is a stack of *layers*: the embedding (`e`), the decoder layers (`0`, `1`, ...), the head (`h`: final norm and output
projection). With tied embeddings the final norm joins the embedding's layer and there is no `h`: one layer, used twice.
A layer's parameters lie flat, one tensor after the other, each padded to `ALIGNMENT` elements.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_json

ALIGNMENT = 64
"""Elements to which each tensor of a layer is padded: 128 bytes in bf16, 256 in fp32, what CUDA's and the CPU's widest loads ask for."""

Dtype = Literal["bf16", "fp32"]
DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}
EMBEDDING, HEAD = "e", "h"


class TensorSpec(msgspec.Struct, frozen=True):
    """One parameter tensor: its name inside its layer, and its shape."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        """Elements it takes in the layer's flat buffer."""
        return -(-self.elements // ALIGNMENT) * ALIGNMENT


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One layer: a run of tensors that are loaded, trained and updated together."""

    name: str
    kind: Literal["embedding", "decoder", "head"]
    tensors: tuple[TensorSpec, ...]

    @functools.cached_property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @functools.cached_property
    def elements(self) -> int:
        """Elements of the flat buffer, padding included. The padding is zero and stays zero under AdamW."""
        return sum(tensor.padded for tensor in self.tensors)


_FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "mistral": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
_MOST_MICRO_BATCHES = 1024  # a schedule has every micro-batch's ops: at 48 layers this is half a million, half a minute to lower
_LARGEST_SIZE = 2**24  # a width, depth or vocabulary beyond this is a mistake, not a model


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """The shape of a decoder-only language model, as its Hugging Face config.json gives it."""

    name: str
    family: str
    """transformers' `model_type`"""
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """the output projection is the embedding matrix"""

    def __post_init__(self) -> None:
        where = f"model {self.name}"
        if self.family not in _FAMILIES:
            raise UserError(f"{where}: model_type", found=repr(self.family), allowed=", ".join(_FAMILIES), fix="use a model of one of these families")
        for field in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocabulary"):
            if not 0 < getattr(self, field) <= _LARGEST_SIZE:
                raise UserError(f"{where}: {field}", found=getattr(self, field), allowed=f"1 to {_LARGEST_SIZE}", fix="correct config.json")
        if self.heads % self.kv_heads:
            raise UserError(
                f"{where}: kv_heads",
                found=self.kv_heads,
                allowed=f"a divisor of the {self.heads} attention heads",
                fix="correct num_key_value_heads in config.json",
            )

    @functools.cached_property
    def decoder(self) -> tuple[TensorSpec, ...]:
        """Tensors of one decoder layer, in the order transformers lists them."""
        traits = _FAMILIES[self.family]
        query, key, hidden, ffn = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.intermediate
        tensors: list[tuple[str, tuple[int, ...]]] = []
        for name, rows in (("q", query), ("k", key), ("v", key)):
            tensors.append((f"self_attn.{name}_proj.weight", (rows, hidden)))
            if traits["qkv_bias"]:
                tensors.append((f"self_attn.{name}_proj.bias", (rows,)))
        tensors.append(("self_attn.o_proj.weight", (hidden, query)))
        if traits["qk_norm"]:
            tensors += [(f"self_attn.{name}_norm.weight", (self.head_dim,)) for name in "qk"]
        tensors += [(f"mlp.{name}_proj.weight", (ffn, hidden)) for name in ("gate", "up")]
        tensors.append(("mlp.down_proj.weight", (hidden, ffn)))
        tensors += [(f"{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention")]
        return tuple(TensorSpec(*tensor) for tensor in tensors)

    @functools.cached_property
    def stack(self) -> dict[str, LayerSpec]:
        """Every layer by name, in forward order: `e`, `0`, ..., and `h` where the head has weights of its own."""
        table = TensorSpec("embed_tokens.weight", (self.vocabulary, self.hidden))
        norm = TensorSpec("norm.weight", (self.hidden,))
        projection = TensorSpec("lm_head.weight", (self.vocabulary, self.hidden))
        stack = [LayerSpec(name=EMBEDDING, kind="embedding", tensors=(table, norm) if self.tied else (table,))]
        stack += [LayerSpec(name=str(index), kind="decoder", tensors=self.decoder) for index in range(self.layers)]
        if not self.tied:
            stack.append(LayerSpec(name=HEAD, kind="head", tensors=(norm, projection)))
        return {layer.name: layer for layer in stack}

    @property
    def head(self) -> str:
        """The layer that the head reads its weights from."""
        return EMBEDDING if self.tied else HEAD

    @functools.cached_property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.stack.values())

    @property
    def shape(self) -> str:
        """What the duration of a layer's op depends on besides the tokens, e.g. `qwen2-2048x11008-16:2x128-v151936`."""
        return f"{self.family}-{self.hidden}x{self.intermediate}-{self.heads}:{self.kv_heads}x{self.head_dim}-v{self.vocabulary}"

    def layer_flops(self, tokens: int, sequence: int) -> int:
        """Forward FLOPs of one decoder layer: 2 per parameter of its matrices and token, and causal attention, half of 4 S h d per token."""
        matrices = sum(tensor.elements for tensor in self.decoder if len(tensor.shape) == 2)
        return tokens * (2 * matrices + 2 * sequence * self.heads * self.head_dim)

    def head_flops(self, tokens: int) -> int:
        """Forward FLOPs of the output projection."""
        return 2 * tokens * self.hidden * self.vocabulary

    def saved_bytes(self, tokens: int, dtype: Dtype) -> int:
        """Bytes that autograd keeps of one decoder layer between its forward and its backward, eager, attention without its matrix.

        Per token, with b bytes an element: each of two norms keeps its input in fp32 (where that is a copy), the normalised row and
        its own output; attention keeps q, k, v and its output; the gated MLP keeps gate, up, silu(gate) and their product.
        """
        width = DTYPE_BYTES[dtype]
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        upcast = 8 * self.hidden if width < 4 else 4 * self.hidden  # in fp32 the first norm's input is the layer's own, not a copy
        norms = upcast + 2 * 4 + 2 * 2 * width * self.hidden
        attention = width * (2 * query + 2 * key) + 4 * self.heads
        if _FAMILIES[self.family]["qk_norm"]:  # two more norms, over the head dimension
            attention += (4 + width) * (query + key) + 4 * (self.heads + self.kv_heads)
        return tokens * (norms + attention + 4 * width * self.intermediate)

    @classmethod
    def from_config(cls, config: Any, where: str, name: str = "") -> ModelSpec:
        """From the content of a Hugging Face config.json. Raises UserError for what is missing, contradictory or not supported."""
        if not isinstance(config, dict):
            raise UserError(where, found=f"a JSON {type(config).__name__}", allowed="a Hugging Face config.json, one JSON object", fix="name a model folder")

        def size(key: str, default: object = None) -> int:
            value = config.get(key)
            value = default if value is None else value
            if not isinstance(value, int) or isinstance(value, bool):
                raise UserError(f"{where}: {key}", found="nothing" if value is None else repr(value), allowed="a whole number", fix="correct config.json")
            return value

        family = config.get("model_type")
        if not isinstance(family, str) or family not in _FAMILIES:
            raise UserError(f"{where}: model_type", found=repr(family), allowed=", ".join(_FAMILIES), fix="use a model of one of these families")
        for key, allowed in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False), ("attention_dropout", 0)):
            if key in config and config[key] != allowed:
                raise UserError(f"{where}: {key}", found=repr(config[key]), allowed=repr(allowed), fix="use a model without this variation")
        kinds = config.get("layer_types") or []
        if not isinstance(kinds, list):
            raise UserError(f"{where}: layer_types", found=repr(kinds), allowed="a list", fix="correct config.json")
        sliding = config.get("use_sliding_window") or (family == "mistral" and config.get("sliding_window") is not None)
        if sliding or any(kind != "full_attention" for kind in kinds):
            raise UserError(
                f"{where}: sliding_window",
                found=config.get("sliding_window", "sliding layers"),
                allowed="full attention",
                fix="use a model with full attention in every layer",
            )
        hidden, heads = size("hidden_size"), size("num_attention_heads")
        if heads > 0 and config.get("head_dim") is None and hidden % heads:
            raise UserError(f"{where}: hidden_size", found=hidden, allowed=f"a multiple of num_attention_heads = {heads}", fix="correct config.json")
        return cls(
            name=name or str(config.get("_name_or_path") or family),
            family=family,
            layers=size("num_hidden_layers"),
            hidden=hidden,
            intermediate=size("intermediate_size"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_dim=size("head_dim", hidden // max(heads, 1)),
            vocabulary=size("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @classmethod
    def load(cls, source: str) -> ModelSpec:
        """From a Hugging Face directory, a config.json, or a name in the library (`simulator/library/models`)."""
        path = Path(source)
        if os.path.isdir(path):  # unlike Path.is_dir, false for a name that is too long or may not be looked at
            path = path / "config.json"
        elif path.suffix != ".json" and not os.path.exists(path):
            library = Path(__file__).parent / "library" / "models"
            path = library / f"{source}.json"
            if not os.path.exists(path):
                known = ", ".join(sorted(file.stem for file in library.glob("*.json")))
                raise UserError(
                    f"model {source}",
                    found="no such folder or file",
                    allowed=f"a Hugging Face model folder, a config.json, or one of {known}",
                    fix="check the path",
                )
        name = path.parent.name if path.name == "config.json" else path.stem
        return cls.from_config(read_json(path), str(path), name)


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How it is trained: everything that decides the arithmetic of a step. Two plans of one workload give the same bits."""

    batch: int
    """sequences per micro-batch"""
    sequence: int
    """tokens per sequence"""
    accumulation: int = 1
    """micro-batches per optimizer step"""
    dtype: Dtype = "bf16"
    """what layers compute in and gradients leave them in; the master weights are fp32 always"""
    clipping: Literal["global", "none"] = "global"
    """clip by the norm over all gradients, or not at all"""
    compiled: bool = False
    """layers through torch.compile: faster, a third less activations, and other roundings than eager ones"""
    loss_chunk: int = 1024
    """tokens whose logits exist at one time; part of the arithmetic, because the head's gradient is summed chunk by chunk"""

    def __post_init__(self) -> None:
        for field, most in (("batch", 2**20), ("sequence", 2**24), ("accumulation", _MOST_MICRO_BATCHES), ("loss_chunk", 2**31)):
            if not 1 <= getattr(self, field) <= most:
                raise UserError(f"workload: {field}", found=getattr(self, field), allowed=f"1 to {most}", fix=f"set {field} within these")

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch."""
        return self.batch * self.sequence

    @property
    def step_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.tokens * self.accumulation

    @property
    def shape(self) -> str:
        return f"{self.batch}x{self.sequence}-{self.dtype}" + ("-compiled" if self.compiled else "")
