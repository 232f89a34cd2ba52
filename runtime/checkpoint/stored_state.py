"""StoredState: a checkpoint's weights where they lie on disk, read a piece at a time. No arenas, no GPU, no executor."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.files.model_files import weight_sources
from megatrain.runtime.files.tensor_file import Entry, MalformedFile, read_entries
from megatrain.runtime.files.tensor_stream import Source
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.simulator.specs import LayerSpec


class StoredState:
    """Of the checkpoint `folder`, whose `manifest` has been read; what `files.model_files.export` writes from."""

    def __init__(self, folder: Path, manifest: Manifest, buffers: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """`buffers`: what decoder layers have besides parameters, by layer and name, which no step changes and no checkpoint holds.

        Raises MalformedFile where a plane of a layer is missing or is not of its size.
        """
        self._folder, self._buffers = folder, buffers
        self._found: dict[str, tuple[Path, Entry]] = {}
        for shard in manifest.shards:
            path = folder / shard.file
            self._found |= {name: (path, entry) for name, entry in read_entries(path).items()}
        dtype = TORCH_DTYPE[manifest.workload.dtype]
        self._planes = {"weights": dtype, "low": torch.int16} if dtype == torch.bfloat16 else {"weights": dtype}
        for layer in manifest.model.stack.values():
            for plane, kind in self._planes.items():
                name, expected = f"{layer.name}.{plane}", (kind, (layer.elements,))
                found = (self._found[name][1].dtype, self._found[name][1].shape) if name in self._found else None
                if found != expected:
                    raise MalformedFile(f"{folder}: {name}", found=found or "no such tensor", allowed=expected, fix="use another checkpoint")

    def sources(self, layer: LayerSpec, dtype: torch.dtype) -> dict[str, Source]:
        """The layer's weights by tensor name, to be written in `dtype`, bf16 or fp32."""
        high, *low = (functools.partial(self._read, f"{layer.name}.{plane}") for plane in self._planes)
        return weight_sources(layer, dtype, high, low[0] if low else None)

    def buffers(self, layer: LayerSpec) -> Mapping[str, torch.Tensor]:
        """The layer's buffers by name."""
        return self._buffers.get(layer.name, {})

    def _read(self, name: str, first: int, end: int) -> torch.Tensor:
        path, entry = self._found[name]
        count, offset = ((number * entry.dtype.itemsize) for number in (end - first, first))
        try:
            data = np.fromfile(path, dtype=np.uint8, count=count, offset=entry.start + offset)
        except OSError as error:
            raise MalformedFile(str(path), found=(error.strerror or str(error)).lower(), allowed="a readable file", fix="use another checkpoint") from None
        if data.nbytes != count:
            raise MalformedFile(str(path), found="an end before the last tensor's", allowed="a file that stays as it is", fix="export it again")
        return torch.from_numpy(data).view(entry.dtype)
