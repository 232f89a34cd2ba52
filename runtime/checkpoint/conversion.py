"""Converts the tensors of a checkpoint to another state format.

Masters are rounded to nearest. Second moments in 8 bits are rounded stochastically, as in an
update. If the new format stores all bits of the old format, the conversion is exact. Only a piece
of one tensor is in memory at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.checkpoint.stored_parts import StoredParts
from megatrain.runtime.files.tensor_stream import TensorSource
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.runtime.optimizer.adamw import join, round_to_bf16, split
from megatrain.runtime.optimizer.blockwise import (
    decoded_first,
    decoded_second,
    encode_first,
    encode_second,
    records,
    rounding_keys,
)
from megatrain.simulator.model.layer import LayerSpec
from megatrain.simulator.model.state_format import FORMATS, StateFormat
from megatrain.simulator.schedule.update_layout import update_layout

_PIECE = 2**22
"""Number of parameters in memory at a time, a multiple of the block of 8-bit moments."""
_CODED = "block8"


class ConvertedState:
    """The tensors of a checkpoint on disk, converted to another state format."""

    def __init__(self, folder: Path, manifest: Manifest, state: str, seed: int) -> None:
        """Reads the headers of the checkpoint's files.

        Args:
            folder: the folder of the checkpoint.
            manifest: the manifest of the checkpoint.
            state: the name of the new state format.
            seed: the run's seed, for stochastic rounding.
        """
        self._old, self._new = FORMATS[manifest.workload.state], FORMATS[state]
        self._optimizer = manifest.workload.optimizer
        self._model = manifest.model
        self._key = rounding_keys(seed, manifest.run.step)[1]
        self._stored = StoredParts(folder, manifest)
        self._read = self._stored.read

    def sources(self) -> Mapping[str, TensorSource]:
        """Returns the converted tensors by name, as sources to write."""
        sources, index = dict[str, TensorSource](), 0
        for layer in self._model.stack.values():
            sources |= {
                f"{layer.name}.{name}": source for name, source in self._layer(layer, index).items()
            }
            index += layer.elements
        return sources | {
            name: self._copied(name)
            for name in self._stored
            if name.rpartition(".")[2] not in ("weights", "master_low", "moments")
        }

    def _copied(self, name: str) -> TensorSource:
        """Returns the source of a tensor that is the same in all formats, such as moving norms."""
        stored = self._stored
        return TensorSource(
            stored.dtype(name),
            stored.shape(name),
            lambda: iter([stored.read(name, 0, stored.elements(name))]),
        )

    def _layer(self, layer: LayerSpec, index: int) -> dict[str, TensorSource]:
        """Returns the sources of a layer. `index` is the model index of its first element."""
        count, low = layer.elements, self._new.low
        sources = {
            "weights": TensorSource(torch.bfloat16, (count,), lambda: self._halves(layer, 0))
        }
        if low:
            sources["master_low"] = TensorSource(
                TORCH_DTYPE[low], (count,), lambda: self._halves(layer, 1)
            )
        coded, layout = self._new.moments == _CODED, update_layout(self._optimizer, layer)
        kept = layout.values if layout else count
        length = records(kept) if coded else kept
        sources["moments"] = TensorSource(
            torch.uint8 if coded else torch.float32,
            (length,) if layout else (2, length),
            lambda: self._moments(layer, index),
        )
        return sources

    def _halves(self, layer: LayerSpec, which: int) -> Iterator[torch.Tensor]:
        """Yields the converted weights if `which` is 0, or the converted low parts if it is 1."""
        for first, end in _pieces(layer.elements):
            high = self._read(f"{layer.name}.weights", first, end)
            master = high.float()
            if self._old.low:
                master = join(high, self._read(f"{layer.name}.master_low", first, end))
            yield _parts(master, self._new)[which]

    def _moments(self, layer: LayerSpec, index: int) -> Iterator[torch.Tensor]:
        """Yields the converted first moments, and then the converted second moments."""
        name, layout = f"{layer.name}.moments", update_layout(self._optimizer, layer)
        place = 0
        for which, decode in enumerate((decoded_first, decoded_second)):
            for begin, count in layout.ranges(which) if layout else [(0, layer.elements)]:
                for first, end in _pieces(count):
                    span = place + first, place + end
                    if self._old.moments == _CODED:
                        values = decode(self._read(name, *map(records, span)))
                    else:
                        values = self._read(name, *span)
                    if self._new.moments == _CODED:
                        encoded = torch.empty(records(end - first), dtype=torch.uint8)
                        if which:
                            encode_second(values, encoded, self._key, index + begin + first)
                        else:
                            encode_first(values, encoded)
                        values = encoded
                    yield values
                place += count


def _pieces(count: int) -> Iterator[tuple[int, int]]:
    for first in range(0, count, _PIECE):
        yield first, min(first + _PIECE, count)


def _parts(master: torch.Tensor, new: StateFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds `master` [n] fp32 to the format `new`. Returns its weights [n] bf16 and low parts."""
    if new.low is None:
        return round_to_bf16(master), master.new_empty(0)
    high = torch.empty_like(master, dtype=torch.bfloat16)
    low = torch.empty_like(master, dtype=TORCH_DTYPE[new.low])
    split(master, high, low)
    return high, low
