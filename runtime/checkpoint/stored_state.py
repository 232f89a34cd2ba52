"""StoredState: reads the weights of a checkpoint from disk, without arenas, GPU or executor."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from megatrain.runtime.checkpoint.manifest import Manifest
from megatrain.runtime.checkpoint.stored_parts import StoredParts
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.files.model_files import weight_sources
from megatrain.runtime.files.tensor_stream import TensorSource
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.simulator.model.layer import LayerSpec
from megatrain.simulator.schedule.arithmetic import StateClass, layer_state_of


class StoredState:
    """The weights of a checkpoint on disk, as an `Exportable` of `files/model_files.py`."""

    def __init__(
        self, folder: Path, manifest: Manifest, buffers: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> None:
        """Reads the headers of the checkpoint's files.

        Args:
            folder: folder of the checkpoint.
            manifest: manifest of the checkpoint.
            buffers: buffers of the decoder layers, by layer and name. A checkpoint does not contain
                buffers, because no step changes them.

        Raises MalformedFile if a layer's tensor is missing or has another dtype or size.
        """
        self._buffers = buffers
        self._stored = stored = StoredParts(folder, manifest)
        work = manifest.workload
        state = layer_state_of(work.dtype, work.state, moments=0, summed=False)
        halves: tuple[StateClass, ...] = ("weights", "master_low")
        self._dtypes = {
            name: TORCH_DTYPE[state[name].dtype] for name in halves if state[name].bytes
        }
        for layer in manifest.model.stack.values():
            for half, kind in self._dtypes.items():
                name, expected = f"{layer.name}.{half}", (kind, (layer.elements,))
                found = (stored.dtype(name), stored.shape(name)) if name in stored else None
                if found != expected:
                    raise MalformedFile(
                        f"{folder}: {name}",
                        found=found or "no such tensor",
                        allowed=expected,
                        fix="use another checkpoint",
                    )

    def sources(self, layer: LayerSpec, dtype: torch.dtype) -> dict[str, TensorSource]:
        """Returns the layer's weights by tensor name, as sources in `dtype`, bf16 or fp32."""
        high, *low = (
            functools.partial(self._stored.read, f"{layer.name}.{half}") for half in self._dtypes
        )
        return weight_sources(layer, dtype, high, low[0] if low else None)

    def buffers(self, layer: LayerSpec) -> Mapping[str, torch.Tensor]:
        """Returns the layer's buffers by name."""
        return self._buffers.get(layer.name, {})
