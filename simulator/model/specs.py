"""ModelSpec: a model as a stack of layers, with the tensors, bytes and FLOPs of each layer.

The layers are the embedding (`e`), the decoder layers (`0`, `1` and so on) and the head (`h`),
which is the final norm and the output projection. With tied embeddings there is no `h`: the final
norm belongs to the layer `e`, which is used twice. The parameters of a layer are stored in one flat
buffer, one tensor after the other, each padded to a multiple of `ALIGNMENT` elements.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import read_config
from megatrain.simulator.base.names import is_path, meant, suggestion
from megatrain.simulator.model.families import (
    ALWAYS_MASKED,
    CAN_SAVE_ATTENTION,
    CANNOT_SEPARATE_DOCUMENTS,
    UNFUSED_ATTENTION,
    WIDE_HEADS,
    Architecture,
    Kept,
    LayerPieces,
    Part,
    Tensors,
    cut,
    text_config,
)
from megatrain.simulator.model.families.kinds import HYBRID, LINEAR
from megatrain.simulator.model.workload import FP8_MULTIPLE, Dtype, Workload

ALIGNMENT = 64
"""The size of a tensor in a layer's buffer is a multiple of this number of elements: 128 bytes in
bf16, 256 in fp32. This aligns tensors for the widest loads of GPUs and CPUs."""
DTYPE_BYTES: dict[str, int] = {"bf16": 2, "fp32": 4}
EMBEDDING, HEAD = "e", "h"


class TensorSpec(msgspec.Struct, frozen=True):
    """One parameter tensor of a layer."""

    name: str
    """Its name inside the layer."""
    shape: tuple[int, ...]
    """Its shape."""

    @property
    def elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def padded(self) -> int:
        """The elements that it takes in the layer's flat buffer, padding included."""
        return -(-self.elements // ALIGNMENT) * ALIGNMENT


def _tensors(pairs: Tensors) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, shape) for name, shape in pairs)


EAGER_MIXERS = {LINEAR: "linear attention", HYBRID: "a state-space mixer"}
"""Kind of attention of the layers that always run eagerly -> its name in messages."""


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One layer: tensors that are loaded, computed with and updated together."""

    name: str
    """`e`, `0`, `1` and so on, or `h`."""
    kind: Literal["embedding", "decoder", "head"]
    """What the layer is."""
    tensors: tuple[TensorSpec, ...]
    """Its parameter tensors, in the order of the flat buffer."""
    signature: str = ""
    """For a decoder layer: everything that the duration of its ops depends on, except the workload,
    such as `qwen2-2048x11008-16:2x128-v151936`. Empty for other layers."""
    attention: str = ""
    """For a decoder layer: its attention, such as `full_attention` (`families/kinds.py`)."""
    inner: int = 0
    """For a decoder layer: the width of its MLP in elements per token, summed over the experts that
    a token uses."""
    experts: bool = False
    """For a decoder layer: whether a router chooses which of its experts compute a token."""

    @property
    def compilable(self) -> bool:
        """Whether a decoder layer runs through torch.compile if the workload is compiled.

        Layers with linear attention or a state-space mixer always run eagerly, because compiled
        layers of Qwen3-Next ran out of memory on an H200, while eager layers take 125.5 GiB
        (experiments/results/h200-families).
        """
        return self.attention not in EAGER_MIXERS

    @functools.cached_property
    def parameters(self) -> int:
        """The number of its parameters."""
        return sum(tensor.elements for tensor in self.tensors)

    @functools.cached_property
    def elements(self) -> int:
        """The elements of the flat buffer, padding included. The padding is zero, and AdamW keeps
        it zero.
        """
        return sum(tensor.padded for tensor in self.tensors)

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first element of each tensor in the flat buffer."""
        ends = itertools.accumulate(tensor.padded for tensor in self.tensors)
        return tuple(end - tensor.padded for tensor, end in zip(self.tensors, ends, strict=True))


class Heads(NamedTuple):
    """The heads of an attention layer."""

    queries: int
    """The number of query heads."""
    pairs: int
    """The number of key-value heads."""
    size: int
    """The elements of a head, or the largest number if queries, keys and values differ."""


def elements_of(part: Part) -> int:
    """Returns the number of parameters of `part`."""
    return sum(math.prod(shape) for _, shape in part.tensors)


def _late(part: Part, width: int, groups: int, compiled: bool) -> int:
    """Returns the largest number of bytes per token of the entries of `part.late`, with attention
    in `groups` groups of heads.

    In a `compiled` layer it is the attention kernel's entry, if there is one, because the norms of
    queries and keys have no temporary tensors.
    """
    if compiled and part.kernel:
        return part.kernel.bytes(width, groups)
    return max(
        (
            part.kernel.bytes(width, groups)
            if part.kernel and state == part.kernel.whole
            else state.bytes(width)
            for state in part.late
        ),
        default=0,
    )


def _doubled_pairs(part: Part, sequence: int) -> int:
    """Returns twice the unmasked pairs of tokens in the attention of a layer on one sequence."""
    window = min(part.window or sequence, sequence)
    if not part.chunked:
        return window * (2 * sequence - window)
    chunks, rest = divmod(sequence, window)
    return chunks * window**2 + rest**2


class Work(NamedTuple):
    """The FLOPs and the memory traffic of an op."""

    linear_flops: int
    """FLOPs of matrix products with weights: 2 per token and matrix element."""
    attention_flops: int
    """FLOPs of attention without masked pairs. For linear attention, the FLOPs of its convolution
    and recurrence."""
    moved_bytes: int
    """Bytes of device memory that elementwise kernels read and write, plus the bytes of the weights
    read and the weight gradients written."""
    fp8_flops: int = 0
    """The part of `linear_flops` that is computed in fp8."""
    unfused_bytes: int = 0
    """The part of `moved_bytes` that compiled and eager layers have in common, and to which
    `traffic_share` does not apply: casts to fp8, weights and their gradients once more for each
    piece of tokens, and the sum of the head's gradients over several loss chunks. In a compiled
    layer, also all weights and their gradients."""

    @property
    def flops(self) -> int:
        """All FLOPs."""
        return self.linear_flops + self.attention_flops


