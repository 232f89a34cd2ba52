"""ModelSpec: a model as a stack of layers, with the tensors, bytes and FLOPs of each layer.

The layers are the embedding (`e`), the decoder layers (`0`, `1` and so on) and the head (`h`),
which is the final norm and the output projection. With tied embeddings there is no `h`: the final
norm belongs to the layer `e`, which is used twice. The parameters of a layer are stored in one flat
buffer, one tensor after the other, each padded to a multiple of `ALIGNMENT` elements.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_config
from megatrain.simulator.base.names import is_path, meant, suggestion
from megatrain.simulator.model.adapter import adapter_in, no_whole_weights
from megatrain.simulator.model.families import (
    CAN_SAVE_ATTENTION,
    Architecture,
    Kept,
    LayerPieces,
    Part,
    Tensors,
    cut,
    text_config,
)
from megatrain.simulator.model.layer import (
    DTYPE_BYTES,
    EMBEDDING,
    HEAD,
    Heads,
    KeptAttention,
    LayerSpec,
    TensorSpec,
)
from megatrain.simulator.model.workload import FP8_MULTIPLE, Workload


def _tensors(pairs: Tensors) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, shape) for name, shape in pairs)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A decoder-only language model, described by its Hugging Face config.json. The parts of its
    layers are in `simulator/model/families`. Raises UserError if the config is not supported.
    """

    name: str
    """The name of the model."""
    config: dict[str, Any]
    """The keys of config.json that are needed to build the model, without null values."""

    def __post_init__(self) -> None:
        _ = self.architecture

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.name, self.family, self.layers, self.hidden))

    @functools.cached_property
    def architecture(self) -> Architecture:
        return Architecture(self.config, f"model {self.name}")

    @property
    def family(self) -> str:
        """The family, which is `model_type` in transformers."""
        return self.architecture.name

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return self.architecture.layers

    @property
    def hidden(self) -> int:
        """The hidden size."""
        return self.architecture.hidden

    @property
    def carried(self) -> int:
        """Elements per token that are passed from layer to layer: the width of a layer's input, of
        its output, and of a checkpoint. Their number is the hidden size, or more in some families.
        """
        return self.architecture.carried

    @property
    def vocabulary(self) -> int:
        """The vocabulary size."""
        return self.architecture.vocabulary

    @property
    def longest_row(self) -> int | None:
        """The most tokens of a row, from a key of the model's config such as
        `max_position_embeddings`. None if the config does not have the key.
        """
        key = self.architecture.family.longest or "max_position_embeddings"
        found = self.config.get(key, self.config.get("n_positions"))
        return found if isinstance(found, int) and found > 0 else None

    @property
    def positions(self) -> tuple[str, ...]:
        """The names of the embedding's position tensors. Empty if the decoder layers handle
        positions.
        """
        return tuple(name for name, _ in self.architecture.positions)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables in which the embedding looks up each token. The first table has
        one row for each word of the vocabulary.
        """
        return (
            f"{self.architecture.family.embedding}.weight",
            *(name for name, _ in self.architecture.tables),
        )

    @property
    def table_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes (rows, columns) of `tables`."""
        return (
            (self.vocabulary, self.hidden),
            *((rows, columns) for _, (rows, columns) in self.architecture.tables),
        )

    @property
    def tied(self) -> bool:
        """Whether the output projection is the embedding matrix."""
        return self.architecture.tied

    @property
    def caps_logits(self) -> bool:
        """Whether the logits have a soft cap."""
        return bool(self.architecture.config.get("final_logit_softcapping"))

    @property
    def scales_logits(self) -> bool:
        """Whether the logits are multiplied or divided by a number."""
        return self.architecture.family.scales_logits

    @property
    def projection(self) -> str:
        """The full name of the output projection's weight."""
        return f"{self.architecture.family.head}.weight"

    @functools.cached_property
    def stack(self) -> dict[str, LayerSpec]:
        """Every layer by name, in forward order. `h` is absent if the embeddings are tied."""
        shape, family = self.architecture, self.architecture.family
        table = (
            TensorSpec(f"{family.embedding}.weight", (self.vocabulary, self.hidden)),
            *_tensors(shape.tables),
            *_tensors(shape.positions),
        )
        head = _tensors(shape.norm.tensors)
        if not self.tied:
            head += (TensorSpec(self.projection, (self.vocabulary, self.hidden)),)
        if shape.head_bias:
            head += (TensorSpec("lm_head.bias", (self.vocabulary,)),)
        tensors = {kind: _tensors(part.tensors) for kind, part in shape.decoders.items()}
        stack = [
            LayerSpec(
                name=EMBEDDING, kind="embedding", tensors=table + head if self.tied else table
            )
        ]
        stack += [
            LayerSpec(
                name=str(index),
                kind="decoder",
                tensors=tensors[kind],
                signature=shape.signature(kind),
                attention=kind.attention,
                inner=shape.decoders[kind].inner,
                experts=shape.decoders[kind].idle > 0,
            )
            for index, kind in enumerate(shape.kinds)
        ]
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
        """The number of parameters."""
        return sum(layer.parameters for layer in self.stack.values())

    @functools.cached_property
    def active_parameters(self) -> int:
        """The number of parameters that one token uses: all except those of the experts that the
        token is not routed to.
        """
        return self.parameters - sum(self.part(layer.name).idle for layer in self.decoders)

    @functools.cached_property
    def shape(self) -> str:
        """The distinct signatures of the decoder layers, joined by `+`. It is the model's part of
        `Op.shape` for ops of the embedding and the head.
        """
        return "+".join(dict.fromkeys(layer.signature for layer in self.decoders))

    def part(self, layer: str, *, fused: bool = False) -> Part:
        """Returns the parts of a decoder layer. With `fused`, the flash kernel computes its scores
        if it has sinks.
        """
        shape = self.architecture
        return (shape.with_flash if fused else shape.decoders)[shape.kinds[int(layer)]]

    def computed_part(self, layer: str, workload: Workload) -> Part:
        """Returns the parts of a decoder layer with the attention kernel of `workload`."""
        return self.part(layer, fused=self.fuses_scores(workload))

    def fuses_scores(self, workload: Workload) -> bool:
        """Returns whether the kernel that `workload` names computes the scores of this model, which
        transformers writes out. It does for scores with sinks.
        """
        return workload.attention is not None and self.has_sinks

    @functools.cached_property
    def has_sinks(self) -> bool:
        """Whether attention has sinks that the flash kernel can compute."""
        shape = self.architecture
        return self.writes_scores and all(
            part.scores.kept == Kept() for part in shape.with_flash.values()
        )

    def layer_pieces(self, layer: str, *, compiled: bool = False) -> LayerPieces | None:
        """Returns the parts of a decoder layer that are computed in pieces of tokens, or None if
        its MLP cannot be computed in pieces.

        In a `compiled` layer, the norm before attention is not among them, because the compiler
        fuses it with other ops, and it has no temporary tensors.
        """
        pieces = self.architecture.pieces[self.architecture.kinds[int(layer)]]
        return pieces._replace(first=None) if pieces and compiled else pieces

    def pieces_obstacle(self, *, compiled: bool = False) -> str | None:
        """Returns why decoder layers cannot be computed in pieces of tokens, or None if they can.

        They can if the MLP of each layer, or its router and experts, are one module that computes
        each token by itself and draws no random numbers. If layers are `compiled`, none may have
        linear attention or a state-space mixer, because there is no formula for their memory.
        """
        if compiled and not all(layer.compilable for layer in self.decoders):
            return f"compiled layers of {self.family}, some of which have no softmax attention"
        if self.architecture.family.carried:
            return f"{self.family}, whose layers carry more than one row for each token"
        if self.architecture.family.draws:
            return f"{self.family}, whose experts draw random numbers"
        layers = {layer.signature: layer.name for layer in self.decoders}
        if all(self.layer_pieces(name) for name in layers.values()):
            return None
        return f"{self.family}, in which the MLP of some layer is not one module"

    def skips_mlp(self, layer: str) -> bool:
        """Returns whether a recompute in pieces can leave out the MLP of a decoder layer.

        It can if the output of the MLP is only added to the output of the layer. It cannot if there
        is a norm after the MLP, which saves or reads this output, or if the layer has experts and
        the model is trained with a router loss, which reads the logits of the router.
        """
        pieces = self.layer_pieces(layer)
        if pieces is None or self.router_logits(layer):
            return False
        return not self.part(layer).reads_output

    def last_products(self, layer: str, workload: Workload) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape [out, in] of the weights of a decoder layer whose products a short
        recompute leaves out. It is empty if `workload` has no short recompute.

        These are the projections of an MLP's output. Gradients do not depend on this output if it
        is only added to that of the layer. If there is a norm after the MLP, a recompute computes
        this norm, so it needs the product. In pieces of tokens, the op `backward` computes the MLP
        again, without the norm, so it never needs the product.
        """
        if not workload.short_recompute:
            return {}
        if workload.piece:
            pieces = self.layer_pieces(layer)
            return dict(pieces.mlp.last) if pieces else {}
        part = self.part(layer)
        return {} if part.reads_output else dict(part.last)

    def rebuilding_products(self, layer: str, workload: Workload) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape [out, in] of the weights whose gradients a decoder layer computes
        first if it rebuilds outputs (`Knobs.rebuild_outputs`). It is empty if the layer cannot.

        These are the projections of an MLP's output. Layers can rebuild outputs if they are
        compiled, without pieces of tokens, which save no outputs, and without fp8 products, whose
        operands the compiler rebuilds anyway. In addition, all decoder layers of the model must
        have these properties, because the largest layer decides the memory:

        * The MLP is gated by a SiLU. For the tanh of a GELU, the compiler computes in fp32, and the
          peak of the backward pass is up to 30 % higher (Gemma, Gemma 3). MLPs without a gate are
          left out, because some of them have a higher peak, too (Phi, StarCoder 2).
        * Gate and up are separate projections. If they are one projection, their gradient is one
          tensor, and the peak is up to 3 % higher (GLM, Phi-3).
        * A fused kernel computes attention. If scores are written out, the compiler also computes
          the softmax again, and the peak is 18 % higher (GraniteSWA).

        The peaks are counts, in tests/simulator/memory/rebuilt_memory.toml.
        """
        able = workload.compiled and not workload.piece and not workload.fp8
        return dict(self.part(layer).last) if able and self._can_rebuild else {}

    @functools.cached_property
    def _can_rebuild(self) -> bool:
        """Whether the decoder layers can rebuild outputs if they are compiled. Layers with sinks
        cannot, also if a flash kernel computes their scores, because they were not counted.
        """
        return (
            all(part.silu_gated for part in self.architecture.decoders.values())
            and all(layer.compilable for layer in self.decoders)
            and not self.writes_scores
        )

    def router_logits(self, layer: str) -> int:
        """Returns the elements per token of the logits that a decoder layer keeps for the router
        loss. 0 without experts, or if the config does not ask for the loss.
        """
        return self.part(layer).logits if self.config.get("output_router_logits") else 0

    def fp8_weights(self, layer: str) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape [out, in] of the weights of a decoder layer whose products can be
        in fp8.

        These are its linear layers whose sizes are multiples of `FP8_MULTIPLE`, without routers and
        experts.
        """
        return {
            name: shape
            for name, shape in self.part(layer).linears
            if not any(size % FP8_MULTIPLE for size in shape)
        }

    def fp8_products(self, layer: str, workload: Workload) -> dict[str, tuple[int, ...]]:
        """Returns the `fp8_weights` of a decoder layer if `workload` multiplies in fp8, otherwise
        an empty dict.
        """
        able = workload.fp8 and not workload.tokens % FP8_MULTIPLE
        return self.fp8_weights(layer) if able else {}

    @functools.cached_property
    def writes_scores(self) -> bool:
        """Whether some layer writes out its attention scores, if the workload names no kernel that
        computes them. Its memory then grows with the square of the sequence length.
        """
        return any(part.scores.kept != Kept() for part in self.architecture.decoders.values())

    @functools.cached_property
    def heads(self) -> Heads:
        """The heads of an attention layer. In latent attention, each head has its own keys, whose
        size differs from that of its values.
        """
        c = self.architecture.config
        if c.get("kv_lora_rank") is not None:
            return Heads(
                c.heads,
                c.heads,
                max(
                    c.size("qk_nope_head_dim") + c.size("qk_rope_head_dim"),
                    c.size("v_head_dim", c.hidden // c.heads),
                ),
            )
        return Heads(c.heads, c.kv_heads, c.head_dim)

    def mlp_width(self, layer: str) -> int:
        """Returns the elements per token of the input of the last product in a decoder layer's MLP.
        With routed experts, it is that of all experts that a token uses, each with three matrices.
        """
        part = self.part(layer)
        count, chosen = part.rows
        if count:
            return chosen * part.experts // (3 * count * self.hidden)
        return part.down // self.hidden

    def can_save_attention(self, layer: str, *, fused: bool = False) -> bool:
        """Returns whether the runtime can save the attention of a decoder layer. With `fused`, the
        flash kernel computes its scores if it has sinks.
        """
        if fused and self.has_sinks:
            return self.stack[layer].kind == "decoder"
        return self.family in CAN_SAVE_ATTENTION and self.stack[layer].attention == "full_attention"

    def kept_attention(self, layer: str, workload: Workload) -> KeptAttention:
        """Returns the bytes of a decoder layer's saved attention."""
        attended, tokens = self.computed_part(layer, workload).attended, workload.tokens
        width = DTYPE_BYTES[workload.dtype]
        return KeptAttention(tokens * attended.low * width, 4 * tokens * attended.wide)

    def window(self, layer: str) -> int:
        """Returns the most tokens that a query of the decoder layer attends to, including its own
        token. 0 means that there is no limit.
        """
        return self.part(layer).window

    @functools.cached_property
    def attention_kinds(self) -> tuple[LayerSpec, ...]:
        """One decoder layer of each kind that `is_masked` (`attention_masks.py`) distinguishes: the
        last of its kind, in the order of the layers.
        """
        kinds = dict[object, LayerSpec]()
        for layer in self.decoders:
            part = self.part(layer.name)
            kind = layer.attention, part.window, part.chunked, part.scores.kept
            kinds.pop(kind, None)
            kinds[kind] = layer
        return tuple(kinds.values())

    def with_layers(self, layers: int) -> ModelSpec:
        """Returns the model with only its first `layers` decoder layers."""
        return ModelSpec(name=self.name, config=cut(self.config, min(layers, self.layers)))

    def shortest(self, layers: int) -> ModelSpec:
        """Returns the model with only its first layers: the fewest that include every kind of
        decoder layer, but at least `layers`.
        """
        signatures = [layer.signature for layer in self.decoders]
        last_new = max(signatures.index(signature) for signature in dict.fromkeys(signatures))
        return self.with_layers(max(layers, last_new + 1))

    @classmethod
    def from_config(cls, config: Any, where: str, name: str = "") -> ModelSpec:
        """Makes a model from the content of a Hugging Face config.json. Raises UserError if a key
        is missing, contradictory or not supported. `where` names the file in the error.
        """
        essentials = text_config(config, where)
        Architecture(essentials, where)  # so that an error names the file
        return cls(
            name=name or str(config.get("_name_or_path") or essentials["model_type"]),
            config=essentials,
        )

    @classmethod
    def load(cls, source: str) -> ModelSpec:
        """Loads a model from a Hugging Face folder, a config.json, or a name in the library
        (`simulator/library/models`). Raises UserError if it is missing or not supported.
        """
        path = model_file(source)
        name = path.parent.name if path.name == "config.json" else path.stem
        return cls.from_config(read_config(path), str(path), name)


