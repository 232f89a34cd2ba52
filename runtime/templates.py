"""Stateless layers: transformers' own modules, built once without memory, called functionally on tensors in a slot.

One decoder layer serves all; what makes layer 12 out of it is the bytes in the slot. Autograd saves weights with the graph of a
layer; those are saved as *where in the layer*, and looked up at backward in whichever slot then holds the layer, so that a slot may
be reused between a layer's recompute and its backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from megatrain.runtime import attention
from megatrain.runtime.arenas import TORCH_DTYPE, Arenas
from megatrain.runtime.attention import Attention
from megatrain.runtime.batch import IGNORED
from megatrain.runtime.supported import refuse_unsupported
from megatrain.simulator.families import with_nulls
from megatrain.simulator.specs import LayerSpec, ModelSpec, Workload


def config_of(model: ModelSpec, folder: str | None = None) -> PretrainedConfig:
    """transformers' config of `model`: from its folder, or from the spec's own where there is none. Raises UserError for one that cannot be executed."""
    refuse_unsupported(model)
    if folder is not None:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    else:
        absent = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = AutoConfig.for_model(**{**absent, **with_nulls(model.config)})
    config.use_cache = False
    config._attn_implementation = "sdpa"
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


@dataclass(frozen=True)
class _InSlot:
    """A saved tensor that lies in a weight slot: where, from the slot's start."""

    byte_offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Templates:
    """The computations of a model's layers on `device`, by op kind."""

    def __init__(self, model: ModelSpec, workload: Workload, config: PretrainedConfig, device: torch.device, *, keeps: bool = False) -> None:
        """`keeps`: some layer's attention is kept from forward to backward."""
        self.model, self.workload, self.device = model, workload, device
        self.dtype = TORCH_DTYPE[workload.dtype]
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config, dtype=self.dtype)
        whole.train()
        self._kernel = attention.kernel_of(model, workload, device) if workload.attention or keeps else None
        if self._kernel:
            attention.take_over(whole.config)
        self._decoder, self._norm, self._head = whole.model.layers[0], whole.model.norm, whole.lm_head
        self._padding = whole.model.embed_tokens.padding_idx
        rotary = type(whole.model.rotary_emb)(config).to(device)  # on the meta device its frequencies have no values
        positions = torch.arange(workload.sequence, device=device)[None]
        self._positions = positions
        self._layer = torch.compile(self.decoder, dynamic=False) if workload.compiled else self.decoder
        self._attending = torch.compile(self._decoder_and_attention, dynamic=False) if workload.compiled else self._decoder_and_attention
        self._chunk_loss = torch.compile(self._token_losses, dynamic=False) if workload.compiled else self._token_losses
        self._rotary: tuple[torch.Tensor, torch.Tensor] = rotary(torch.empty(1, 1, model.hidden, dtype=self.dtype, device=device), positions)

    def forward(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """One decoder layer, causal attention, no graph kept: [batch, sequence, hidden] -> the same.

        Compiled with and without gradients it is two programs that round differently. In deterministic mode the one with gradients runs here too
        (7B, 32 x 1024 tokens on an H200: 24.6 ms, not 23.1), so that a recomputed layer and a stored one see the same bits.
        """
        if self.workload.compiled and torch.are_deterministic_algorithms_enabled():
            with torch.enable_grad():
                return self._layer({name: tensor.requires_grad_() for name, tensor in weights.items()}, x.requires_grad_()).detach()
        with torch.no_grad():
            return self._layer(weights, x)

    def forward_and_attention(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, Attention]:
        """`forward`, and what `recompute` needs to leave the attention out."""
        if self.workload.compiled and torch.are_deterministic_algorithms_enabled():
            with torch.enable_grad():
                made = self._attending({name: tensor.requires_grad_() for name, tensor in weights.items()}, x.requires_grad_())
        else:
            with torch.no_grad():
                made = self._attending(weights, x)
        output, *left = (tensor.detach() for tensor in made)
        return output, Attention(*left)

    def _decoder_and_attention(self, weights: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        taken: list[torch.Tensor] = []
        return self.decoder(weights, x, taken=taken), *taken

    def decoder(
        self, weights: dict[str, torch.Tensor], x: torch.Tensor, kept: Attention | None = None, taken: list[torch.Tensor] | None = None
    ) -> torch.Tensor:  # fmt: skip
        """The same as autograd sees it, never compiled. Attention as `attention.attend` says."""
        keywords: dict[str, Any] = {"attention_mask": None, "position_ids": self._positions, "position_embeddings": self._rotary}
        if self.workload.attention or kept is not None or taken is not None:
            keywords |= {"kernel": self._kernel, "kept": kept, "taken": taken}
        output = functional_call(self._decoder, weights, (x,), keywords)
        return output[0] if isinstance(output, tuple) else output

    def embed(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """[vocabulary, hidden], [batch, sequence] int64 -> [batch, sequence, hidden]"""
        return torch.nn.functional.embedding(ids, table)

    def embed_backward(self, gradient: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The table's gradient [vocabulary, hidden] fp32: a token's rows are summed in fp32, since a frequent one has thousands."""
        padding = -1 if self._padding is None else self._padding
        summed: torch.Tensor = torch.ops.aten.embedding_dense_backward(gradient.float(), ids, self.model.vocabulary, padding, False)
        return summed

    def recompute(self, arenas: Arenas, layer: LayerSpec, slot: str, x: torch.Tensor, kept: Attention | None = None) -> Saved:
        """Runs the layer and keeps its graph; with the attention that was `kept` of its forward, which has to stay until the backward is over."""
        weights = {name: tensor.requires_grad_() for name, tensor in layer_tensors(arenas, layer, slot, self.dtype).items()}
        x.requires_grad_()
        where = [slot]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(*_rebind(arenas, where)):
            output = self._layer(weights, x, kept)
        return Saved(output, (x, *weights.values()), where)

    def backward(self, saved: Saved, slot: str, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of the layer's input and of its parameters, from `gradient` of its output; `slot` holds its weights now."""
        saved.weights[0] = slot
        return torch.autograd.grad(saved.output, saved.inputs, gradient)

    def head(
        self, weights: dict[str, torch.Tensor], x: torch.Tensor, labels: torch.Tensor, scale: float, input_gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Final norm, output projection and cross-entropy, forward and backward, `loss_chunk` tokens at a time.

        `weights`: the norm's and the projection's [vocabulary, hidden]; x [batch, sequence, hidden]; labels [batch, sequence] int64.
        Writes the input's gradient; returns `scale` x the sum of the tokens' losses (0-dimensional fp32) and the gradients of norm and
        projection, summed in fp32 where there are several chunks.
        """
        norm, projection = (tensor.requires_grad_() for tensor in weights.values())
        rows, targets, dx = x.view(-1, x.shape[-1]), labels.reshape(-1), input_gradient.view(-1, x.shape[-1])
        chunk = self.workload.loss_chunk
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        sums: list[torch.Tensor] | None = None
        for start in range(0, rows.shape[0], chunk):
            part = slice(start, start + chunk)
            with torch.enable_grad():
                row = rows[part].detach().requires_grad_()
                chunk_loss = self._chunk_loss(norm, projection, row, targets[part]) * scale
            dx[part], *gradients = torch.autograd.grad(chunk_loss, (row, norm, projection))
            loss += chunk_loss.detach()
            if rows.shape[0] <= chunk:
                sums = gradients
            elif sums is None:
                sums = [gradient.float() for gradient in gradients]
            else:
                for total, gradient in zip(sums, gradients, strict=True):
                    total += gradient
        assert sums is not None
        return loss, sums[0], sums[1]

    def loss(self, weights: dict[str, torch.Tensor], x: torch.Tensor, labels: torch.Tensor, scale: float) -> torch.Tensor:
        """`head` without its backward, the same bits: `scale` x the sum of the tokens' losses, 0-dimensional fp32.

        Compiled layers round differently without gradients; in deterministic mode, as in `forward`, the program with gradients runs here too.
        """
        norm, projection = weights.values()
        kept = self.workload.compiled and torch.are_deterministic_algorithms_enabled()
        rows, targets = x.view(-1, x.shape[-1]), labels.reshape(-1)
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, rows.shape[0], self.workload.loss_chunk):
            part = slice(start, start + self.workload.loss_chunk)
            with torch.set_grad_enabled(kept):
                row = rows[part].detach().requires_grad_(kept)
                loss += self._chunk_loss(norm.requires_grad_(kept), projection.requires_grad_(kept), row, targets[part]).detach() * scale
        return loss

    def _token_losses(self, norm: torch.Tensor, projection: torch.Tensor, row: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Sum of the tokens' losses, in fp32: [tokens, hidden], [tokens] int64 -> 0-dimensional."""
        logits = functional_call(self._head, {"weight": projection}, (functional_call(self._norm, {"weight": norm}, (row,)),))
        return torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


def _rebind(arenas: Arenas, where: list[str]) -> tuple[Callable[[torch.Tensor], object], Callable[[object], torch.Tensor]]:
    """Hooks that save a tensor of the weight slot as its place in the slot, and find it again in the slot that `where` then names."""
    pool, start = arenas.start_of(where[0])

    def pack(tensor: torch.Tensor) -> object:
        if tensor.untyped_storage().data_ptr() != pool:
            return tensor
        return _InSlot(int(tensor.storage_offset()) * tensor.itemsize - start, tensor.dtype, tuple(tensor.shape), tensor.stride())

    def unpack(packed: object) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        assert isinstance(packed, _InSlot)
        return arenas.strided(where[0], packed.dtype, packed.size, packed.stride, packed.byte_offset)

    return pack, unpack