class KeptAttention(NamedTuple):
    """Bytes of a layer's saved attention. One buffer holds the output and the log-sum-exp."""

    output: int
    """Bytes of the output, [batch, sequence, heads, value size] in the compute dtype."""
    log_sum_exp: int
    """Bytes of the log-sum-exp, [batch, heads, sequence] in fp32."""

    @property
    def offset(self) -> int:
        """The first byte of the log-sum-exp: the output's bytes, rounded up to a multiple of
        256.
        """
        return -(-self.output // 256) * 256

    @property
    def bytes(self) -> int:
        """The bytes of the buffer."""
        return self.offset + self.log_sum_exp


TILE = 128
"""Rows of a tile in the products of experts, of which a GPU computes whole ones."""
_ROUTER_LOSS_BYTES = (4, 20)
"""Bytes of each logit that a router loss keeps from forward to backward, the logit in fp32 at most,
and in the backward pass: the probabilities, their fp32 copy, and three gradients."""
_PASSES = {"forward": 1, "recompute": 1, "backward": 2}
_SEEDS = 2 * 512
"""Bytes of the random generator's state that an attention kernel returns: two blocks of PyTorch's
allocator."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A decoder-only language model, described by its Hugging Face config.json. The parts of its
    layers are in `simulator/model/families`. Raises UserError if the config is not supported.
    """

    name: str
    """The name of the model."""
    config: dict[str, Any]
    """The keys of config.json that are needed to build the model, without null values."""

    def __post_init__(self) -> None:
        _ = self._architecture

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.name, self.family, self.layers, self.hidden))

    @functools.cached_property
    def _architecture(self) -> Architecture:
        return Architecture(self.config, f"model {self.name}")

    @property
    def family(self) -> str:
        """The family, which is `model_type` in transformers."""
        return self._architecture.name

    @property
    def layers(self) -> int:
        """The number of decoder layers."""
        return self._architecture.layers

    @property
    def hidden(self) -> int:
        """The hidden size."""
        return self._architecture.hidden

    @property
    def carried(self) -> int:
        """Elements per token that are passed from layer to layer: the width of a layer's input, of
        its output, and of a checkpoint. Their number is the hidden size, or more in some families.
        """
        return self._architecture.carried

    @property
    def vocabulary(self) -> int:
        """The vocabulary size."""
        return self._architecture.vocabulary

    @property
    def longest_row(self) -> int | None:
        """The most tokens of a row, from a key of the model's config such as
        `max_position_embeddings`. None if the config does not have the key.
        """
        key = self._architecture.family.longest or "max_position_embeddings"
        found = self.config.get(key, self.config.get("n_positions"))
        return found if isinstance(found, int) and found > 0 else None

    @property
    def positions(self) -> tuple[str, ...]:
        """The names of the embedding's position tensors. Empty if the decoder layers handle
        positions.
        """
        return tuple(name for name, _ in self._architecture.positions)

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables in which the embedding looks up each token. The first table has
        one row for each word of the vocabulary.
        """
        return (
            f"{self._architecture.family.embedding}.weight",
            *(name for name, _ in self._architecture.tables),
        )

    @property
    def table_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes (rows, columns) of `tables`."""
        return (
            (self.vocabulary, self.hidden),
            *((rows, columns) for _, (rows, columns) in self._architecture.tables),
        )

    @property
    def tied(self) -> bool:
        """Whether the output projection is the embedding matrix."""
        return self._architecture.tied

    @property
    def caps_logits(self) -> bool:
        """Whether the logits have a soft cap."""
        return bool(self._architecture.config.get("final_logit_softcapping"))

    @property
    def scales_logits(self) -> bool:
        """Whether the logits are multiplied or divided by a number."""
        return self._architecture.family.scales_logits

    @property
    def projection(self) -> str:
        """The full name of the output projection's weight."""
        return f"{self._architecture.family.head}.weight"

    @functools.cached_property
    def stack(self) -> dict[str, LayerSpec]:
        """Every layer by name, in forward order. `h` is absent if the embeddings are tied."""
        shape, family = self._architecture, self._architecture.family
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
        return self.parameters - sum(self._part(layer.name).idle for layer in self.decoders)

    @functools.cached_property
    def shape(self) -> str:
        """The distinct signatures of the decoder layers, joined by `+`. It is the model's part of
        `Op.shape` for ops of the embedding and the head.
        """
        return "+".join(dict.fromkeys(layer.signature for layer in self.decoders))

    def _part(self, layer: str) -> Part:
        return self._architecture.decoders[self._architecture.kinds[int(layer)]]

    def layer_pieces(self, layer: str, *, compiled: bool = False) -> LayerPieces | None:
        """Returns the parts of a decoder layer that are computed in pieces of tokens, or None if
        its MLP cannot be computed in pieces.

        In a `compiled` layer, the norm before attention is not among them, because the compiler
        fuses it with other ops, and it has no temporary tensors.
        """
        pieces = self._architecture.pieces[self._architecture.kinds[int(layer)]]
        return pieces._replace(first=None) if pieces and compiled else pieces

    def pieces_obstacle(self, *, compiled: bool = False) -> str | None:
        """Returns why decoder layers cannot be computed in pieces of tokens, or None if they can.

        They can if the MLP of each layer, or its router and experts, are one module that computes
        each token by itself and draws no random numbers. If layers are `compiled`, none may have
        linear attention or a state-space mixer, because there is no formula for their memory.
        """
        if compiled and not all(layer.compilable for layer in self.decoders):
            return f"compiled layers of {self.family}, some of which have no softmax attention"
        if self._architecture.family.carried:
            return f"{self.family}, whose layers carry more than one row for each token"
        if self._architecture.family.draws:
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
        return not self._part(layer).reads_output

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
        part = self._part(layer)
        return {} if part.reads_output else dict(part.last)

    def _left_out(self, kind: str, layer: str, workload: Workload) -> dict[str, tuple[int, ...]]:
        """Returns the `last_products` that an op of `kind` leaves out. A `recompute` is one whose
        output nothing reads.
        """
        leaves_out = "backward" if workload.piece else "recompute"
        return self.last_products(layer, workload) if kind == leaves_out else {}

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
        return dict(self._part(layer).last) if able and self._can_rebuild else {}

    @functools.cached_property
    def _can_rebuild(self) -> bool:
        """Whether the decoder layers can rebuild outputs if they are compiled."""
        return (
            all(part.silu_gated for part in self._architecture.decoders.values())
            and all(layer.compilable for layer in self.decoders)
            and not self.writes_scores
        )

    def rebuilt_bytes(self, layer: str, workload: Workload) -> int:
        """Returns the bytes of the outputs that a decoder layer does not save if it rebuilds them,
        or 0 if it cannot.

        With T tokens and b bytes per element, it is T b for each element of `Compiled.rebuilt`: the
        outputs of norms that projections read, and the product of gate and up. All of them exist
        again in the backward pass, so the peak of this pass is that of a layer that saves them.

        tests/simulator/memory/test_rebuilt_memory.py compares both with the compiler's choice.
        """
        if not self.rebuilding_products(layer, workload):
            return 0
        rebuilt = self._part(layer).in_compiled.rebuilt
        return rebuilt * workload.tokens * DTYPE_BYTES[workload.dtype]

    def router_logits(self, layer: str) -> int:
        """Returns the elements per token of the logits that a decoder layer keeps for the router
        loss. 0 without experts, or if the config does not ask for the loss.
        """
        return self._part(layer).logits if self.config.get("output_router_logits") else 0

    def fp8_weights(self, layer: str) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape [out, in] of the weights of a decoder layer whose products can be
        in fp8.

        These are its linear layers whose sizes are multiples of `FP8_MULTIPLE`, without routers and
        experts.
        """
        return {
            name: shape
            for name, shape in self._part(layer).linears
            if not any(size % FP8_MULTIPLE for size in shape)
        }

    def longest_product_flops(self, workload: Workload, fp8_speed: float = 1.0) -> float:
        """Returns the FLOPs of the longest matrix product of a decoder layer in a micro-batch or a
        piece of it, without products of experts. FLOPs in fp8 are divided by `fp8_speed`.
        """
        layers = {layer.signature: layer.name for layer in self.decoders}.values()
        sizes = [
            math.prod(shape) / (fp8_speed if name in self.fp8_products(layer, workload) else 1.0)
            for layer in layers
            for name, shape in self._part(layer).linears
        ]
        return 2 * (workload.piece or workload.tokens) * max(sizes, default=0.0)

    def fp8_products(self, layer: str, workload: Workload) -> dict[str, tuple[int, ...]]:
        """Returns the `fp8_weights` of a decoder layer if `workload` multiplies in fp8, otherwise
        an empty dict.
        """
        able = workload.fp8 and not workload.tokens % FP8_MULTIPLE
        return self.fp8_weights(layer) if able else {}

    def fp8_saved_bytes(self, layer: str, workload: Workload) -> int:
        """Returns the bytes that a compiled decoder layer saves in addition because its products
        are in fp8. It may be negative.

        The layer saves its weights in fp8, because the compiler does not know that they stay in
        their slot, and at most 8 bytes per token and product for scales. If all products are in
        fp8, it does not save the outputs of norms and activation functions (`Compiled.rebuilt`),
        because it recomputes the operands in fp8 from the inputs of these functions.

        tests/simulator/memory/test_compiled_memory.py compares it with the compiler's choice.
        """
        part, products = self._part(layer), self.fp8_products(layer, workload)
        weights = sum(map(math.prod, products.values()))
        rebuilt = part.in_compiled.rebuilt if weights == part.active else 0
        width = DTYPE_BYTES[workload.dtype]
        return weights + workload.tokens * (8 * len(products) - rebuilt * width)

    def fp8_share(self, workload: Workload) -> float:
        """Returns the share of the FLOPs of the decoder layers' matrix products that are in fp8."""
        able = sum(
            math.prod(shape)
            for layer in self.decoders
            for shape in self.fp8_products(layer.name, workload).values()
        )
        return able / sum(self._part(layer.name).active for layer in self.decoders)

    def _fp8_bytes(self, kind: str, layer: str, workload: Workload) -> int:
        """Returns the traffic in bytes of the casts to fp8 in an op of a decoder layer.

        A cast moves 5 n bytes for an operand of n elements: it reads the operand twice in bf16, and
        writes it once in fp8. In eager layers, where each step is a separate kernel, a cast moves
        13 n bytes.

        `forward` and `recompute` cast the input and the weight of each linear layer. `backward`
        casts both again, and casts the gradient of the output once, or twice with rowwise scaling.
        `backward` also copies all three operands once into the memory layout that the product needs
        (2 n bytes). If the product is left out, the weight is not cast.
        """
        compiled = workload.compiled and self.stack[layer].compilable
        cast, moved = 5 if compiled else 13, 0
        left_out = self._left_out(kind, layer, workload)
        for name, (target, source) in self.fp8_products(layer, workload).items():
            weight = 0 if name in left_out else source * target
            operands, gradient = (workload.tokens * source + weight, workload.tokens * target)
            moved += cast * operands
            if kind == "backward":
                twice = 2 if workload.fp8 == "rowwise" else 1
                moved += twice * cast * gradient + 2 * (operands + gradient)
        return moved

    def layer_flops(self, layer: str, tokens: int, sequence: int) -> int:
        """Returns the forward FLOPs of a decoder layer: 2 for each token and each element of the
        matrices that the token uses, plus attention without masked pairs.
        """
        part = self._part(layer)
        return 2 * tokens * part.active + self._attention_flops(part, tokens, sequence)

    @staticmethod
    def _attention_flops(part: Part, tokens: int, sequence: int) -> int:
        """Returns the forward FLOPs of attention: `part.pair` for each unmasked pair of tokens,
        plus `part.state` for each token.

        In a sequence of S tokens, full causal attention has S^2 / 2 unmasked pairs, and attention
        in a window of W < S tokens has W (S - W / 2). A chunk of W tokens has W^2 / 2.
        """
        doubled = _doubled_pairs(part, sequence)
        return tokens * part.state + tokens * part.pair * doubled // (2 * sequence)

    def attention_shape(self, workload: Workload) -> str:
        """Returns a key of everything that the duration of a full attention kernel depends on,
        except the sequence length: `HEADSxKEY_HEADSxSIZE-DTYPE`, followed by `-KERNEL` if the
        kernel is not PyTorch's choice. The kernel is `flash` if rows have documents.
        """
        kernel = "flash" if workload.documents else workload.attention
        return "-".join(
            ["x".join(map(str, self.heads)), workload.dtype, *([kernel] if kernel else [])]
        )

    def share_of_row(self, layer: str, workload: Workload) -> float:
        """Returns the number of unmasked pairs of tokens in the layer's attention on one
        micro-batch, divided by that of full causal attention on one sequence. 0 for linear
        attention.
        """
        part = self._part(layer)
        pairs = self._attention_flops(part, workload.tokens, workload.sequence)
        row = part.pair * workload.sequence**2 // 2
        return (pairs - workload.tokens * part.state) / row if row else 0.0

    def computed_pairs(self, layer: str, workload: Workload) -> float:
        """Returns the number of pairs of tokens that the layer's attention kernel computes, divided
        by the number of unmasked pairs. It is 1 if the kernel receives no mask.

        A fused kernel that receives a mask computes all S^2 pairs of a sequence of S tokens.
        Written-out scores also compute all pairs, but their products reach at least twice the rate
        of a fused kernel, so the result is 1 for them. Their other time is in the traffic, which
        counts all pairs. Linear attention has no pairs.
        """
        spec, part = self.stack[layer], self._part(layer)
        written = part.scores.kept != Kept()
        if written or not self._masked(spec, workload):
            return 1.0
        return 2 * workload.sequence**2 / _doubled_pairs(part, workload.sequence)

    def projected_rows(self, workload: Workload) -> int:
        """Returns the rows of the output projection's matrix that the head multiplies with.

        The matrix has one row for each word of the vocabulary. An eager head in bf16 pads it with
        zero rows to a multiple of 8, because cuBLAS is several times slower if rows of logits are
        not aligned to 16 bytes: seven times with the 49,155 words of Granite 3.1 on an H200
        (experiments/results/h200-families). The compiler pads compiled heads by itself.
        """
        if workload.compiled or workload.dtype != "bf16":
            return self.vocabulary
        return -(-self.vocabulary // 8) * 8

    def head_flops(self, tokens: int) -> int:
        """Returns the forward FLOPs of the output projection."""
        return 2 * tokens * self.hidden * self.vocabulary

    def work(
        self,
        kind: str,
        layer: str,
        workload: Workload,
        *,
        kept: bool = False,
        rebuilt: bool = False,
    ) -> Work:
        """Returns the FLOPs and the memory traffic of one compute op on one micro-batch.

        The formulas use T tokens per micro-batch, S tokens per sequence, b bytes per element, P
        parameters of the layer, V words in the vocabulary, and the hidden size d. Traffic is in
        bytes:

        * `forward`: the forward FLOPs. Traffic: T times the forward traffic of the layer's parts
          (`families/parts.py`), T S times that of written-out scores, and P b for the weights.
        * `recompute`: the same as `forward`, without the MLP if it is computed in pieces, and
          without `last_products`.
        * `backward`: twice the forward FLOPs. Traffic: the same terms with the backward traffic,
          and 2 P b for the weights read and the gradients written.
        * `head`: three times the forward FLOPs. Traffic: T times the forward and the backward
          traffic of the norm; T V (2 b + 32) for the logits, with a cast (b + 4), softmax in fp32
          (8), and in the backward a gradient of zeros (4), softmax (12) and a cast (4 + b); for
          each loss chunk, three times the matrix, 3 V d b, and with several chunks also the sum of
          the gradients, V d (b + 8).
        * `loss`: the forward FLOPs of the head. Traffic: T times the forward traffic of the norm;
          T V (b + 12) for the logits' cast and softmax; V d b for each loss chunk.
        * `embed`: no FLOPs. Traffic: the rows read and written, 2 T d b.
        * `embed_backward`: no FLOPs. Traffic: V d b to write zeros. T d (4 b + 36) to convert the
          gradients to fp32 (b + 4), sum them by token with partial sums in between (20), copy the
          sum of each token (8), round it (4 + b), and store it (2 b).

        Some workloads and models add to these:

        * With fp8 products, `forward`, `recompute` and `backward` have the traffic of the casts
          (`_fp8_bytes`). With pieces of tokens, they have that of `_in_pieces`. With several groups
          of heads, tensors of each group are copied (2).
        * If the layer rebuilds outputs, `backward` has the traffic of `_rebuilding_bytes` in
          addition, and a `recompute` without `last_products` has less.
        * A soft cap divides the logits, takes the tanh and multiplies. Its traffic is T V 6 b in
          `loss`, and T V 13 b in `head`, where 7 b are the backward. Scaled logits have T V 2 b in
          `loss` and T V 4 b in `head`.
        * A padded matrix (`projected_rows`) is copied, 2 V d b. In `head`, its logits have T V 3 b.
        * If the embedding has several tables, V d is the elements of all tables, and d is the width
          of all rows, in `embed` and `embed_backward`. If a token carries more than d elements,
          `embed` also writes these, and `head` writes their gradient.

        Args:
            kind: the kind of op.
            layer: the decoder layer; only ops of decoder layers use it.
            workload: the workload, with the tokens of a micro-batch.
            kept: True for a recompute that skips attention because the forward saved it.
            rebuilt: True if the layer rebuilds outputs (`Knobs.rebuild_outputs`).
        """
        tokens, width, hidden = workload.tokens, DTYPE_BYTES[workload.dtype], self.hidden
        table, tables = self.vocabulary * hidden, self.table_shapes
        unpadded = width * (self.projected_rows(workload) > self.vocabulary)
        padding = 2 * table * unpadded
        row = sum(columns for _, columns in tables)
        cap, scale = width * self.caps_logits, width * self.scales_logits
        if kind == "embed":
            return Work(0, 0, tokens * (row + self.carried) * width)
        if kind == "embed_backward":
            moved = tokens * row * (4 * width + 36) + sum(map(math.prod, tables)) * width
            return Work(0, 0, moved)
        if kind == "head":
            norm, chunks = self._architecture.norm, -(-tokens // workload.loss_chunk)
            moved = tokens * (
                norm.forward.bytes(width)
                + norm.backward.bytes(width)
                + self.vocabulary * (2 * width + 32 + 13 * cap + 4 * scale + 3 * unpadded)
                + (self.carried - hidden) * width
            )
            sums = chunks * table * (width + 8) if chunks > 1 else 0
            return Work(
                3 * self.head_flops(tokens),
                0,
                moved + padding + chunks * table * 3 * width + sums,
                unfused_bytes=sums,
            )
        if kind == "loss":
            moved = tokens * (
                self._architecture.norm.forward.bytes(width)
                + self.vocabulary * (width + 12 + 6 * cap + 2 * scale)
            )
            return Work(
                self.head_flops(tokens),
                0,
                moved + padding + -(-tokens // workload.loss_chunk) * table * width,
            )
        part, passes = self._part(layer), _PASSES[kind]
        traffic, matrix = (
            (part.backward, part.scores.backward)
            if kind == "backward"
            else (part.forward, part.scores.forward)
        )
        more_flops, more_bytes, more_weights = self._in_pieces(kind, layer, workload)
        if workload.groups > 1 and part.kernel and not kept:
            copied = part.kernel.copied if kind == "backward" else part.attended
            more_bytes += 2 * tokens * copied.bytes(width)
        weights = passes * width * self.stack[layer].parameters
        left_out = self._left_out(kind, layer, workload)
        last = sum(map(math.prod, left_out.values()))
        if workload.piece:
            more_weights -= workload.pieces * width * last
        else:
            weights -= width * last
        unfused = self._fp8_bytes(kind, layer, workload) + more_weights
        if rebuilt:
            unfused += self._rebuilding_bytes(kind, layer, workload)
        if workload.compiled and self.stack[layer].compilable:
            unfused, weights = unfused + weights, 0
        return Work(
            2 * tokens * (passes * part.active - last) + more_flops,
            0 if kept else passes * self._attention_flops(part, tokens, workload.sequence),
            tokens * (traffic.bytes(width) + workload.sequence * matrix.bytes(width))
            + weights
            + more_bytes
            + unfused,
            2
            * tokens
            * sum(
                (passes - (name in left_out)) * math.prod(shape)
                for name, shape in self.fp8_products(layer, workload).items()
            ),
            unfused,
        )

    def _rebuilding_bytes(self, kind: str, layer: str, workload: Workload) -> int:
        """Returns the traffic in bytes that an op of a decoder layer has in addition because the
        layer rebuilds outputs. It may be negative.

        `backward` writes each rebuilt output once and reads two tensors for it: 3 n b for n
        elements. A `recompute` without `last_products` computes no product of gate and up, whose
        traffic is 3 n b too, because nothing reads it.
        """
        if kind == "backward":
            return 3 * self.rebuilt_bytes(layer, workload)
        unread = self.rebuilding_products(layer, workload) and self._left_out(kind, layer, workload)
        product = workload.tokens * self.mlp_width(layer) * DTYPE_BYTES[workload.dtype]
        return -3 * product if unread else 0

    def _in_pieces(self, kind: str, layer: str, workload: Workload) -> tuple[int, int, int]:
        """Returns what a decoder layer has in addition because its tokens are computed in pieces:
        (linear FLOPs, bytes of elementwise traffic, bytes of weights and their gradients). Each
        may be negative.

        With n pieces, and P parameters of b bytes in the modules that are computed in pieces:

        * Each pass over the pieces reads the weights n - 1 times more, (n - 1) P b. This includes
          the weights of all experts.
        * The products of experts have fewer rows each, and compute whole tiles
          (`_tiled_elements`).
        * `recompute` leaves out the MLP, if `skips_mlp`.
        * `backward` runs the forward pass of the pieces first. The gradients of weights are written
          n times, P b each. Their fp32 sum is written once, read and written n - 1 times, and read
          once more to be written in the compute dtype: 8 n P bytes, and P b.
        """
        pieces = self.layer_pieces(layer, compiled=workload.compiled)
        if not workload.piece or pieces is None:
            return 0, 0, 0
        tokens, width, count = workload.tokens, DTYPE_BYTES[workload.dtype], workload.pieces
        chain, first = pieces.chain, pieces.first
        weights = elements_of(chain) + (elements_of(first) if first else 0)
        tiles = 2 * self._tiled_elements(chain, workload)
        if kind == "recompute" and self.skips_mlp(layer):
            again = (count - 1) * width * (weights - elements_of(chain))
            left_out, unread = tokens * chain.forward.bytes(width), width * elements_of(chain)
            if not (workload.compiled and self.stack[layer].compilable):
                left_out, unread = left_out + unread, 0  # eager weights count as elementwise
            return -2 * tokens * chain.active, -left_out, again - unread
        if kind != "backward":
            return tiles, 0, (count - 1) * width * weights
        once_more = tokens * (
            chain.forward.bytes(width) + (first.forward.bytes(width) if first else 0)
        )
        read, written = (2 * count - 1) * width, (count - 1) * width
        again = weights * (read + written + 8 * count + width)
        return 2 * tokens * chain.active + 3 * tiles, once_more, again

    @staticmethod
    def _tiled_elements(chain: Part, workload: Workload) -> int:
        """Returns the elements of experts' weights that a pass over the pieces multiplies in
        addition, because the products compute whole tiles of rows.

        Each expert computes a multiple of `TILE` rows. This is half a tile more than its rows on
        average, or one tile if it has fewer rows than half a tile. The result is the number for all
        pieces, minus the number for all tokens at once.
        """
        count, chosen = chain.rows
        if not count:
            return 0

        def added(tokens: int) -> int:
            rows = tokens * chosen // count
            return max(TILE // 2, TILE - rows)

        more = workload.pieces * added(workload.piece) - added(workload.tokens)
        return more * chain.experts

    def saved_bytes(
        self,
        layer: str,
        tokens: int,
        sequence: int,
        dtype: Dtype,
        piece: int = 0,
        *,
        compiled: bool = False,
    ) -> int:
        """Returns the bytes that autograd saves in a decoder layer from its forward to its
        backward.

        They are the sum over the parts of the layer (`families/parts.py`). A norm saves its input
        in fp32 if that is a copy, the normalized row and its output. Attention saves q, k, v and
        its output, and its score matrix only if the family writes it out. A gated MLP saves gate,
        up, the activation and their product.

        With pieces of `piece` tokens, the MLP and the norm before it save only their input, and the
        norm before attention saves only its output, which projections read. With a router loss, a
        layer with experts keeps the logits of its router.

        A `compiled` layer saves the tensors that the compiler's partitioner chooses. Elementwise
        kernels run again in the backward pass, so mainly the operands and results of matrix
        products are saved: input and output of a norm, and gate, up and product of a gated MLP.
        With S tokens per sequence and heads of size k, 4 S k bytes are added for a tensor that is
        computed once from the positions.

        tests/simulator/memory/test_compiled_memory.py compares it with the compiler's choice.
        """
        part, width = self._part(layer), DTYPE_BYTES[dtype]
        kept, scores, once = part.kept, part.scores.kept, 0
        if compiled:
            kept, scores = part.in_compiled.kept, part.scores.compiled[0]
            once = _SEEDS + 4 * sequence * self.heads.size
            once += 4 * part.in_compiled.cast if width < 4 else 0
        saved = kept.bytes(width) + _ROUTER_LOSS_BYTES[0] * self.router_logits(layer)
        if piece and (pieces := self.layer_pieces(layer, compiled=compiled)):
            hidden = self.hidden * width
            chain = pieces.chain.in_compiled.kept if compiled else pieces.chain.kept
            saved -= chain.bytes(width) - (hidden if pieces.norm else 0)
            saved -= pieces.first.kept.bytes(width) - hidden if pieces.first else 0
        return tokens * (saved + sequence * scores.bytes(width)) + once

    @functools.cached_property
    def writes_scores(self) -> bool:
        """Whether some layer writes out its attention scores. Its memory then grows with the square
        of the sequence length.
        """
        return any(part.scores.kept != Kept() for part in self._architecture.decoders.values())

    @functools.cached_property
    def heads(self) -> Heads:
        """The heads of an attention layer. In latent attention, each head has its own keys, whose
        size differs from that of its values.
        """
        c = self._architecture.config
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
        part = self._part(layer)
        count, chosen = part.rows
        if count:
            return chosen * part.experts // (3 * count * self.hidden)
        return part.down // self.hidden

    def can_save_attention(self, layer: str) -> bool:
        """Returns whether the runtime can save the attention of a decoder layer."""
        return self.family in CAN_SAVE_ATTENTION and self.stack[layer].attention == "full_attention"

    def kept_attention(self, layer: str, tokens: int, dtype: Dtype) -> KeptAttention:
        """Returns the bytes of a decoder layer's saved attention."""
        attended = self._part(layer).attended
        return KeptAttention(tokens * attended.low * DTYPE_BYTES[dtype], 4 * tokens * attended.wide)

    def max_saved_bytes(
        self, tokens: int, sequence: int, dtype: Dtype, piece: int = 0, *, compiled: bool = False
    ) -> int:
        """Returns the largest `saved_bytes` of all decoder layers."""
        return max(
            self.saved_bytes(layer.name, tokens, sequence, dtype, piece, compiled=compiled)
            for layer in {layer.signature: layer for layer in self.decoders}.values()
        )

    def transient_bytes(
        self,
        tokens: int,
        sequence: int,
        dtype: Dtype,
        piece: int = 0,
        *,
        compiled: bool = False,
        groups: int = 1,
    ) -> int:
        """Returns the largest `backward_bytes` of all decoder layers, minus the largest
        `saved_bytes`: the bytes of temporary tensors in the backward pass.
        """
        most = self.max_saved_bytes(tokens, sequence, dtype, piece, compiled=compiled)
        return (
            max(
                self.backward_bytes(
                    layer, tokens, sequence, dtype, piece, compiled=compiled, groups=groups
                )
                for layer in {layer.signature: layer for layer in self.decoders}.values()
            )
            - most
        )

    def backward_bytes(
        self,
        layer: LayerSpec,
        tokens: int,
        sequence: int,
        dtype: Dtype,
        piece: int = 0,
        *,
        compiled: bool = False,
        groups: int = 1,
    ) -> int:
        """Returns the peak device bytes of a decoder layer's backward pass, saved activations
        included.

        The formulas use P parameters, T tokens, b bytes per element, and the hidden size d. The
        peak is at one of four points. The saved activations exist at all of them, and in addition:

        * When the MLP begins: the gradients of its last weights, and the tensors in `Part.early`.
        * When the MLP ends: the gradients of all its weights, and the tensors in `Part.middle`.
        * In the norm before the MLP: the same gradients, and the tensors in `Part.between`, without
          `Part.freed`, which the MLP has freed.
        * In attention: all weight gradients, P b, and the tensors in `Part.late`, without
          `Part.freed`.

        If a token carries C elements more than the hidden size, all weight gradients and three
        gradients of these elements, 3 T C b, may exist before anything is freed. If scores are
        written out, their temporary tensors are added in attention. In a compiled layer they are
        added to the largest of the four, because it does not free in the order of these parts.

        With pieces of p tokens, let P' be the parameters of the MLP and the norm before it. The
        peak is then at one of three points. In addition to the saved activations there are:

        * In a piece: the gradient of the input, T d b, the fp32 sums of the gradients of weights,
          4 P', the gradients of weights of the piece, P' b, and the piece's input, output and their
          gradients, 4 p d b. The largest of the first three points above is added for p tokens,
          without weight gradients, and with the activations that the piece saves.
        * In attention and in the norm before it: all weight gradients, P b, and the tensors in
          `Part.late`. The gradient of the residual takes the place of the saved input of the MLP.
          If no norm belongs to its chain, there are two such gradients, 2 T d b.
        * In a norm after the MLP or after attention, which is not computed in pieces: all weight
          gradients, the tensors of the norm, and two gradients, 2 T d b.

        With several groups of heads, the attention kernel's own tensors in `Part.late` exist for
        one group at a time (`KernelMemory.bytes`).

        A compiled layer differs in these points:

        * Some gradients of norms' weights are computed last, so the gradients in `Compiled.longer`
          exist in attention, at least two of the hidden states, 2 T d b.
        * Norms have no temporary tensors, so only the attention kernel's entry of `Part.late`
          counts. While the kernel runs, the gradients of the weights in `Part.inputs` do not exist.
          When they do, only the kernel's results are left.
        * The compiler uses the memory of a freed tensor for a later one of the same size, and does
          not free it in between. If a gradient in `Part.gradients` has the size of `Part.joined`,
          it exists in attention. It has in DeepSeek-V3, for example. If T = d, activations have the
          size of gradients of weights. Then the gradients of the weights in `Part.inputs` are
          counted throughout, if the layer is `Part.parallel` or its MLP has a bias. Counts of other
          layers are below the formula without them.
        * If attention and MLP are `Part.parallel`, attention may begin before the MLP has freed its
          saved activations. Then there are the gradients of the last weights of both, and the
          attention kernel's tensors, without `Compiled.gone`. With pieces, attention may end before
          the first piece, so the gradients of all other weights are added in a piece.

        tests/simulator/memory/test_counted_memory.py compares it with the runtime's layers, and
        tests/simulator/memory/test_compiled_memory.py with compiled layers.
        """
        part, width = self._part(layer.name), DTYPE_BYTES[dtype]
        if piece and self.layer_pieces(layer.name):
            return self._backward_in_pieces(
                layer, tokens, sequence, dtype, piece, compiled=compiled, groups=groups
            )

        def held(*states: Kept) -> int:
            return tokens * max((kept.bytes(width) for kept in states), default=0)

        carried = self.carried - self.hidden
        early, freed, scores, longer = part.early, part.freed, part.scores.held, 0
        if compiled:
            early, freed = part.in_compiled.early, part.in_compiled.freed
            scores, longer = part.scores.compiled[1], self._longer(part, tokens, width)
        written = tokens * sequence * scores.bytes(width)
        parts = [
            width * part.down + held(*early),
            width * part.projections + held(part.middle),
            width * part.projections + held(*part.between) - held(freed),
            width * layer.elements
            + tokens * _late(part, width, groups, compiled)
            - held(freed)
            + longer,
        ]
        if compiled:
            if part.parallel:
                output = part.attended.low * self.hidden  # elements of attention's last weight
                parts.append(
                    width * (part.down + output)
                    + tokens * _late(part, width, groups, compiled)
                    - held(part.in_compiled.gone)
                )
            biases = {name.replace(".weight", ".bias") for name, _ in part.last}
            biased = any(name in biases for name, _ in part.tensors)
            reusing = tokens == self.hidden and (biased or part.parallel)
            if part.kernel and not reusing:
                parts[3] = max(
                    parts[3] - width * part.inputs,
                    width * layer.elements + held(part.kernel.results) - held(freed) + longer,
                )
            parts = [each + written for each in parts]
        else:
            parts[3] += written
        if carried:
            parts.append(width * layer.elements + 3 * tokens * carried * width + written)
        return (
            self.saved_bytes(layer.name, tokens, sequence, dtype, compiled=compiled)
            + max(parts)
            + tokens * _ROUTER_LOSS_BYTES[1] * self.router_logits(layer.name)
            + 24 * sequence * self.heads.size
        )

    def _longer(self, part: Part, tokens: int, width: int) -> int:
        """Returns the bytes of tensors that exist in attention, although other layers than compiled
        ones have freed them (`backward_bytes`).
        """
        reused = part.joined if part.joined in part.gradients else 0
        return tokens * width * (max(2 * self.hidden, part.in_compiled.longer) + reused)

    def _backward_in_pieces(
        self,
        layer: LayerSpec,
        tokens: int,
        sequence: int,
        dtype: Dtype,
        piece: int,
        *,
        compiled: bool,
        groups: int,
    ) -> int:
        """Returns `backward_bytes` of a layer that is computed in pieces of `piece` tokens."""
        part, width = self._part(layer.name), DTYPE_BYTES[dtype]
        pieces = self.layer_pieces(layer.name, compiled=compiled)
        assert pieces is not None
        chain, row = pieces.chain, self.hidden * width
        kept, early, freed, scores, longer = (
            chain.kept,
            chain.early,
            chain.freed,
            part.scores.held,
            0,
        )
        if compiled:
            inner = chain.in_compiled
            kept, early, freed = inner.kept, inner.early, inner.freed
            scores = part.scores.compiled[1]
            longer = tokens * (2 * row + width * (part.in_compiled.longer - inner.longer))

        def held(*states: Kept) -> int:
            return max((state.bytes(width) for state in states), default=0)

        after = held(*chain.between, *chain.late) - held(freed)
        in_piece = kept.bytes(width) + max(held(*early), held(chain.middle), after, 0) + 4 * row
        parameters = elements_of(chain)
        norms = tuple(state for state in part.early if state not in chain.early)
        others = width * (layer.elements - parameters) if compiled and part.parallel else 0
        around = max(
            tokens * row + piece * in_piece + (4 + width) * parameters + others,
            width * layer.elements
            + tokens * (_late(part, width, groups, compiled) + (0 if pieces.norm else 2 * row))
            + longer,
            width * layer.elements + tokens * (held(*norms) + 2 * row) if norms else 0,
        )
        return (
            self.saved_bytes(layer.name, tokens, sequence, dtype, piece, compiled=compiled)
            + around
            + tokens * _ROUTER_LOSS_BYTES[1] * self.router_logits(layer.name)
            + tokens * sequence * scores.bytes(width)
            + 24 * sequence * self.heads.size
        )

    def documents_obstacle(self, sequence: int) -> str | None:
        """Returns why attention cannot separate the documents of a row of `sequence` tokens, or
        None if it can.
        """
        if self.family in CANNOT_SEPARATE_DOCUMENTS:
            return f"{self.family}, {CANNOT_SEPARATE_DOCUMENTS[self.family]}"
        first = self._architecture.scaled_from
        if first is not None and sequence >= first:
            return (
                f"{self.family}, which scales queries by their place in a row of {first} tokens or"
                " more"
            )
        return None

    def document_attention(self, dtype: Dtype) -> Literal["lengths", "mask"]:
        """Returns how attention on a GPU separates the documents of a row: `lengths` if a fused
        kernel receives their lengths, `mask` if the scores are masked.
        """
        return (
            "mask"
            if dtype == "fp32" or self.family in (*UNFUSED_ATTENTION, *WIDE_HEADS)
            else "lengths"
        )

    def window(self, layer: str) -> int:
        """Returns the most tokens that a query of the decoder layer attends to, including its own
        token. 0 means that there is no limit.
        """
        return self._part(layer).window

    def mask_bytes(self, workload: Workload) -> int:
        """Returns the bytes of attention masks on the device. Documents need a mask, unless the
        kernel receives their lengths. transformers also makes a mask for a window that is not
        longer than a sequence, and for written-out scores. Linear attention has no mask.

        With B rows of S tokens and b bytes per element, each kind of attention has a boolean mask
        of S S bytes, or B S S with documents or chunks. The layer that uses a mask also needs it in
        the compute dtype, to add it to the scores: B S S b. With written-out scores, each kind of
        attention has this mask too.
        """
        masks, added = (
            dict[str, int](),
            workload.batch * workload.sequence**2 * DTYPE_BYTES[workload.dtype],
        )
        for layer in self._attentions:
            if self._masked(layer, workload):
                written = self._part(layer.name).scores.kept != Kept()
                each_row = workload.documents or self._part(layer.name).chunked
                masks[layer.attention] = workload.sequence**2 * (
                    workload.batch if each_row else 1
                ) + (added if written else 0)
        return sum(masks.values()) + (added if masks else 0)

    def _masked(self, layer: LayerSpec, workload: Workload) -> bool:
        """Returns whether the layer's attention has a mask."""
        if layer.attention == "linear_attention":
            return False
        if workload.documents:
            return self.document_attention(workload.dtype) == "mask"
        written = self._part(layer.name).scores.kept != Kept()
        windowed = 0 < self.window(layer.name) <= workload.sequence
        return windowed or written or self.family in ALWAYS_MASKED

    def saved_mask_bytes(self, workload: Workload) -> int:
        """Returns the most bytes that a decoder layer saves in addition because a fused attention
        kernel has a mask: the sum of `added_mask_bytes` and `repeated_bytes`.
        """
        return self.added_mask_bytes(workload) + self.repeated_bytes(workload)

    def added_mask_bytes(self, workload: Workload) -> int:
        """Returns the bytes of the mask in the compute dtype that a fused attention kernel adds to
        its scores. Each layer makes and saves its own mask. 0 without a mask.

        With B rows of S tokens and b bytes per element, it is B S S b.
        """
        added = workload.tokens * workload.sequence * DTYPE_BYTES[workload.dtype]
        return added if self._masks_a_kernel(workload) else 0

    def repeated_bytes(self, workload: Workload) -> int:
        """Returns the bytes of the copies of keys and values that transformers makes for a fused
        attention kernel with a mask, if several query heads share a key. 0 without a mask.
        """
        heads, pairs, size = self.heads
        copied = 2 * (heads - pairs) * size * workload.tokens * DTYPE_BYTES[workload.dtype]
        return copied if self._masks_a_kernel(workload) else 0

    def _masks_a_kernel(self, workload: Workload) -> bool:
        """Returns whether some layer has a fused attention kernel with a mask."""
        return any(
            self._masked(layer, workload) and self._part(layer.name).scores.kept == Kept()
            for layer in self._attentions
        )

    @functools.cached_property
    def _attentions(self) -> tuple[LayerSpec, ...]:
        """One decoder layer of each kind that `_masked` distinguishes, the last of its kind, in the
        order of the layers.
        """
        kinds = dict[object, LayerSpec]()
        for layer in self.decoders:
            part = self._part(layer.name)
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
