"""FolderTensors: the tensors in the safetensors files of a model folder, by their names in these files, read by memory map."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from megatrain.runtime.files.model_folder import weight_files
from megatrain.runtime.files.tensor_file import Entry, read_entries
from megatrain.runtime.files.tensor_stream import Source
from megatrain.simulator.errors import UserError


class FolderTensors:
    """Of its files one is open at a time: a load maps no more than one shard."""

    def __init__(self, folder: Path) -> None:
        """Reads the header of every file. Raises UserError where a file is missing, malformed, a pickle or outside the folder, or two files have the same
        tensor.
        """
        self.entries: dict[str, Entry] = {}
        """by name"""
        self._files: dict[str, Path] = {}
        self._path: Path | None = None
        self._stack = contextlib.ExitStack()
        self._file: Any = None
        self.files = weight_files(folder)
        for file in self.files:
            for name, entry in read_entries(file).items():
                if (other := self._files.setdefault(name, file)) is not file:
                    raise UserError(str(file), found=f"tensor {name}, which {other.name} has too", allowed="each tensor once", fix="fetch the model again")
                self.entries[name] = entry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def tensor(self, name: str) -> torch.Tensor:
        """Its memory is the file's own. Raises UserError where the file cannot be read."""
        path = self._files[name]
        try:
            if path != self._path:
                self._close()
                self._file = self._stack.enter_context(safe_open(path, framework="pt"))
                self._path = path
            value: torch.Tensor = self._file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(str(path), found=f"a file that cannot be read ({error})", allowed="a whole safetensors file", fix="fetch the file again") from None
        return value

    def source(self, name: str) -> Source:
        """The tensor as it is in its file, to be written to another one: it is read when it is written."""

        def pieces() -> Iterator[torch.Tensor]:
            yield self.tensor(name)

        entry = self.entries[name]
        return Source(entry.dtype, entry.shape, pieces)

    def _close(self) -> None:
        self._stack.close()
        self._path = self._file = None
