"""StoredState: reads the weights of a checkpoint from disk, one piece at a time.

It needs no arenas, GPU or executor.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.files.model_files import weight_sources
from megatrain.runtime.files.tensor_file import TensorEntry, read_entries
from megatrain.runtime.files.tensor_stream import TensorSource
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.simulator.model.specs import LayerSpec
from megatrain.simulator.schedule.arithmetic import StateClass, layer_state_of


class StoredState:
    """The weights of a checkpoint on disk, in the form that `files.model_files.export` needs."""

    def __init__(
        self, folder: Path, manifest: Manifest, buffers: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        """Reads the headers of the checkpoint's files.

        Args:
            folder: folder of the checkpoint.
            manifest: its manifest.
            buffers: buffers of the decoder layers, by layer and name. A checkpoint does not contain
                them, because no step changes them.

        Raises MalformedFile if a layer's tensor is missing or has another dtype or size.
        """
        self._folder, self._buffers = folder, buffers
        self._found: dict[str, tuple[Path, TensorEntry]] = {}
        for shard in manifest.shards:
            path = folder / shard.file
            self._found |= {name: (path, entry) for name, entry in read_entries(path).items()}
        work = manifest.workload
        state = layer_state_of(work.dtype, work.state, moments=0, summed=False)
        halves: tuple[StateClass, ...] = ("weights", "master_low")
        self._dtypes = {
            name: TORCH_DTYPE[state[name].dtype] for name in halves if state[name].bytes
        }
        for layer in manifest.model.stack.values():
            for half, kind in self._dtypes.items():
                name, expected = f"{layer.name}.{half}", (kind, (layer.elements,))
                found = (
                    (self._found[name][1].dtype, self._found[name][1].shape)
                    if name in self._found
                    else None
                )
                if found != expected:
                    raise MalformedFile(
                        f"{folder}: {name}",
                        found=found or "no such tensor",
                        allowed=expected,
                        fix="use another checkpoint",
                    )

    def sources(self, layer: LayerSpec, dtype: torch.dtype) -> dict[str, TensorSource]:
        """Returns the layer's weights by tensor name, to be written in `dtype`, bf16 or fp32."""
        high, *low = (
            functools.partial(self._read, f"{layer.name}.{half}") for half in self._dtypes
        )
        return weight_sources(layer, dtype, high, low[0] if low else None)

    def buffers(self, layer: LayerSpec) -> Mapping[str, torch.Tensor]:
        """Returns the layer's buffers by name."""
        return self._buffers.get(layer.name, {})

    def _read(self, name: str, first: int, end: int) -> torch.Tensor:
        path, entry = self._found[name]
        count, offset = ((number * entry.dtype.itemsize) for number in (end - first, first))
        try:
            data = np.fromfile(path, dtype=np.uint8, count=count, offset=entry.start + offset)
        except OSError as error:
            raise MalformedFile(
                str(path),
                found=(error.strerror or str(error)).lower(),
                allowed="a readable file",
                fix="use another checkpoint",
            ) from None
        if data.nbytes != count:
            raise MalformedFile(
                str(path),
                found="an end before that of the last tensor",
                allowed="a file that does not change",
                fix="export it again",
            )
        return torch.from_numpy(data).view(entry.dtype)
