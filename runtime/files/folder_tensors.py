"""FolderTensors: reads tensors from the memory-mapped safetensors files of a model folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from megatrain.runtime.files.model_folder import weight_files
from megatrain.runtime.files.tensor_file import TensorEntry, read_entries
from megatrain.runtime.files.tensor_stream import TensorSource
from megatrain.simulator.base.errors import UserError


class FolderTensors:
    """The tensors in the safetensors files of a model folder, by their names in these files. Only
    one file is open at a time, so at most one shard is mapped.
    """

    def __init__(self, folder: Path) -> None:
        """Reads the header of every file.

        Raises UserError if a file is missing, malformed, a pickle or outside the folder, or if two
        files have the same tensor.
        """
        self.entries: dict[str, TensorEntry] = {}
        """Dtype, shape and position in its file of each tensor, by name."""
        self._files: dict[str, Path] = {}
        self._path: Path | None = None
        self._stack = contextlib.ExitStack()
        self._file: Any = None
        self.files = weight_files(folder)
        """Paths of the safetensors files."""
        for file in self.files:
            for name, entry in read_entries(file).items():
                if (other := self._files.setdefault(name, file)) is not file:
                    raise UserError(
                        str(file),
                        found=f"tensor {name}, which is also in {other.name}",
                        allowed="each tensor once",
                        fix="fetch the model again",
                    )
                self.entries[name] = entry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def tensor(self, name: str) -> torch.Tensor:
        """Returns the tensor `name`, which is mapped from its file.

        Raises UserError if the file cannot be read.
        """
        path = self._files[name]
        try:
            if path != self._path:
                self._close()
                self._file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._path = path
            value: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(
                str(path),
                found=f"a file that cannot be read ({error})",
                allowed="a whole safetensors file",
                fix="fetch the file again",
            ) from None
        return value

    def source(self, name: str) -> TensorSource:
        """Returns the source of the tensor `name`, which reads its file when it is written."""

        def pieces() -> Iterator[torch.Tensor]:
            yield self.tensor(name)

        entry = self.entries[name]
        return TensorSource(entry.dtype, entry.shape, pieces)

    def _close(self) -> None:
        self._stack.close()
        self._path = self._file = None
