"""FunctionalLayers: transformers' own modules, built on the meta device and called as functions of
the tensors in a slot.

One module computes all decoder layers of the same kind (`meta_model.kind_of`). To compute layer 12,
it is called with the weights of layer 12 in a slot, the buffers of layer 12, and the arguments that
the model passes to layer 12 (`embedding_and_head.py`).

Autograd saves weights in the graph of a layer. Here they are saved as offsets in a slot. The
backward pass reads them from the slot that holds the layer at that time (`slot_tensors.py`). So the
slot can be reused between the recompute of a layer and its backward pass.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megatrain.runtime.batch import IGNORED
from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers import (
    attention,
    compiling,
    flash4,
    fp8_linear,
    lengths,
    linear_documents,
)
from megatrain.runtime.layers.attention import Attention
from megatrain.runtime.layers.documents import chunks, positions
from megatrain.runtime.layers.embedding_and_head import Arguments
from megatrain.runtime.layers.ends import embedding_and_head
from megatrain.runtime.layers.layer_draws import LayerDraws
from megatrain.runtime.layers.layer_kinds import layer_kinds
from megatrain.runtime.layers.meta_model import meta_model
from megatrain.runtime.layers.model_config import full_config
from megatrain.runtime.layers.router_loss import RouterLoss
from megatrain.runtime.layers.slot_tensors import slot_hooks
from megatrain.runtime.layers.supported import dropout_keys
from megatrain.runtime.layers.table_gradient import TableGradient
from megatrain.runtime.memory.arenas import TORCH_DTYPE, Arenas
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.attention_masks import mask_bytes
from megatrain.simulator.model.families import FAMILIES, UNFUSED_ATTENTION, WIDE_HEADS
from megatrain.simulator.model.layer import EMBEDDING, HEAD, LayerSpec
from megatrain.simulator.model.op_work import projected_rows
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

_log = logging.getLogger(__name__)


def config_of(model: ModelSpec) -> PretrainedConfig:
    """Returns transformers' config of `model` for training.

    The config is made from the spec, because config.json in the model's folder may have changed
    since the plan was made. Dropout is set to 0, because `preflight` refuses plans with dropout.

    Attention is PyTorch's fused attention. If the family has scores that the fused kernels do not
    compute (soft caps, sinks), it is transformers' eager attention, and `FunctionalLayers` replaces
    it if the workload names a kernel for scores with sinks. Experts use transformers'
    default, grouped products. In bf16, grouped products do not synchronize with the host and are
    deterministic.
    """
    config = full_config(model)
    for key in dropout_keys(model.family):
        if getattr(config, key, None):
            setattr(config, key, 0.0)
    config.use_cache = False
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    fused = architecture._supports_sdpa and getattr(config, "attn_logit_softcapping", None) is None
    config._attn_implementation = "sdpa" if fused else "eager"
    return config


def layer_tensors(
    arenas: Arenas, layer: LayerSpec, buffer: str, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Returns the layer's tensors in the arena buffer `buffer`, by name, without copying them."""
    return {
        tensor.name: arenas.tensor(buffer, dtype, tensor.shape, offset * dtype.itemsize)
        for tensor, offset in zip(layer.tensors, layer.offsets, strict=True)
    }


@dataclass
class SavedForBackward:
    """The autograd graph of a layer, which is saved for the backward pass."""

    output: torch.Tensor
    """Output of the layer, [batch, sequence, hidden]."""
    inputs: tuple[torch.Tensor, ...]
    """The input of the layer, and then its parameters in the order of the LayerSpec."""
    weights: list[str]
    """Name of the slot that holds the layer's weights, as the only entry of a list. `backward` sets
    the entry. The hooks of the graph refer to this list. If they referred to this object, a graph
    without a backward pass would never be freed (7 GiB for a layer of a 7B model)."""
    micro: int
    """Index of the micro-batch."""
    router_logits: torch.Tensor | None
    """Logits of the layer's router, [tokens, experts]; None without a router loss."""


