"""Stateless layers: transformers' own modules, built once without memory, called functionally on tensors in a slot.

One decoder layer serves all of its kind (`skeleton.kind_of`); what makes layer 12 out of it is the bytes in the slot, the layer's own buffers,
and the arguments that the model hands it (`edges.py`). Autograd saves weights with the graph of a layer; those are saved as *where in the
layer*, and looked up at backward in whichever slot then holds the layer, so that a slot may be reused between a layer's recompute and its backward.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from megatrain.runtime.batch import IGNORED
from megatrain.runtime.files.checkpoint_names import hub_name
from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers import attention, lengths, linear_documents
from megatrain.runtime.layers.attention import Attention
from megatrain.runtime.layers.documents import chunks, positions
from megatrain.runtime.layers.edges import Arguments, Edges
from megatrain.runtime.layers.layer_kinds import layer_kinds
from megatrain.runtime.layers.model_config import completed
from megatrain.runtime.layers.preflight import preflight
from megatrain.runtime.layers.rebinding import rebind
from megatrain.runtime.layers.router_loss import RouterLoss
from megatrain.runtime.layers.skeleton import skeleton
from megatrain.runtime.layers.supported import DROPOUT, refuse_unsupported
from megatrain.runtime.memory.arenas import TORCH_DTYPE, Arenas
from megatrain.simulator.errors import UserError
from megatrain.simulator.families import FAMILIES, WIDE_HEADS, WRITTEN_OUT
from megatrain.simulator.specs import EMBEDDING, HEAD, LayerSpec, ModelSpec
from megatrain.simulator.workload import Workload

_log = logging.getLogger(__name__)


def config_of(model: ModelSpec, workload: Workload | None = None) -> PretrainedConfig:
    """transformers' config of `model` for training, from the spec alone: a folder's config.json may have changed since it was planned. Without its dropout
    where `workload` says so. Raises UserError for one that cannot be executed.

    Attention is PyTorch's fused one, or written out where a family has scores that it does not compute (soft caps, sinks). Experts stay with
    transformers' default, grouped products: in bf16 no transfer to the host, and the same bits every time.
    """
    refuse_unsupported(model, workload)
    preflight(model)
    config = completed(model)
    for key in DROPOUT:
        if getattr(config, key, None):
            setattr(config, key, 0.0)
    config.use_cache = False
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    fused = architecture._supports_sdpa and getattr(config, "attn_logit_softcapping", None) is None
    config._attn_implementation = "sdpa" if fused else "eager"
    return config


def layer_tensors(arenas: Arenas, layer: LayerSpec, buffer: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The layer's tensors by name, in its `buffer` of `dtype`."""
    tensors, offset = {}, 0
    for tensor in layer.tensors:
        tensors[tensor.name] = arenas.tensor(buffer, dtype, tensor.shape, offset * dtype.itemsize)
        offset += tensor.padded
    return tensors


@dataclass
class Saved:
    """What a recomputed layer leaves for its backward: the graph's ends."""

    output: torch.Tensor
    """[batch, sequence, hidden]"""
    inputs: tuple[torch.Tensor, ...]
    """the layer's input, then its parameters in the order of the LayerSpec"""
    weights: list[str]
    """the slot that holds the layer's weights, set anew before backward. In a list, which the graph's hooks hold instead of this object: a graph
    that holds itself is never freed where no backward follows, 7 GiB a 7B layer"""
    micro: int = 0
    router_logits: torch.Tensor | None = None
    """[tokens, experts] where their loss is asked for"""


