"""CheckpointNames: what the model's tensors are called in a Hugging Face checkpoint, and how they are laid out there.

transformers keeps a mixture's experts in one tensor that checkpoints have expert by expert, and renames some tensors when it loads. Its own
conversions do so here too, a tensor at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from megatrain.runtime.files.decoder_stack import DecoderStack, settle
from megatrain.runtime.files.stored_tensors import StoredTensors
from megatrain.runtime.files.tensor_stream import Source
from megatrain.simulator.families import FAMILIES
from megatrain.simulator.specs import EMBEDDING, HEAD

_HEADS = frozenset(family.head for family in FAMILIES.values())
"""what output projections are called, which lie outside of the decoder"""
_ENTRANCES = frozenset(family.entrance for family in FAMILIES.values() if family.entrance not in ("", family.norm_name))
"""what norms between the embedding and the first layer are called, which lie outside of that layer in transformers' models"""


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether the config is that of a model with a language model inside, and not of a language model alone."""
    return config.get_text_config() is not config


def hub_name(layer: str, tensor: str, stack: DecoderStack = DecoderStack()) -> str:  # noqa: B008 (a constant)
    """The name of a layer's tensor in transformers' model, whose decoder layers are at `stack`."""
    head, _, rest = tensor.partition(".")
    if head in _HEADS:
        return f"{stack.head}.{rest}" if stack.head.rpartition(".")[2] == head else tensor
    return f"{stack.decoder}.{tensor}" if layer in (EMBEDDING, HEAD) or head in _ENTRANCES else f"{stack.decoder}.{stack.layers}.{layer}.{tensor}"


class CheckpointNames:
    """Of the model of `config`: a language model, or a multimodal model with a language model inside."""

    def __init__(self, config: PretrainedConfig) -> None:
        kind: Any = AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM
        with torch.device("meta"):
            self._whole = kind.from_config(config, dtype=torch.bfloat16)
        settle(self._whole, torch.bfloat16)
        self.wide = frozenset(name for name, parameter in self._whole.named_parameters() if parameter.dtype == torch.float32)
        """parameters that transformers keeps in fp32 in a bf16 model"""
        self.stack = DecoderStack.of(self._whole)
        self.architecture: str = type(self._whole).__name__

    def buffers(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Shapes of what decoder layers have besides parameters that a checkpoint holds, by layer and name."""
        saved = self._whole.state_dict().keys()
        return {
            str(index): {name: tuple(buffer.shape) for name, buffer in layer.named_buffers() if hub_name(str(index), name, self.stack) in saved}
            for index, layer in enumerate(self.stack.layers_of(self._whole))
        }

    def stored(self, keys: Iterable[str], tensor_of: Callable[[str], torch.Tensor]) -> StoredTensors:
        """The tensors of a checkpoint that has these `keys`."""
        return StoredTensors(self._whole, keys, tensor_of)

    def other_keys(self, keys: Iterable[str]) -> list[str]:
        """Those of a checkpoint's `keys` that belong to no tensor of the language model: a vision tower's, for example."""
        return self.stored(keys, lambda _: torch.empty(0)).outside((f"{self.stack.decoder}.", f"{self.stack.head}."))

    def saved(self, tensors: Mapping[str, Source]) -> dict[str, Source]:
        """Tensors of the model as a checkpoint has them, under its names.

        What a checkpoint has as it is keeps its pieces. What it has in parts is put together when the first of them is written, and let go after
        the last, so its parts are written one after another.
        """
        made: dict[str, Source] = {}
        for name, source in tensors.items():
            shape = torch.empty(source.shape, dtype=source.dtype, device="meta")
            whole = _Whole(source, functools.partial(self._parts, name))
            for key, part in self._parts(name, shape).items():
                made[key] = source if part is shape else Source(part.dtype, tuple(part.shape), functools.partial(whole.part, key))
        return made

    def _parts(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = revert_weight_conversion(self._whole, {name: tensor})
        return made


class _Whole:
    """A tensor that is written in parts, in memory from the first to the last of them."""

    def __init__(self, source: Source, split: Callable[[torch.Tensor], dict[str, torch.Tensor]]) -> None:
        self._source, self._split, self._parts = source, split, dict[str, torch.Tensor]()

    def part(self, key: str) -> Iterator[torch.Tensor]:
        """One of them, flat; it is let go, and with the last one all."""
        if not self._parts:
            tensor, start = torch.empty(self._source.shape, dtype=self._source.dtype), 0
            for piece in self._source.pieces():
                tensor.view(-1)[start : start + piece.numel()].copy_(piece.view(-1))
                start += piece.numel()
            self._parts = self._split(tensor)
        yield self._parts.pop(key).contiguous().view(-1)