class FunctionalLayers:
    """Computes the layers of a model on one device, with one method for each kind of op."""

    def __init__(
        self,
        model: ModelSpec,
        workload: Workload,
        config: PretrainedConfig,
        device: torch.device,
        *,
        keeps: bool = False,
        seed: int = 0,
        micro_batches: Sequence[int] = (),
        rebuild: bool = False,
    ) -> None:
        """Builds the modules of `model` with parameters on the meta device.

        Args:
            model: the planned model.
            workload: the planned workload.
            config: the config of `config_of`.
            device: the device that computes.
            keeps: whether the attention output of at least one layer is saved for its recompute.
            seed: the run's seed, for layers that draw random numbers.
            micro_batches: the micro-batches of the step that this process computes, in its order
                (`own_micro_batches`). Empty means all of them.
            rebuild: whether layers that can rebuild outputs do so (`Knobs.rebuild_outputs`).
        """
        self.model, self.workload, self.device = model, workload, device
        self.dtype = TORCH_DTYPE[workload.dtype]
        quiet = copy.deepcopy(config)
        quiet.output_router_logits = False
        whole = meta_model(quiet, self.dtype, device)
        self._kernel = (
            attention.kernel_of(model, workload, device)
            if workload.attention or workload.groups > 1 or keeps
            else None
        )
        self._chunk: int = getattr(config, "attention_chunk_size", None) or 0
        fused = model.fuses_scores(workload)
        self._by_lengths = (workload.documents or fused) and lengths.takes_lengths(
            model, workload, device
        )
        if workload.documents and device.type == "cuda" and not self._by_lengths:
            _log.warning(
                "documents are separated by a mask, which is slower than flash attention with"
                " document lengths: that requires bf16 on an Ampere GPU or later, and does not"
                " support %s",
                ", ".join((*UNFUSED_ATTENTION, *WIDE_HEADS)),
            )
        if self._kernel or self._by_lengths:
            attention.install(whole.config)
        if self._kernel == "flash4":
            flash4.verify(model, device, lengths=self._by_lengths)
        if workload.documents:
            linear_documents.install(whole)
        self._stack = DecoderStack.of(whole)
        if workload.fp8:
            # `zip` is not strict, because a plan for calibration has fewer layers than the config.
            for layer, module in zip(model.decoders, self._stack.layers_of(whole), strict=False):
                fp8_linear.install(module, model.fp8_weights(layer.name), workload.fp8)
        self.buffers = {
            str(index): dict(layer.named_buffers())
            for index, layer in enumerate(self._stack.layers_of(whole))
        }
        """Buffers of each decoder layer, by layer and name, on the device."""
        saved = whole.state_dict().keys()
        self.persistent = {
            layer: {
                name: buffer
                for name, buffer in buffers.items()
                if hub_name(layer, name, self._stack) in saved
            }
            for layer, buffers in self.buffers.items()
        }
        """The entries of `buffers` that a Hugging Face checkpoint contains."""
        self.routing = RouterLoss.of(config, whole, workload.accumulation, device)
        family = FAMILIES[model.family]
        self._kinds = layer_kinds(
            whole,
            routed=self.routing is not None,
            compiled=[workload.compiled and layer.compilable for layer in model.decoders],
            draws=bool(family.draws),
            pieces=[
                model.layer_pieces(layer.name, compiled=workload.compiled)
                if workload.piece
                else None
                for layer in model.decoders
            ],
            piece=workload.piece,
            last=[tuple(model.last_products(layer.name, workload)) for layer in model.decoders],
            ordered=[
                tuple(model.rebuilding_products(layer.name, workload)) if rebuild else ()
                for layer in model.decoders
            ],
        )
        self._draws = LayerDraws(device, seed) if family.draws else None
        self._micro_batches = micro_batches or range(workload.accumulation)
        self._embedding_and_head = embedding_and_head(whole, model, self.dtype, device)
        self._embedding_only = {*model.tables[1:], *model.positions}
        """Tensors of the embedding that a tied head does not use."""
        self._rows = {tensor.name: tensor.shape[0] for tensor in model.stack[EMBEDDING].tensors}
        """Number of rows of each table of the embedding."""
        self._positions: dict[int, torch.Tensor] = {}
        """The distance of each token from the start of its document, for each micro-batch with
        documents."""
        self._document_counts: dict[int, dict[str, lengths.Room] | None] = {}
        """Results of `lengths.room` by micro-batch and attention type. A micro-batch has None if
        each of its rows is one document."""
        self._causal_arguments: list[Arguments] = []
        """Arguments of each decoder layer for rows of one document. They are made in advance,
        because making masks synchronizes with the device. The list is empty if lengths separate
        documents and the model would have masks, which would take memory without need. The kernel
        for sinks receives lengths in their place."""
        if workload.documents:
            self._refuse_unpackable()
        if self._by_lengths and fused:
            self._causal_arguments = self._separating_arguments(0, None)
        elif not (
            self._by_lengths
            and mask_bytes(model, msgspec.structs.replace(workload, documents=False))
        ):
            self._causal_arguments = self._embedding_and_head.arguments(
                workload.batch, workload.sequence, None
            )
        self._chunk_loss = (
            compiling.compiled(self._token_losses) if workload.compiled else self._token_losses
        )
        self._arguments: dict[int, list[Arguments]] = {}

    def _refuse_unpackable(self) -> None:
        """Raises UserError if no masks separate documents in this model."""
        try:
            _ = self._embedding_and_head.packs
        except ValueError as error:
            raise UserError(
                f"model {self.model.name}: model_type",
                found=f"{self.model.family}, whose model has {error}",
                allowed="rows of one document",
                fix="make the plan with --plain-packing",
            ) from None

    def expect(self, micro: int, documents: torch.Tensor | None, step: int | None) -> None:
        """Counts the documents of a micro-batch before the step, so no op has to wait for the
        count.

        Args:
            micro: index of the micro-batch.
            documents: document numbers, [batch, sequence] int64 on the host. None means that each
                row is one document, and attention uses the causal kernel.
            step: the number of the step, or None in an evaluation, in which layers draw no random
                numbers.
        """
        if self._draws:
            self._draws.step = step or 0
            for kind in self._kinds:
                kind.train(step is not None)
        self._document_counts[micro] = (
            None if documents is None else self._count_documents(documents)
        )

    def begin(self, micro: int, documents: torch.Tensor | None = None) -> None:
        """Prepares positions, and lengths or masks, for a micro-batch.

        Lengths and masks are not needed if `expect` was called with None for this micro-batch.
        Making masks synchronizes with the device once per micro-batch, because transformers checks
        whether there are several documents. Making lengths does not synchronize.

        Args:
            micro: index of the micro-batch.
            documents: document numbers, [batch, sequence] int64 on the device.
        """
        if documents is not None:
            self._positions[micro] = positions(documents)
        one_a_row = documents is None or (
            micro in self._document_counts and self._document_counts[micro] is None
        )
        if one_a_row and self._causal_arguments:
            self._arguments.pop(micro, None)  # a step that failed leaves its own
        else:
            self._arguments[micro] = self._separating_arguments(micro, documents)
        if self.routing:
            self.routing.begin(micro, documents)

    def _separating_arguments(self, micro: int, documents: torch.Tensor | None) -> list[Arguments]:
        """Returns the arguments of each decoder layer, with masks or lengths for `documents`."""
        work = self.workload
        counts = self._document_counts.get(micro)
        # Rows of one document have the same positions, which layers with sinks take as one row.
        rows = 1 if documents is None and self.model.fuses_scores(work) else work.batch
        if documents is None:
            whole = torch.zeros(work.batch, work.sequence, dtype=torch.int64)
            documents, counts = whole.to(self.device), self._count_documents(whole)
        if not self._by_lengths:
            return self._embedding_and_head.arguments(
                work.batch, work.sequence, positions(documents)
            )
        counts = counts or self._count_documents(documents)
        windows = {layer.attention: self.model.window(layer.name) for layer in self.model.decoders}
        bounds = {
            kind: lengths.bounds(parts, counts[kind], windows[kind], compiled=work.compiled)
            for kind, parts in self._documents_by_attention(documents).items()
        }
        arguments = self._embedding_and_head.arguments_without_masks(positions(documents[:rows]))
        # `zip` is not strict, because a plan for calibration has fewer layers than the config.
        return [
            own | ({"attention_mask": bounds[kind]} if (kind := layer.attention) in bounds else {})
            for own, layer in zip(arguments, self.model.decoders, strict=False)
        ]

    def _documents_by_attention(self, documents: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns document numbers, [batch, sequence] int64, for each attention type that uses
        lengths. In chunked attention, each chunk counts as a document.
        """
        kinds = {layer.attention for layer in self.model.decoders} - {"linear_attention"}
        return {
            kind: chunks(documents, self._chunk) if kind == "chunked_attention" else documents
            for kind in sorted(kinds)
        }

    def _count_documents(self, documents: torch.Tensor) -> dict[str, lengths.Room]:
        """Returns the result of `lengths.room` for each attention type that uses lengths."""
        return {
            kind: lengths.room(parts)
            for kind, parts in self._documents_by_attention(documents).items()
        }

    def end(self, micro: int) -> None:
        """Frees what `begin` prepared. Must be called after the last pass of the micro-batch."""
        self._arguments.pop(micro, None)
        self._positions.pop(micro, None)
        if self.routing:
            self.routing.end(micro)

    def forward(
        self, layer: str, weights: dict[str, torch.Tensor], x: torch.Tensor, micro: int = 0
    ) -> torch.Tensor:
        """Returns the output of a decoder layer, [batch, sequence, hidden], without saving the
        graph. `x` is the input, [batch, sequence, hidden].

        A layer that is compiled with gradients and a layer that is compiled without gradients round
        differently. In deterministic mode, the program with gradients runs here as well, so
        recomputed layers and layers with saved activations give the same bits. It is slower (24.6
        ms instead of 23.1 ms for a 7B layer with 32 x 1024 tokens on an H200).
        """
        output, logits = self._without_graph(
            self._kinds[int(layer)].run,
            layer,
            weights,
            x,
            self._layer_arguments(layer, micro),
            micro,
        )
        self._add_to_router_loss(micro, logits)
        return output.detach()

    def forward_and_attention(
        self, layer: str, weights: dict[str, torch.Tensor], x: torch.Tensor, micro: int = 0
    ) -> tuple[torch.Tensor, Attention]:
        """Returns the output of `forward` and the attention results that `recompute` can reuse."""
        arguments = self._layer_arguments(layer, micro) | {"kernel": self._kernel, "kept": None}
        output, logits, results = self._without_graph(
            self._kinds[int(layer)].attend, layer, weights, x, arguments, micro
        )
        self._add_to_router_loss(micro, logits)
        return output.detach(), Attention(*(tensor.detach() for tensor in results))

    def _without_graph(
        self,
        run: Callable[..., Any],
        layer: str,
        weights: dict[str, torch.Tensor],
        x: torch.Tensor,
        arguments: Arguments,
        micro: int,
    ) -> Any:
        tracked = self.workload.compiled and torch.are_deterministic_algorithms_enabled()
        with torch.set_grad_enabled(tracked), self._seeded(layer, micro):
            if tracked:
                weights, x = (
                    {name: tensor.requires_grad_() for name, tensor in weights.items()},
                    x.requires_grad_(),
                )
            return run(weights | self.buffers[layer], x, arguments)

    def _seeded(self, layer: str, micro: int) -> AbstractContextManager[None]:
        """Returns a context in which the layer draws the same numbers in every call."""
        if self._draws is None:
            return nullcontext()
        return self._draws.seeded(layer, self._micro_batches[micro])

    def _layer_arguments(self, layer: str, micro: int, kept: Attention | None = None) -> Arguments:
        """Returns the keyword arguments of a layer, including the arguments of `attention.attend`
        if the workload names a kernel or has groups of heads, or if `kept` attention results are
        reused.
        """
        arguments = (self._arguments.get(micro) or self._causal_arguments)[int(layer)]
        work = self.workload
        if work.attention or work.groups > 1 or kept is not None:
            arguments = arguments | {"kernel": self._kernel, "kept": kept, "results": None}
        return arguments | ({"groups": work.groups} if work.groups > 1 else {})

    def _add_to_router_loss(self, micro: int, logits: torch.Tensor | None) -> None:
        """Adds the router logits of a layer to the sums of the router loss, if there is one."""
        if self.routing and logits is not None:
            self.routing.add(micro, logits.detach())

    def embed(
        self, weights: dict[str, torch.Tensor], ids: torch.Tensor, micro: int, output: torch.Tensor
    ) -> None:
        """Writes the first layer's input to `output`.

        A plain embedding is one kernel, without a temporary tensor.

        Args:
            weights: tensors of the embedding.
            ids: input ids, [batch, sequence] int64.
            micro: index of the micro-batch.
            output: the first layer's input, [batch, sequence, carried], contiguous, in the dtype of
                the tensors.
        """
        indices = self._indices(ids)
        with torch.no_grad():
            if self._embedding_and_head.plain:
                ((name, rows),) = indices.items()
                flat = output.view(-1, output.shape[-1])
                torch.index_select(weights[name], 0, rows.reshape(-1), out=flat)
                return
            output.copy_(
                self._embedding_and_head.enter(
                    [
                        torch.nn.functional.embedding(rows, weights[name])
                        for name, rows in indices.items()
                    ],
                    {name: weights[name] for name in self.model.positions},
                    self._positions.get(micro),
                )
            )

    def _indices(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the row index of each token in each table, by table. In every table but the
        first, tokens beyond the last row use row 0.
        """
        first, *further = self.model.tables
        clipped = {name: torch.where(ids < self._rows[name], ids, 0) for name in further}
        return {first: ids, **clipped}

    def embed_backward(
        self, gradient: torch.Tensor, ids: torch.Tensor, micro: int
    ) -> list[TableGradient | torch.Tensor]:
        """Returns the gradients of the embedding's tables, followed by those of its tables of
        positions in fp32.

        Args:
            gradient: gradient of the first layer's input, [batch, sequence, carried].
            ids: input ids, [batch, sequence] int64.
            micro: index of the micro-batch.
        """
        tables: dict[str, torch.Tensor] = {}
        gradients = [gradient]
        if not self._embedding_and_head.plain:
            shapes = {tensor.name: tensor.shape for tensor in self.model.stack[EMBEDDING].tensors}
            tables = {
                name: torch.zeros(shapes[name], device=gradient.device).requires_grad_()
                for name in self.model.positions
            }
            gradient = gradient.float() if tables else gradient
            with torch.enable_grad():
                # `enter` is linear, so its gradient is the same at zero as at the real rows.
                rows = [
                    gradient.new_zeros(*ids.shape, shapes[name][1]).requires_grad_()
                    for name in self.model.tables
                ]
                gradients = list(
                    torch.autograd.grad(
                        self._embedding_and_head.enter(rows, tables, self._positions.get(micro)),
                        (*rows, *tables.values()),
                        gradient,
                    )
                )
        padding = self._embedding_and_head.padding
        tables_of_tokens = [
            TableGradient(part, indices, self._rows[name], padding)
            for (name, indices), part in zip(self._indices(ids).items(), gradients, strict=False)
        ]
        return [*tables_of_tokens, *gradients[len(tables_of_tokens) :]]

    def recompute(
        self,
        arenas: Arenas,
        layer: LayerSpec,
        slot: str,
        x: torch.Tensor,
        micro: int = 0,
        kept: Attention | None = None,
        *,
        read: bool = True,
    ) -> SavedForBackward:
        """Runs the forward pass of a layer and saves its graph for `backward`.

        Args:
            arenas: memory that contains the slot.
            layer: the layer.
            slot: name of the slot with the layer's weights.
            x: input of the layer, [batch, sequence, hidden].
            micro: index of the micro-batch.
            kept: saved attention results to use instead of computing attention. Their memory must
                not be reused before the backward pass has finished.
            read: whether the output is used. If not, it may be NaN, because an MLP in token pieces
                is skipped, or because the layer's last products are left out.
        """
        kind, work = self._kinds[int(layer.name)], self.workload
        left_out = not read and work.piece and self.model.skips_mlp(layer.name)
        # In deterministic mode, recomputed layers and layers with saved activations give the same
        # bits, so compiled layers run the same program.
        short = (
            not read
            and not work.piece
            and bool(self.model.last_products(layer.name, work))
            and not (work.compiled and torch.are_deterministic_algorithms_enabled())
        )
        weights = {
            name: tensor.requires_grad_()
            for name, tensor in layer_tensors(arenas, layer, slot, self.dtype).items()
        }
        x.requires_grad_()
        where = [slot]
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(*slot_hooks(arenas, where)),
            self._seeded(layer.name, micro),
            kind.without_mlp() if left_out else nullcontext(),
        ):
            output, logits = (kind.run_short if short else kind.run)(
                weights | self.buffers[layer.name],
                x,
                self._layer_arguments(layer.name, micro, kept),
            )
        return SavedForBackward(output, (x, *weights.values()), where, micro, logits)

    def keep(
        self, arenas: Arenas, layer: LayerSpec, slot: str, x: torch.Tensor, micro: int
    ) -> SavedForBackward:
        """Runs the forward pass of a layer and saves its graph, so the layer needs no recompute."""
        saved = self.recompute(arenas, layer, slot, x, micro)
        self._add_to_router_loss(micro, saved.router_logits)
        return saved

    def backward(
        self, saved: SavedForBackward, slot: str, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients of the layer's input and of its parameters.

        The gradient of a parameter that the layer did not use is None.

        Args:
            saved: the result of `recompute` or `keep`.
            slot: name of the slot that now holds the layer's weights.
            gradient: gradient of the layer's output, [batch, sequence, hidden].
        """
        saved.weights[0] = slot
        outputs, gradients = [saved.output], list[torch.Tensor | None]([gradient])
        if self.routing and saved.router_logits is not None:
            with torch.enable_grad():
                outputs.append(self.routing.share(saved.micro, saved.router_logits))
            gradients.append(None)
        return torch.autograd.grad(outputs, saved.inputs, gradients, allow_unused=True)

    def head(
        self,
        weights: dict[str, torch.Tensor],
        x: torch.Tensor,
        labels: torch.Tensor,
        scale: float,
        input_gradient: torch.Tensor,
        micro: int = 0,
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Runs forward and backward of the final norm, the output projection and the cross-entropy
        loss, for `loss_chunk` tokens at a time.

        Args:
            weights: tensors of the layer that contains the head's parameters.
            x: output of the last decoder layer, [batch, sequence, hidden].
            labels: labels, [batch, sequence] int64.
            scale: factor on the loss.
            input_gradient: receives the gradient of `x`, [batch, sequence, hidden].
            micro: index of the micro-batch.

        Returns:
            The loss, 0-dimensional fp32: `scale` times the sum of the tokens' losses, plus the
            router loss if the model has one. And the gradients of `weights`, with None for tensors
            that the head does not use. With several chunks, the gradients are summed in fp32.
        """
        used = [name for name in weights if name not in self._embedding_only]
        named = self._padded({self._name_in_head(name): weights[name] for name in used})
        for tensor in named.values():
            tensor.requires_grad_()
        rows, targets, dx = (
            x.view(-1, x.shape[-1]),
            labels.reshape(-1),
            input_gradient.view(-1, x.shape[-1]),
        )
        chunk = self.workload.loss_chunk
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        sums: list[torch.Tensor] | None = None
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            with torch.enable_grad():
                row = rows[part].detach().requires_grad_()
                chunk_loss = self._chunk_loss(named, row, targets[part]) * scale
            dx[part], *gradients = torch.autograd.grad(chunk_loss, (row, *named.values()))
            loss += chunk_loss.detach()
            if rows.shape[0] <= chunk:
                sums = gradients
            elif sums is None:
                sums = [gradient.float() for gradient in gradients]
            else:
                for total, gradient in zip(sums, gradients, strict=True):
                    total += gradient
        assert sums is not None
        sums = [total[: weights[name].shape[0]] for name, total in zip(used, sums, strict=True)]
        if self.routing:
            loss += self.routing.value(micro)
        by_name = dict(zip(used, sums, strict=True))
        return loss, [by_name.get(name) for name in weights]

    def loss(
        self, weights: dict[str, torch.Tensor], x: torch.Tensor, labels: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Returns `scale` times the sum of the tokens' losses, 0-dimensional fp32.

        The result has the same bits as the loss of `head`, which also includes the router loss.
        Compiled code rounds differently without gradients. In deterministic mode, the program with
        gradients runs here as well, as in `forward`.
        """
        tracked = self.workload.compiled and torch.are_deterministic_algorithms_enabled()
        named = self._padded(
            {
                self._name_in_head(name): tensor
                for name, tensor in weights.items()
                if name not in self._embedding_only
            }
        )
        for tensor in named.values():
            tensor.requires_grad_(tracked)
        rows, targets = x.view(-1, x.shape[-1]), labels.reshape(-1)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, rows.shape[0], self.workload.loss_chunk):
            part = slice(start, start + self.workload.loss_chunk)
            with torch.set_grad_enabled(tracked):
                loss += (
                    self._chunk_loss(
                        named, rows[part].detach().requires_grad_(tracked), targets[part]
                    ).detach()
                    * scale
                )
        return loss

    def _padded(self, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns the parameters of the head. If the matrix products are faster with more rows
        (`projected_rows`), the projection is padded with rows of zeros.
        """
        rows = projected_rows(self.model, self.workload) - self.model.vocabulary
        if not rows:
            return named
        padded = dict(named)
        for name in (self.model.projection, "lm_head.bias"):
            if name in padded:
                tensor = padded[name].detach()
                padded[name] = torch.cat([tensor, tensor.new_zeros(rows, *tensor.shape[1:])])
        return padded

    def _name_in_head(self, tensor: str) -> str:
        """Returns the full name of the head's parameter that `tensor` is used as. If embedding and
        head are tied, the embedding table is used as the projection.
        """
        if tensor == self.model.stack[EMBEDDING].tensors[0].name:
            return self.model.projection
        return hub_name(HEAD, tensor, self._stack)

    def _token_losses(
        self, named: dict[str, torch.Tensor], row: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Returns the sum of the tokens' losses, 0-dimensional fp32.

        Args:
            named: parameters of the head by full name, as `_padded` returns them.
            row: output of the last decoder layer, [tokens, hidden].
            targets: labels, [tokens] int64.
        """
        logits = self._embedding_and_head.leave(named, row)
        if logits.shape[-1] > self.model.vocabulary:
            logits = logits[:, : self.model.vocabulary]
        return torch.nn.functional.cross_entropy(
            logits.float(), targets, ignore_index=IGNORED, reduction="sum"
        )
