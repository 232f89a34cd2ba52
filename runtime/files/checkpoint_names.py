"""CheckpointNames: names and layout of a model's tensors in a Hugging Face checkpoint.

For example, transformers has all experts of a layer in one tensor, while checkpoints have a tensor
for each expert. transformers also renames some tensors when it loads a checkpoint. This module uses
transformers' conversions, for one tensor at a time.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from megatrain.runtime.files.decoder_stack import DecoderStack, match_from_pretrained
from megatrain.runtime.files.stored_tensors import StoredTensors
from megatrain.runtime.files.tensor_stream import TensorSource
from megatrain.simulator.model.families import FAMILIES, INSIDE
from megatrain.simulator.model.layer import EMBEDDING, HEAD


def _heads() -> frozenset[str]:
    """Returns the names of the output projections of all families. They are outside the decoder."""
    return frozenset(family.head for family in FAMILIES.loaded())


def _ends() -> frozenset[str]:
    """Returns the names of modules that the runtime runs in the first or the last layer, and that
    are outside the layers in transformers' models.
    """
    return frozenset(
        name
        for family in FAMILIES.loaded()
        for name in (family.embedding_norm, *family.entrance, *family.exit)
        if name not in ("", family.norm_name)
    )


def is_multimodal(config: PretrainedConfig) -> bool:
    """Returns whether `config` describes a multimodal model, which contains a language model."""
    return config.get_text_config() is not config


def hub_name(
    layer: str,
    tensor: str,
    stack: DecoderStack = DecoderStack(),  # noqa: B008 (a constant)
) -> str:
    """Returns the name of a layer's tensor in transformers' model.

    `stack` has the paths of the decoder and its layers in this model.
    """
    head, _, rest = tensor.partition(".")
    if head in _heads():
        return f"{stack.head}.{rest}" if stack.head.rpartition(".")[2] == head else tensor
    return (
        f"{stack.decoder}.{tensor}"
        if layer in (EMBEDDING, HEAD) or head in _ends()
        else f"{stack.decoder}.{stack.layers}.{layer}.{tensor}"
    )


def _meta_model(config: PretrainedConfig) -> Any:
    """Returns the model of `config` on the meta device. It is multimodal if the config is.

    A multimodal family may be built without its vision tower (`Inside.towerless`). The tensors of
    the tower then do not belong to the model, and an export copies them unchanged.
    """
    kind: Any = AutoModelForImageTextToText if is_multimodal(config) else AutoModelForCausalLM
    inside = INSIDE.get(config.model_type)
    if towerless := inside is not None and inside.towerless:
        config = copy.deepcopy(config)
        vision: Any = config.vision_config
        substitute: Any = copy.deepcopy(config.audio_config)
        for key in ("hidden_size", "vocab_size", "vocab_offset", "rms_norm_eps"):
            setattr(substitute, key, getattr(vision, key))
        # through `vars`, because the config refuses an object of another class
        vars(config)["vision_config"] = substitute
    with torch.device("meta"):
        whole = kind.from_config(config, dtype=torch.bfloat16)
    if towerless:
        whole.model.vision_tower = torch.nn.Module()
    return whole


class CheckpointNames:
    """Converts between the tensors of a model and the tensors of its checkpoints. The model is a
    language model, or a multimodal model that contains a language model.
    """

    def __init__(self, config: PretrainedConfig) -> None:
        """Builds the model of `config` on the meta device."""
        self._whole = _meta_model(config)
        match_from_pretrained(self._whole, torch.bfloat16)
        self.wide = frozenset(
            name
            for name, parameter in self._whole.named_parameters()
            if parameter.dtype == torch.float32
        )
        """Names of the parameters that transformers keeps in fp32 in a bf16 model."""
        self.stack = DecoderStack.of(self._whole)
        """Paths of the decoder layers in the model."""
        self.architecture: str = type(self._whole).__name__
        """Name of the model's class in transformers."""

    def buffers(self) -> dict[str, dict[str, tuple[int, ...]]]:
        """Returns the shapes of the decoder layers' buffers that a checkpoint contains, by layer
        and name.
        """
        saved = self._whole.state_dict().keys()
        return {
            str(index): {
                name: tuple(buffer.shape)
                for name, buffer in layer.named_buffers()
                if hub_name(str(index), name, self.stack) in saved
            }
            for index, layer in enumerate(self.stack.layers_of(self._whole))
        }

    def stored(
        self, keys: Iterable[str], tensor_of: Callable[[str], torch.Tensor]
    ) -> StoredTensors:
        """Returns the tensors of a checkpoint under their names in the model. `keys` are the names
        in the checkpoint, and `tensor_of` returns the tensor with such a name.
        """
        return StoredTensors(self._whole, keys, tensor_of)

    def other_keys(self, keys: Iterable[str]) -> list[str]:
        """Returns the `keys` of a checkpoint that do not belong to the language model, for example
        the keys of a vision tower.
        """
        return self.stored(keys, lambda _: torch.empty(0)).outside(
            (f"{self.stack.decoder}.", f"{self.stack.head}.")
        )

    def saved(self, tensors: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
        """Returns the model's `tensors` with the names and layout of a checkpoint.

        A tensor that is the same in a checkpoint is written in its own pieces. A tensor that a
        checkpoint has in several parts is read into memory when the first part is written, and
        freed after the last part. So these parts must be written one after another.
        """
        result: dict[str, TensorSource] = {}
        for name, source in tensors.items():
            shape = torch.empty(source.shape, dtype=source.dtype, device="meta")
            whole = _Whole(source, functools.partial(self._parts, name))
            for key, part in self._parts(name, shape).items():
                result[key] = (
                    source
                    if part is shape
                    else TensorSource(
                        part.dtype, tuple(part.shape), functools.partial(whole.part, key)
                    )
                )
        return result

    def _parts(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        parts: dict[str, torch.Tensor] = revert_weight_conversion(self._whole, {name: tensor})
        return parts


class _Whole:
    """A tensor that is written in parts. It is in memory while its parts are written."""

    def __init__(
        self, source: TensorSource, split: Callable[[torch.Tensor], dict[str, torch.Tensor]]
    ) -> None:
        self._source, self._split, self._parts = source, split, dict[str, torch.Tensor]()

    def part(self, key: str) -> Iterator[torch.Tensor]:
        """Yields the part `key` as a flat tensor, and frees it."""
        if not self._parts:
            tensor, start = torch.empty(self._source.shape, dtype=self._source.dtype), 0
            for piece in self._source.pieces():
                tensor.view(-1)[start : start + piece.numel()].copy_(piece.view(-1))
                start += piece.numel()
            self._parts = self._split(tensor)
        yield self._parts.pop(key).contiguous().view(-1)
