"""Gemma 3n: passes one tensor from layer to layer, and runs the parts before and after the layers.

In transformers, a layer receives streams of hidden states, its own inputs, and shared keys and
values as separate tensors. Here a layer takes and returns one tensor, [batch, sequence, carried],
like the layers of other families. For each token, this tensor contains the streams, a row of inputs
for each layer, and the keys and values that later layers use.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from transformers.modeling_outputs import BaseModelOutputWithPast

from megatrain.runtime.files.decoder_stack import DecoderStack
from megatrain.runtime.layers.embedding_and_head import (
    Arguments,
    EmbeddingAndHead,
    NoEmbedding,
    Preset,
    Reached,
    Recording,
    with_parts,
    within,
)
from megatrain.runtime.layers.scaled_positions import ScaledPositions
from megatrain.simulator.model.families import FAMILIES

_SHARED, _OTHERS = "shared_kv_states", "others"
_CLAMPED = ("altup.prediction_coefs.weight",)
"""Parameters that transformers clamps in place in each forward pass. Here copies are clamped,
because a slot may hold the master. Loss and gradients are the same. The optimizer updates the
weights without the clamp. They differ from clamped weights only beyond `altup_coef_clip`."""


class _Layout(NamedTuple):
    """Sizes of the parts of the tensor that layers pass on, in the order of the parts."""

    streams: int
    """Number of streams of hidden states."""
    hidden: int
    """Width of a stream."""
    layers: int
    """Number of layers. Each has a row of inputs."""
    inputs_width: int
    """Width of the inputs of one layer."""
    pairs: int
    """Number of key-value heads."""
    size: int
    """Size of a head."""
    types: tuple[str, ...]
    """Layer types that share keys and values."""

    @classmethod
    def of(cls, config: Any) -> _Layout:
        return cls(
            config.altup_num_inputs,
            config.hidden_size,
            config.num_hidden_layers,
            config.hidden_size_per_layer_input,
            config.num_key_value_heads,
            config.head_dim,
            tuple(sorted(set(config.layer_types))) if config.num_kv_shared_layers else (),
        )

    def cut(
        self, x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Splits `x` [batch, sequence, carried] into streams, the inputs of the next layer, the
        inputs of other layers, and keys and values.
        """
        pair = self.pairs * self.size
        streams, own, others, *shared = x.split(
            (
                self.streams * self.hidden,
                self.inputs_width,
                (self.layers - 1) * self.inputs_width,
                *[pair] * (2 * len(self.types)),
            ),
            -1,
        )
        return streams, own, others, shared


