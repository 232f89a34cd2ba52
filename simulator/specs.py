"""ModelSpec: what is trained.

A model is a stack of *layers*: the embedding (`e`), the decoder layers (`0`, `1`, ...), the head (`h`: final norm and output
projection). With tied embeddings the final norm joins the embedding's layer and there is no `h`: one layer, used twice.
A layer's parameters lie flat, one tensor after the other, each padded to `ALIGNMENT` elements.
"""

from __future__ import annotations

import functools
import math
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from megatrain.simulator.errors import UserError, suggestion
from megatrain.simulator.families import (
    ALWAYS_MASKED,
    FROM_THE_ROW,
    KEEP_ATTENTION,
    WIDE_HEADS,
    WRITTEN_OUT,
    Architecture,
    Kept,
    Part,
    Tensors,
    cut,
    text_config,
)
from megatrain.simulator.files import read_json
from megatrain.simulator.workload import Dtype, Workload

ALIGNMENT = 64
"""Elements to which each tensor of a layer is padded: 128 bytes in bf16, 256 in fp32, what CUDA's and the CPU's widest loads ask for."""

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


def _tensors(pairs: Tensors) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, shape) for name, shape in pairs)


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One layer: a run of tensors that are loaded, trained and updated together."""

    name: str
    kind: Literal["embedding", "decoder", "head"]
    tensors: tuple[TensorSpec, ...]
    signature: str = ""
    """of a decoder layer: what the duration of its ops depends on besides the tokens, e.g. `qwen2-2048x11008-16:2x128-v151936`"""
    attention: str = ""
    """of a decoder layer: `full_attention`, `sliding_attention` or `linear_attention`"""
    inner: int = 0
    """of a decoder layer: elements a token between its MLP's projections, those of all its experts together"""

    @functools.cached_property
    def parameters(self) -> int:
        return sum(tensor.elements for tensor in self.tensors)

    @functools.cached_property
    def elements(self) -> int:
        """Elements of the flat buffer, padding included. The padding is zero and stays zero under AdamW."""
        return sum(tensor.padded for tensor in self.tensors)


class Heads(NamedTuple):
    """An attention's heads."""

    queries: int
    pairs: int
    """keys with their values"""
    size: int
    """elements of the largest of a query, a key and a value"""


class Work(NamedTuple):
    """What an op computes and moves."""

    linear_flops: int
    """of matrix products: 2 x the elements that a token is multiplied with"""
    attention_flops: int
    """of queries, keys and values, masked pairs left out; of linear attention, its convolution and recurrence"""
    moved_bytes: int
    """read and written in device memory by elementwise kernels, and weights read and their gradients written"""

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops


class Saved(NamedTuple):
    """Bytes by what is kept of a decoder layer from its forward to its backward."""

    store: int
    """everything that autograd keeps: on the device"""
    recompute: int
    """the layer's input: on the device"""
    park: int
    """the layer's input: on the host"""


