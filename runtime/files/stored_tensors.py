"""StoredTensors: reads a checkpoint's tensors by their names in transformers' model.

The values are the same as with transformers' `from_pretrained`.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from megatrain.simulator.base.errors import UserError

_OLD_BUFFERS = re.compile(
    r"(rotary_emb\.inv_freq|position_ids|attn\.(masked_)?bias|attention\.(masked_)?bias)$"
)
"""Keys of constants that earlier versions of transformers saved."""
_ROWS = 64
"""Number of rows of two tensors that are compared at a time, so that their fp32 copies stay in the
processor's cache."""
_SHOWN = 4
"""Number of modules that a summary names."""


class StoredTensors:
    """Returns the values of a model's tensors by their names in the model: `stored(name)`.

    A call raises KeyError if the checkpoint does not have the tensor. A matrix that the config ties
    to another matrix may have either name in the checkpoint.
    """

    def __init__(
        self, whole: Any, keys: Iterable[str], tensor_of: Callable[[str], torch.Tensor]
    ) -> None:
        """Finds the checkpoint's keys for each tensor of the model.

        Args:
            whole: the model, on the meta device.
            keys: names of the tensors in the checkpoint.
            tensor_of: returns a tensor of the checkpoint by its key.
        """
        self._whole, self._tensor_of = whole, tensor_of
        expected = whole.state_dict()
        conversions = get_model_conversion_mapping(whole)
        renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._by_pattern = {
            pattern: converter for converter in converters for pattern in converter.source_patterns
        }
        self._sources: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
        for key in sorted(keys, key=dot_natural_key):
            name, pattern = rename_source_key(
                key, renamings, converters, whole.base_model_prefix, expected
            )
            if name not in expected and key in expected:
                name, pattern = key, None
            self._sources[name].append((key, pattern))
        self.foreign = [
            key
            for name, sources in self._sources.items()
            if name not in expected
            for key, _ in sources
            if not _OLD_BUFFERS.search(key)
        ]
        """Keys of the checkpoint's tensors that the model does not have."""
        self.multimodal = whole.config.get_text_config() is not whole.config
        """Whether the model is multimodal. If so, an export copies the tensors outside the language
        model unchanged, including the tensors in `foreign`."""
        self._tied: dict[str, str] = dict(whole.all_tied_weights_keys)
        for target, source in self._tied.items():
            if target in self._sources and source not in self._sources:
                self._sources[source] = self._sources[target]
        self.missing = {
            name: tuple(value.shape)
            for name, value in expected.items()
            if name not in self._sources and name not in self._tied
        }
        """Shapes of the model's tensors that are not in the checkpoint, by name."""
        self._weights = {name for name, value in expected.items() if value.is_floating_point()}

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self._sources:
            raise KeyError(name)
        first = self._sources[name][0][1]
        if first is None:
            return self._tensor_of(self._sources[name][0][0])
        converter: Any = copy.deepcopy(self._by_pattern[first])
        for key, pattern in self._sources[name]:
            assert pattern is not None
            converter.collected_tensors[pattern].append(self._tensor_of(key))
        value = converter.convert(name, model=self._whole, config=self._whole.config)[name]
        tensor: torch.Tensor = value[0] if isinstance(value, list) else value
        return tensor

    def outside(self, prefixes: tuple[str, ...]) -> list[str]:
        """Returns the keys of tensors whose names in the model begin with none of `prefixes`."""
        return [
            key
            for name, sources in self._sources.items()
            if not name.startswith(prefixes)
            for key, _ in sources
        ]

    def weight_keys(self) -> list[str]:
        """Returns the keys of tensors from which the model's weights are read, and the foreign keys
        below modules that lack a weight, because a quantized weight may have another name.
        """
        keys = [
            key
            for name, sources in self._sources.items()
            if name in self._weights
            for key, _ in sources
        ]
        lacking = tuple(f"{name.rpartition('.')[0]}." for name in self.missing)
        return keys + [key for key in self.foreign if key.startswith(lacking)]

    def refuse_untied(self, where: str) -> None:
        """Raises UserError if the config ties two matrices that differ in the checkpoint.
        transformers would load both matrices, but the plan has only one. `where` is the start of
        the error message.
        """
        for target, source in self._tied.items():
            if (
                target in self._sources
                and self._sources[target] is not self._sources[source]
                and not _equal(self(target), self(source))
            ):
                raise UserError(
                    f"{where}: {target}",
                    found=(
                        f"a matrix that differs from {source}, to which tie_word_embeddings in"
                        " config.json ties it"
                    ),
                    allowed="the same matrix",
                    fix="set tie_word_embeddings to false in config.json and make the plan again",
                )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have the same shape and values. The dtypes may differ."""
    return one.shape == other.shape and all(
        torch.equal(part.float(), same.float())
        for part, same in zip(one.split(_ROWS), other.split(_ROWS), strict=True)
    )


def summary(keys: Iterable[str]) -> str:
    """Returns a line of text with the number of keys in each module. Module names are cut after
    their first layer number.
    """
    counted: dict[str, int] = defaultdict(int)
    for key in keys:
        parts = key.split(".")
        depth = next(
            (index + 1 for index, part in enumerate(parts) if part.isdigit()), min(2, len(parts))
        )
        counted[".".join(parts[:depth]) + (".*" if depth < len(parts) else "")] += 1
    most = sorted(counted.items(), key=lambda entry: -entry[1])
    shown = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in most[:_SHOWN])
    return shown + (f" and {len(most) - _SHOWN} more" if len(most) > _SHOWN else "")