class _Ends:
    """Runs transformers' own code between the embedding and the layers, and between the layers and
    the final norm.
    """

    def __init__(self, base: Any, layout: _Layout) -> None:
        self._layout = layout
        self._project = base.project_per_layer_inputs
        self._entered, self._left = Recording(True, base.layers[0]), Preset()
        self._entrance = _given_inputs(base, layers=nn.ModuleList([self._entered]))
        self._exit = _given_inputs(
            base,
            layers=nn.ModuleList([self._left]),
            altup_projections=_identities(layout),
            norm=nn.Identity(),
        )

    def enter(self, row: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the streams, [streams, batch, sequence, hidden], and the inputs of all layers.

        Args:
            row: rows of the embedding, [batch, sequence, hidden].
            inputs: rows of the table of inputs, [batch, sequence, layers x inputs_width].
        """
        projected: torch.Tensor = self._project(
            row, inputs.unflatten(-1, (self._layout.layers, self._layout.inputs_width))
        )
        try:
            self._entrance(inputs_embeds=row, per_layer_inputs=projected, **_no_arguments(row))
        except Reached:
            streams, self._entered.rows = self._entered.rows, torch.empty(0)
            self._entered.arguments = Arguments()
        return streams, projected.flatten(-2)

    @torch.compiler.disable
    def leave(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns the input of the final norm, [batch, sequence, hidden], from the last streams."""
        nothing = streams.new_zeros(1, 1, 1)
        self._left.rows = streams
        row: torch.Tensor = self._exit(
            inputs_embeds=nothing, per_layer_inputs=nothing[None], **_no_arguments(nothing)
        ).last_hidden_state
        self._left.rows = torch.empty(0)
        return row


def _identities(layout: _Layout) -> nn.ModuleList:
    return nn.ModuleList([nn.Identity() for _ in range(layout.streams - 1)])


def _given_inputs(base: Any, **parts: nn.Module) -> Any:
    """Returns a shallow copy of `base` with `parts` replaced. The copy uses the inputs of all
    layers unchanged, and makes no embeddings of positions.
    """
    other = with_parts(base, rotary_emb=NoEmbedding(), **parts)
    other.project_per_layer_inputs = lambda _, inputs: inputs
    return other


def _no_arguments(x: torch.Tensor) -> Arguments:
    """Returns placeholders for the model's other arguments, which no layer uses. transformers does
    not change a mask with four dimensions.
    """
    return {
        "attention_mask": torch.empty(1, 1, 1, 1, dtype=torch.bool, device=x.device),
        "position_ids": torch.empty(1, 1, dtype=torch.int64, device=x.device),
        "use_cache": False,
    }


def carries(family: str) -> bool:
    """Returns whether this file implements the layers of `family`."""
    return FAMILIES[family].carried_by == "gemma3n"


def install(whole: Any) -> None:
    """Changes the layers of `whole` to take and return one tensor, and to not synchronize.

    The first layer also runs the modules of transformers' model between the embedding and the
    layers, and the last layer the modules between the layers and the final norm. These modules
    become submodules of the two layers.
    """
    stack, family = DecoderStack.of(whole), FAMILIES[whole.config.model_type]
    base, layers = stack.decoder_of(whole), stack.layers_of(whole)
    layout = _Layout.of(whole.config)
    ends = _Ends(base, layout)
    cut_off_without_waiting(whole)
    for names, layer in ((family.entrance, layers[0]), (family.exit, layers[-1])):
        for name in names:
            layer.add_module(name, base.get_submodule(name))
    for index, layer in enumerate(layers):
        enter = ends.enter if index == 0 else None
        leave = ends.leave if index == len(layers) - 1 else None
        layer._changed_in_place = _CLAMPED
        layer.register_forward_pre_hook(
            functools.partial(_take_apart, layout, enter), with_kwargs=True
        )
        layer.register_forward_hook(
            functools.partial(_put_together, layout, leave), with_kwargs=True
        )


def _take_apart(
    layout: _Layout,
    enter: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None,
    layer: Any,
    inputs: tuple[torch.Tensor],
    arguments: Arguments,
) -> tuple[tuple[torch.Tensor], Arguments]:
    """Returns the arguments of transformers' layer for the input tensor `inputs[0]`."""
    (x,) = inputs
    streams, own, others, shared = layout.cut(x)
    if enter:
        hidden, all_inputs = enter(streams[..., : layout.hidden], torch.cat((own, others), -1))
        own, others = all_inputs.split(
            (layout.inputs_width, (layout.layers - 1) * layout.inputs_width), -1
        )
    else:
        hidden = streams.unflatten(-1, (layout.streams, layout.hidden)).permute(2, 0, 1, 3)
    heads = [part.unflatten(-1, (layout.pairs, layout.size)).transpose(1, 2) for part in shared]
    states: dict[str | int, Any] = dict(
        zip(layout.types, zip(heads[::2], heads[1::2], strict=True), strict=True)
    )
    # transformers 5.17 identifies keys and values by the index of the layer that made them
    if (index := getattr(layer.self_attn, "kv_shared_layer_index", None)) is not None:
        states[index] = states[layer.self_attn.layer_type]
    states[_OTHERS] = others
    return (hidden,), {**arguments, "per_layer_input": own, _SHARED: states}


def _put_together(
    layout: _Layout,
    leave: Callable[[torch.Tensor], torch.Tensor] | None,
    layer: Any,
    _inputs: tuple[torch.Tensor],
    arguments: Arguments,
    output: torch.Tensor,
) -> torch.Tensor:
    """Returns the output tensor of a layer, [batch, sequence, carried].

    The inputs of the next layer come first among the inputs. The inputs of this layer are moved to
    the end, where no layer reads them. After the last layer, only the first stream is read.
    """
    states, attention = arguments[_SHARED], layer.self_attn
    if attention.layer_idx in states:  # written by the layer, see `_take_apart`
        states[attention.layer_type] = states[attention.layer_idx]
    streams = [leave(output), *output[1:].detach()] if leave else output.unbind(0)
    shared = itertools.chain.from_iterable(states[kind] for kind in layout.types)
    return torch.cat(
        (
            *streams,
            states[_OTHERS],
            arguments["per_layer_input"].detach(),
            *(part.transpose(1, 2).flatten(2) for part in shared),
        ),
        -1,
    )


def cut_off_without_waiting(whole: Any) -> None:
    """Changes the sparse MLPs of `whole` to not synchronize with the device.

    In each forward pass, transformers computes the number of standard deviations of the cutoff on
    the device, and checks its range on the host. Here it is computed once.
    """
    for layer in DecoderStack.of(whole).layers_of(whole):
        mlp = layer.mlp
        if mlp.activation_sparsity <= 0:
            continue
        share = torch.tensor(mlp.activation_sparsity, dtype=torch.float32, device="cpu")
        deviations = torch.distributions.Normal(0, 1).icdf(share).to(mlp.gate_proj.weight.dtype)
        mlp._gaussian_topk = functools.partial(_cut_off, float(deviations))


def _cut_off(deviations: float, gate: torch.Tensor) -> torch.Tensor:
    """Returns the excess of `gate` over its mean plus `deviations` standard deviations, or 0."""
    mean = gate.mean(-1, keepdim=True)
    spread = gate.std(-1, keepdim=True, unbiased=False)
    return nn.functional.relu(gate - (mean + spread * deviations))


class _OnlyNorm(nn.Module):
    """Replaces the decoder: only applies the final norm to its input."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, *, inputs_embeds: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=self.norm(inputs_embeds))


class Gemma3nEmbeddingAndHead(EmbeddingAndHead):
    """The embedding and the head of Gemma 3n. The modules between them and the layers belong to the
    first and the last layer.
    """

    plain = False

    def __init__(self, whole: Any, dtype: torch.dtype, device: torch.device) -> None:
        stack = DecoderStack.of(whole)
        base, layers = stack.decoder_of(whole), stack.layers_of(whole)
        self._layout = layout = _Layout.of(whole.config)
        self._dtype, self._device = dtype, device
        self._hidden = 1  # the arguments of layers do not depend on the width of a row
        self._types = whole.config.layer_types
        self.padding = base.embed_tokens.padding_idx
        self._tables = [with_parts(base.embed_tokens), with_parts(base.embed_tokens_per_layer)]
        for table in self._tables:
            table.padding_idx = None  # indices are not token ids
        self._no_mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=device)
        self._recording = [
            Recording(index == len(layers) - 1, layer) for index, layer in enumerate(layers)
        ]
        self._up_to_layers = with_parts(
            base,
            layers=nn.ModuleList(self._recording),
            altup_projections=_identities(layout),
            rotary_emb=ScaledPositions.around(base.rotary_emb),
        )
        self._up_to_layers.project_per_layer_inputs = lambda rows, _: rows.new_empty(()).expand(
            1, 1, layout.layers, 1
        )
        self._exit = within(whole, stack.decoder, _OnlyNorm(base.norm))

    def enter(
        self,
        rows: Sequence[torch.Tensor],
        tables: dict[str, torch.Tensor] | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns the first layer's input, [batch, sequence, carried]. It is linear in `rows`."""
        layout = self._layout
        row, inputs = (
            functional_call(table, {"weight": part.flatten(0, 1)}, (_numbers(part),))
            for table, part in zip(self._tables, rows, strict=True)
        )
        pairs = 2 * len(layout.types) * layout.pairs * layout.size
        blank = [
            row.new_zeros(()).expand(*row.shape[:2], width)
            for width in ((layout.streams - 1) * layout.hidden, pairs)
        ]
        return torch.cat((row, blank[0], inputs, blank[1]), -1)

    def leave(self, tensors: dict[str, torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
        inputs = {"inputs_embeds": rows[None, :, : self._layout.hidden], "use_cache": False}
        output = functional_call(self._exit, tensors, (), inputs)
        logits: torch.Tensor = output.logits[0]
        return logits


def _numbers(rows: torch.Tensor) -> torch.Tensor:
    return torch.arange(rows[..., 0].numel(), device=rows.device).view(rows.shape[:2])