class KeptAttention(NamedTuple):
    """Bytes of what attention leaves for its backward, in one buffer."""

    output: int
    """[batch, sequence, heads, value size] in the compute dtype"""
    log_sum_exp: int
    """[batch, heads, sequence] fp32"""

    @property
    def offset(self) -> int:
        """Of the log-sum-exp: the output's bytes in whole 256-byte lines."""
        return -(-self.output // 256) * 256

    @property
    def bytes(self) -> int:
        return self.offset + self.log_sum_exp


_PASSES = {"forward": 1, "recompute": 1, "backward": 2}


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A decoder-only language model, as its Hugging Face config.json gives it. `simulator/families` knows what its layers are made of."""

    name: str
    config: dict[str, Any]
    """config.json's keys that matter, without nulls: enough to build the model again"""

    def __post_init__(self) -> None:
        _ = self._architecture

    def __hash__(self) -> int:
        return hash((self.name, self.family, self.layers, self.hidden))

    @functools.cached_property
    def _architecture(self) -> Architecture:
        return Architecture(self.config, f"model {self.name}")

    @property
    def family(self) -> str:
        """transformers' `model_type`"""
        return self._architecture.name

    @property
    def layers(self) -> int:
        return self._architecture.layers

    @property
    def hidden(self) -> int:
        return self._architecture.hidden

    @property
    def vocabulary(self) -> int:
        return self._architecture.vocabulary

    @property
    def positions(self) -> tuple[str, ...]:
        """The embedding's tensors that are added to a token's row by its position; none where positions are the layers' business."""
        return tuple(name for name, _ in self._architecture.positions)

    @property
    def tied(self) -> bool:
        """The output projection is the embedding matrix."""
        return self._architecture.tied

    @property
    def projection(self) -> str:
        """The output projection's weight by its full name."""
        return f"{self._architecture.family.head}.weight"

    @functools.cached_property
    def stack(self) -> dict[str, LayerSpec]:
        """Every layer by name, in forward order: `e`, `0`, ..., and `h` where the head has weights of its own."""
        shape, family = self._architecture, self._architecture.family
        table = (TensorSpec(f"{family.embedding}.weight", (self.vocabulary, self.hidden)), *_tensors(shape.positions))
        head = _tensors(shape.norm.tensors)
        if not self.tied:
            head += (TensorSpec(self.projection, (self.vocabulary, self.hidden)),)
        if shape.head_bias:
            head += (TensorSpec("lm_head.bias", (self.vocabulary,)),)
        tensors = {kind: _tensors(part.tensors) for kind, part in shape.decoders.items()}
        stack = [LayerSpec(name=EMBEDDING, kind="embedding", tensors=table + head if self.tied else table)]
        stack += [
            LayerSpec(
                name=str(index), kind="decoder", tensors=tensors[kind], signature=shape.signature(kind), attention=kind.attention,
                inner=shape.decoders[kind].inner,
            )
            for index, kind in enumerate(shape.kinds)
        ]  # fmt: skip
        if not self.tied:
            stack.append(LayerSpec(name=HEAD, kind="head", tensors=head))
        return {layer.name: layer for layer in stack}

    @functools.cached_property
    def decoders(self) -> tuple[LayerSpec, ...]:
        """The decoder layers, in order."""
        return tuple(layer for layer in self.stack.values() if layer.kind == "decoder")

    @property
    def head(self) -> str:
        """The layer that the head reads its weights from."""
        return EMBEDDING if self.tied else HEAD

    @functools.cached_property
    def parameters(self) -> int:
        return sum(layer.parameters for layer in self.stack.values())

    @functools.cached_property
    def active_parameters(self) -> int:
        """Those that one token uses: all but the experts that it is not routed to."""
        return self.parameters - sum(self._part(layer.name).idle for layer in self.decoders)

    @functools.cached_property
    def shape(self) -> str:
        """The signatures of its kinds of decoder layers, joined by `+`: what the durations of its ops depend on besides the tokens."""
        return "+".join(dict.fromkeys(layer.signature for layer in self.decoders))

    def _part(self, layer: str) -> Part:
        return self._architecture.decoders[self._architecture.kinds[int(layer)]]

    def layer_flops(self, layer: str, tokens: int, sequence: int) -> int:
        """Forward FLOPs of a decoder layer: 2 per element of the matrices that a token uses, and attention without its masked half."""
        part = self._part(layer)
        return 2 * tokens * part.active + self._attention_flops(part, tokens, sequence)

    @staticmethod
    def _attention_flops(part: Part, tokens: int, sequence: int) -> int:
        """`pair` FLOPs for each token that a query sees: half of S for full attention; with a window W < S, W (S - W / 2) pairs a sequence."""
        window = min(part.window or sequence, sequence)
        return tokens * part.state + tokens * part.pair * window * (2 * sequence - window) // (2 * sequence)

    def head_flops(self, tokens: int) -> int:
        """Forward FLOPs of the output projection."""
        return 2 * tokens * self.hidden * self.vocabulary

    def work(self, kind: str, layer: str, workload: Workload, *, kept: bool = False) -> Work:
        """What one op of a compute kind does, on one micro-batch; `layer` matters to a decoder layer's ops alone. A recompute whose attention was
        `kept` does everything but that.

        With T tokens, b bytes an element, P parameters of the layer, V words, d the hidden size:

            forward         FLOPs once;   the forward traffic of its parts (families/parts.py) T, that of written-out scores T S, and P b
            backward        FLOPs twice;  the backward traffic T, and 2 P b: weights read, gradients written
            head            FLOPs thrice; both traffics of the norm T; T V (2 b + 32): logits cast, softmax in fp32 (8), and backward zeros (4),
                            softmax (12) and a cast; of the matrix two reads, a gradient and its sum, V d (4 b + 8) a loss chunk
            loss            the head's forward: FLOPs once; the norm's forward traffic T; T V (b + 12): logits cast, softmax; V d b a loss chunk
            embed           rows read and written, 2 T d b; backward, read, summed in fp32 into a zeroed table, T d (b + 8) + 4 V d
        """
        tokens, width, hidden = workload.tokens, DTYPE_BYTES[workload.dtype], self.hidden
        table = self.vocabulary * hidden
        if kind == "embed":
            return Work(0, 0, 2 * tokens * hidden * width)
        if kind == "embed_backward":
            return Work(0, 0, tokens * hidden * (width + 8) + 4 * table)
        if kind == "head":
            norm, chunks = self._architecture.norm, -(-tokens // workload.loss_chunk)
            moved = tokens * (norm.forward.bytes(width) + norm.backward.bytes(width) + self.vocabulary * (2 * width + 32))
            return Work(3 * self.head_flops(tokens), 0, moved + chunks * table * (3 * width + (width + 8 if chunks > 1 else 0)))
        if kind == "loss":
            moved = tokens * (self._architecture.norm.forward.bytes(width) + self.vocabulary * (width + 12))
            return Work(self.head_flops(tokens), 0, moved + -(-tokens // workload.loss_chunk) * table * width)
        part, passes = self._part(layer), _PASSES[kind]
        traffic, matrix = (part.backward, part.scores.backward) if kind == "backward" else (part.forward, part.scores.forward)
        return Work(
            passes * 2 * tokens * part.active, 0 if kept else passes * self._attention_flops(part, tokens, workload.sequence),
            tokens * (traffic.bytes(width) + workload.sequence * matrix.bytes(width)) + passes * width * self.stack[layer].parameters,
        )  # fmt: skip

    def saved_bytes(self, layer: str, tokens: int, sequence: int, dtype: Dtype) -> int:
        """Bytes that autograd keeps of a decoder layer between its forward and its backward, eager; of attention its matrix only where it is written out.

        Per token, with b bytes an element: a norm keeps its input in fp32 (where that is a copy), the normalised row and its own output;
        attention keeps q, k, v and its output; a gated MLP keeps gate, up, the activation and their product. The sum over the layer's parts.
        """
        part, width = self._part(layer), DTYPE_BYTES[dtype]
        return tokens * (part.kept.bytes(width) + sequence * part.scores.kept.bytes(width))

    @functools.cached_property
    def writes_scores(self) -> bool:
        """Attention's scores are written out in some layer: memory grows with the square of a row."""
        return any(part.scores.kept != Kept() for part in self._architecture.decoders.values())

    @functools.cached_property
    def heads(self) -> Heads:
        """Those of an attention layer; in latent attention each head has its own keys, of other sizes than its values."""
        c = self._architecture.config
        if c.get("kv_lora_rank") is not None:
            return Heads(c.heads, c.heads, max(c.size("qk_nope_head_dim") + c.size("qk_rope_head_dim"), c.size("v_head_dim", c.hidden // c.heads)))
        return Heads(c.heads, c.kv_heads, c.head_dim)

    def keeps_attention(self, layer: str) -> bool:
        """The runtime can keep the decoder layer's attention from its forward for its backward."""
        return self.family in KEEP_ATTENTION and self.stack[layer].attention == "full_attention"

    def kept_attention(self, layer: str, tokens: int, dtype: Dtype) -> KeptAttention:
        """What is kept of a decoder layer's attention."""
        attended = self._part(layer).attended
        return KeptAttention(tokens * attended.low * DTYPE_BYTES[dtype], 4 * tokens * attended.wide)

    def most_saved_bytes(self, tokens: int, sequence: int, dtype: Dtype) -> int:
        """`saved_bytes` of the decoder layer that keeps most."""
        return max(self.saved_bytes(layer.name, tokens, sequence, dtype) for layer in {layer.signature: layer for layer in self.decoders}.values())

    def transient_bytes(self, tokens: int, sequence: int, dtype: Dtype) -> int:
        """Bytes that a decoder layer's backward holds besides what was saved, of the layer with most: its parameters' gradients before they go
        where they belong, P b, and three temporaries of the MLP, 3 T F b, F the width between its projections; where scores are written out their
        temporaries too, which need not be there at the same time.
        """
        width = DTYPE_BYTES[dtype]
        return max(
            width * (layer.elements + 3 * tokens * layer.inner) + tokens * sequence * self._part(layer.name).scores.held.bytes(width)
            for layer in self.decoders
        )  # fmt: skip

    def against_documents(self, sequence: int) -> str | None:
        """Why the documents of a row of `sequence` tokens cannot be kept apart; None where they can."""
        if self.family in FROM_THE_ROW:
            return f"{self.family}, {FROM_THE_ROW[self.family]}"
        first = self._architecture.scaled_from
        if first is not None and sequence >= first:
            return f"{self.family}, which scales queries by their place in a row of {first} tokens or more"
        return None

    def documents_by(self, dtype: Dtype) -> Literal["lengths", "mask"]:
        """What keeps documents of a row apart on a GPU: their lengths, which a fused kernel is given, or a mask."""
        return "mask" if dtype == "fp32" or self.family in (*WRITTEN_OUT, *WIDE_HEADS) else "lengths"

    def mask_bytes(self, workload: Workload) -> int:
        """Bytes of what says which token sees which, where causality alone does not: with documents, or a window shorter than a row.

        A byte a pair for each type of attention, S S, and with documents for each row, B S S; and in a layer that reads one, the same for each
        row in the compute dtype, as it is added to the scores, B S S b. Scores that are written out always have a mask, of both forms. Linear attention has none, and neither has a kernel that is told lengths.
        """
        if workload.documents and self.documents_by(workload.dtype) == "lengths":
            return 0
        pairs, masks, added = workload.sequence**2, dict[str, int](), workload.batch * workload.sequence**2 * DTYPE_BYTES[workload.dtype]
        for layer in self.decoders:
            windowed = 0 < self._part(layer.name).window < workload.sequence
            written = self._part(layer.name).scores.kept != Kept()
            always = written or self.family in ALWAYS_MASKED
            if layer.attention != "linear_attention" and (workload.documents or windowed or always):
                masks[layer.attention] = pairs * (workload.batch if workload.documents else 1) + (added if written else 0)
        return sum(masks.values()) + (added if masks else 0)

    def saved(self, layer: str, tokens: int, sequence: int, dtype: Dtype) -> Saved:
        """What each way of keeping a decoder layer's activations takes."""
        row = tokens * self.hidden * DTYPE_BYTES[dtype]
        return Saved(self.saved_bytes(layer, tokens, sequence, dtype), row, row)

    def with_layers(self, layers: int) -> ModelSpec:
        """The model of the first `layers` layers."""
        return ModelSpec(name=self.name, config=cut(self.config, min(layers, self.layers)))

    def shortest(self, layers: int) -> ModelSpec:
        """The model of the fewest first layers, at least `layers`, among which is every kind of decoder layer."""
        signatures = [layer.signature for layer in self.decoders]
        every = max(signatures.index(signature) for signature in dict.fromkeys(signatures)) + 1
        return self.with_layers(max(layers, every))

    @classmethod
    def from_config(cls, config: Any, where: str, name: str = "") -> ModelSpec:
        """From the content of a Hugging Face config.json. Raises UserError for what is missing, contradictory or not supported."""
        essentials = text_config(config, where)
        Architecture(essentials, where)  # so that an error names the file
        return cls(name=name or str(config.get("_name_or_path") or essentials["model_type"]), config=essentials)

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
                names = [file.stem for file in library.glob("*.json")]
                raise UserError(
                    f"model {source}", found="no such folder or file",
                    allowed=f"a Hugging Face model folder, a config.json, or one of the {len(names)} names in simulator/library/models, such as qwen2.5-7b",
                    fix=suggestion(source, names, "check the path or the name"),
                )  # fmt: skip
        name = path.parent.name if path.name == "config.json" else path.stem
        return cls.from_config(read_json(path), str(path), name)