def library() -> dict[str, Path]:
    """Returns name -> file of the library's models."""
    folder = Path(__file__).parents[1] / "library" / "models"
    return {file.stem: file for file in sorted(folder.glob("*.json"))}


def model_file(source: str) -> Path:
    """Returns the path of the config.json that `source` means: a folder, a file, or a name in the
    library (`base/names.py`).

    A path that exists is preferred to a name. Raises UserError if there is neither.
    """
    path = Path(source)
    # Unlike Path.is_dir, os.path.isdir returns False if the name is too long or not permitted.
    if os.path.isdir(path):
        if not os.path.exists(path / "config.json"):
            if adapter := adapter_in(path):
                raise no_whole_weights(path, adapter)
            trained = path / "model"
            raise UserError(
                f"model {source}",
                found="a folder without config.json",
                allowed="a Hugging Face model folder, which has this file",
                fix=f"name {trained}, which has it"
                if os.path.exists(trained / "config.json")
                else "name the folder that has it",
            )
        return path / "config.json"
    if path.suffix == ".json" or os.path.exists(path):
        return path
    known = library()
    if not is_path(source) and (name := meant(source, known)):
        return known[name]
    raise UserError(
        f"model {source}",
        found="no such folder, file or name",
        allowed="a Hugging Face model folder, a config.json, or a name that `megatrain list models`"
        " prints, such as qwen2.5-7b",
        fix=suggestion(
            source,
            known,
            "check the path or the name; a model on the hub is org/name for `train`, and its"
            " downloaded config.json for other commands",
        ),
    )