class Templates:
    """The computations of a model's layers on `device`, by op kind."""

    def __init__(self, model: ModelSpec, workload: Workload, config: PretrainedConfig, device: torch.device, *, keeps: bool = False) -> None:
        """`keeps`: some layer's attention is kept from forward to backward."""
        refuse_unsupported(model, workload)
        self.model, self.workload, self.device = model, workload, device
        self.dtype = TORCH_DTYPE[workload.dtype]
        quiet = copy.deepcopy(config)
        quiet.output_router_logits = False
        whole = skeleton(quiet, self.dtype, device)
        self._kernel = attention.kernel_of(model, workload, device) if workload.attention or keeps else None
        self._chunk: int = getattr(config, "attention_chunk_size", None) or 0
        self._by_lengths = workload.documents and lengths.takes_lengths(model, workload, device)
        if workload.documents and device.type == "cuda" and not self._by_lengths:
            _log.warning(
                "documents are kept apart by a mask, which no fused causal kernel reads: flash attention takes their lengths for bf16 on an Ampere GPU or "
                "later, and not for the scores or the heads of %s", ", ".join((*WRITTEN_OUT, *WIDE_HEADS)),
            )  # fmt: skip
        if self._kernel or self._by_lengths:
            attention.take_over(whole.config)
        if workload.documents:
            linear_documents.take_over(whole)
        self._stack = DecoderStack.of(whole)
        self.buffers = {str(index): dict(layer.named_buffers()) for index, layer in enumerate(self._stack.layers_of(whole))}
        """each decoder layer's own, by layer and name, on the device"""
        saved = whole.state_dict().keys()
        self.persistent = {
            layer: {name: buffer for name, buffer in buffers.items() if hub_name(layer, name, self._stack) in saved} for layer, buffers in self.buffers.items()
        }
        """those of them that a checkpoint has"""
        self.routing = RouterLoss.of(config, whole, workload.accumulation, device)
        self._kinds = layer_kinds(whole, routed=self.routing is not None, compiled=workload.compiled)
        family = FAMILIES[model.family]
        self._edges = Edges(whole, model.hidden, self.dtype, device, model.positions, family.norm_name, family.entrance)
        self._counted: dict[int, torch.Tensor] = {}
        """of a micro-batch with documents, each token's position in its own"""
        self._causal: list[Arguments] = []
        """what each decoder layer is handed where every row is one document; made here, since making masks waits for the device. Empty where documents
        are told by lengths and a window's mask, which that spares, would lie there for nothing"""
        if workload.documents:
            self._refuse_what_does_not_pack()
        if not (self._by_lengths and model.mask_bytes(msgspec.structs.replace(workload, documents=False))):
            self._causal = self._edges.arguments(workload.batch, workload.sequence, None)
        self._rooms: dict[int, dict[str, int] | None] = {}
        self._chunk_loss = torch.compile(self._token_losses, dynamic=False) if workload.compiled else self._token_losses
        self._arguments: dict[int, list[Arguments]] = {}

    def _refuse_what_does_not_pack(self) -> None:
        try:
            _ = self._edges.packs
        except ValueError as error:
            raise UserError(
                f"model {self.model.name}: model_type", found=f"{self.model.family}, whose model has {error}", allowed="rows of one document",
                fix="make the plan with --plain-packing",
            ) from None  # fmt: skip

    def expect(self, micro: int, documents: torch.Tensor | None) -> None:
        """Before a step: a micro-batch's `documents` [batch, sequence] int64 on the host, whose number is read here and not while ops run. None: there is
        one a row, and attention is the causal kernel's.
        """
        self._rooms[micro] = None if documents is None else self._rooms_of(documents)

    def begin(self, micro: int, documents: torch.Tensor | None = None) -> None:
        """A micro-batch begins: lengths or masks, and positions, for its `documents` [batch, sequence] int64, on the device, unless `expect` has heard
        that there is one a row.

        For a mask transformers looks whether there are several, which waits for the device once a micro-batch; lengths wait for nothing.
        """
        if documents is not None:
            self._counted[micro] = positions(documents)
        one_a_row = documents is None or (micro in self._rooms and self._rooms[micro] is None)
        if not (one_a_row and self._causal):
            self._arguments[micro] = self._apart(micro, documents)
        if self.routing:
            self.routing.begin(micro, documents)

    def _apart(self, micro: int, documents: torch.Tensor | None) -> list[Arguments]:
        work = self.workload
        rooms = self._rooms.get(micro)
        if documents is None:
            whole = torch.zeros(work.batch, work.sequence, dtype=torch.int64)
            documents, rooms = whole.to(self.device), self._rooms_of(whole)
        if not self._by_lengths:
            return self._edges.arguments(work.batch, work.sequence, positions(documents))
        rooms = rooms or self._rooms_of(documents)
        bounds = {kind: lengths.bounds(parts, rooms[kind], compiled=work.compiled) for kind, parts in self._divided(documents).items()}
        handed = self._edges.arguments_without_masks(positions(documents))
        return [
            {**each, "attention_mask": bounds[layer.attention]} if layer.attention in bounds else each
            for each, layer in zip(handed, self.model.decoders, strict=False)  # calibration plans fewer layers than the config has
        ]

    def _divided(self, documents: torch.Tensor) -> dict[str, torch.Tensor]:
        """`documents` [batch, sequence] int64 for each type of attention that takes lengths: in chunked attention a chunk is like a document."""
        kinds = {layer.attention for layer in self.model.decoders} - {"linear_attention"}
        return {kind: chunks(documents, self._chunk) if kind == "chunked_attention" else documents for kind in sorted(kinds)}

    def _rooms_of(self, documents: torch.Tensor) -> dict[str, int]:
        return {kind: lengths.room(parts) for kind, parts in self._divided(documents).items()}

    def end(self, micro: int) -> None:
        """The micro-batch's backward is done."""
        self._arguments.pop(micro, None)
        self._counted.pop(micro, None)
        if self.routing:
            self.routing.end(micro)

    def forward(self, layer: str, weights: dict[str, torch.Tensor], x: torch.Tensor, micro: int = 0) -> torch.Tensor:
        """One decoder layer, no graph kept: [batch, sequence, hidden] -> the same.

        Compiled with and without gradients it is two programs that round differently. In deterministic mode the one with gradients runs here too
        (7B, 32 x 1024 tokens on an H200: 24.6 ms, not 23.1), so that a recomputed layer and a stored one see the same bits.
        """
        output, logits = self._without_graph(self._kinds[int(layer)].run, layer, weights, x, self._handed(layer, micro))
        self._count(micro, logits)
        return output.detach()

    def forward_and_attention(self, layer: str, weights: dict[str, torch.Tensor], x: torch.Tensor, micro: int = 0) -> tuple[torch.Tensor, Attention]:
        """`forward`, and what `recompute` needs to leave the attention out."""
        arguments = self._handed(layer, micro) | {"kernel": self._kernel, "kept": None}
        output, logits, left = self._without_graph(self._kinds[int(layer)].attend, layer, weights, x, arguments)
        self._count(micro, logits)
        return output.detach(), Attention(*(tensor.detach() for tensor in left))

    def _without_graph(self, run: Callable[..., Any], layer: str, weights: dict[str, torch.Tensor], x: torch.Tensor, arguments: Arguments) -> Any:
        tracked = self.workload.compiled and torch.are_deterministic_algorithms_enabled()
        with torch.set_grad_enabled(tracked):
            if tracked:
                weights, x = {name: tensor.requires_grad_() for name, tensor in weights.items()}, x.requires_grad_()
            return run(weights | self.buffers[layer], x, arguments)

    def decoder(
        self, layer: str, weights: dict[str, torch.Tensor], x: torch.Tensor, micro: int = 0, kept: Attention | None = None
    ) -> torch.Tensor:  # fmt: skip
        """The same as autograd sees it, never compiled; with the attention that was `kept` of its forward."""
        return self._kinds[int(layer)].eager(weights | self.buffers[layer], x, self._handed(layer, micro, kept))[0]

    def _handed(self, layer: str, micro: int, kept: Attention | None = None) -> Arguments:
        """What the layer gets besides its input: from the model, and where its attention is not left to PyTorch for `attention.attend`."""
        arguments = (self._arguments.get(micro) or self._causal)[int(layer)]
        chosen = self.workload.attention or kept is not None
        return arguments | {"kernel": self._kernel, "kept": kept, "taken": None} if chosen else arguments

    def _count(self, micro: int, logits: torch.Tensor | None) -> None:
        if self.routing and logits is not None:
            self.routing.add(micro, logits.detach())

    def embed(self, weights: dict[str, torch.Tensor], ids: torch.Tensor, micro: int = 0) -> torch.Tensor:
        """The embedding's tensors, of which the first is the table [vocabulary, hidden]; [batch, sequence] int64 -> the first layer's input
        [batch, sequence, hidden].
        """
        table, *_ = weights.values()
        rows = torch.nn.functional.embedding(ids, table)
        if self._edges.plain:
            return rows
        with torch.no_grad():
            return self._edges.enter(rows, {name: weights[name] for name in self.model.positions}, self._counted.get(micro))

    def embed_backward(self, gradient: torch.Tensor, ids: torch.Tensor, micro: int = 0) -> list[torch.Tensor]:
        """Gradients of the table [vocabulary, hidden] and of tables of positions, fp32: a token's rows are summed in fp32, since a frequent one has
        thousands.
        """
        tables: dict[str, torch.Tensor] = {}
        if not self._edges.plain:
            shapes = {tensor.name: tensor.shape for tensor in self.model.stack[EMBEDDING].tensors}
            tables = {name: torch.zeros(shapes[name], device=gradient.device).requires_grad_() for name in self.model.positions}
            gradient = gradient.float() if tables else gradient
            with torch.enable_grad():
                rows = torch.zeros_like(gradient).requires_grad_()  # what is linear has one gradient everywhere
                gradient, *added = torch.autograd.grad(self._edges.enter(rows, tables, self._counted.get(micro)), (rows, *tables.values()), gradient)
        padding = -1 if self._edges.padding is None else self._edges.padding
        summed: torch.Tensor = torch.ops.aten.embedding_dense_backward(gradient.float(), ids, self.model.vocabulary, padding, False)
        return [summed, *(added if tables else ())]

    def recompute(self, arenas: Arenas, layer: LayerSpec, slot: str, x: torch.Tensor, micro: int = 0, kept: Attention | None = None) -> Saved:
        """Runs the layer and keeps its graph; with the attention that was `kept` of its forward, which has to stay until the backward is over."""
        weights = {name: tensor.requires_grad_() for name, tensor in layer_tensors(arenas, layer, slot, self.dtype).items()}
        x.requires_grad_()
        where = [slot]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(*rebind(arenas, where)):
            output, logits = self._kinds[int(layer.name)].run(weights | self.buffers[layer.name], x, self._handed(layer.name, micro, kept))
        return Saved(output, (x, *weights.values()), where, micro, logits)

    def keep(self, arenas: Arenas, layer: LayerSpec, slot: str, x: torch.Tensor, micro: int) -> Saved:
        """`forward` and `recompute` at once."""
        saved = self.recompute(arenas, layer, slot, x, micro)
        self._count(micro, saved.router_logits)
        return saved

    def backward(self, saved: Saved, slot: str, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the layer's input and of its parameters, from `gradient` of its output; `slot` holds its weights now.

        None for a parameter that the layer has not used.
        """
        saved.weights[0] = slot
        ends: tuple[list[torch.Tensor], list[torch.Tensor | None]] = [saved.output], [gradient]
        if self.routing and saved.router_logits is not None:
            with torch.enable_grad():
                ends[0].append(self.routing.share(saved.micro, saved.router_logits))
            ends[1].append(None)
        return torch.autograd.grad(ends[0], saved.inputs, ends[1], allow_unused=True)

    def head(
        self, weights: dict[str, torch.Tensor], x: torch.Tensor, labels: torch.Tensor, scale: float, input_gradient: torch.Tensor, micro: int = 0
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Final norm, output projection and cross-entropy, forward and backward, `loss_chunk` tokens at a time.

        `weights`: the tensors of the layer that the head reads; x [batch, sequence, hidden]; labels [batch, sequence] int64. Writes the input's
        gradient; returns `scale` x the sum of the tokens' losses, with the routers' loss where it is asked for (0-dimensional fp32), and the
        weights' gradients, summed in fp32 where there are several chunks; None for what the head does not use.
        """
        used = [name for name in weights if name not in self.model.positions]
        named = {self._name_in_head(name): weights[name].requires_grad_() for name in used}
        rows, targets, dx = x.view(-1, x.shape[-1]), labels.reshape(-1), input_gradient.view(-1, x.shape[-1])
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
        if self.routing:
            loss += self.routing.value(micro)
        found = dict(zip(used, sums, strict=True))
        return loss, [found.get(name) for name in weights]

    def loss(self, weights: dict[str, torch.Tensor], x: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        """`head` without its backward and without the routers' loss, the same bits: `scale` x the sum of the tokens' losses, 0-dimensional fp32.

        Compiled layers round differently without gradients; in deterministic mode, as in `forward`, the program with gradients runs here too.
        """
        tracked = self.workload.compiled and torch.are_deterministic_algorithms_enabled()
        named = {self._name_in_head(name): tensor.requires_grad_(tracked) for name, tensor in weights.items() if name not in self.model.positions}
        rows, targets = x.view(-1, x.shape[-1]), labels.reshape(-1)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, rows.shape[0], self.workload.loss_chunk):
            part = slice(start, start + self.workload.loss_chunk)
            with torch.set_grad_enabled(tracked):
                loss += self._chunk_loss(named, rows[part].detach().requires_grad_(tracked), targets[part]).detach() * scale
        return loss

    def _name_in_head(self, tensor: str) -> str:
        """The parameter that the head uses a tensor of its layer as: the embedding's table is the projection where they are tied."""
        if tensor == self.model.stack[EMBEDDING].tensors[0].name:
            return self.model.projection
        return hub_name(HEAD, tensor, self._stack)

    def _token_losses(self, named: dict[str, torch.Tensor], row: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the tokens' losses, in fp32: [tokens, hidden], [tokens] int64 -> 0-dimensional."""
        logits = self._edges.leave(named, row)
        return torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")
