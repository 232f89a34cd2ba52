"""Manifest: what a checkpoint holds and what it belongs to. Written last, with a checksum of itself; without it a folder is no checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from megatrain.runtime.checkpoint.randomness import RandomState
from megatrain.runtime.files.tensor_file import MalformedFile
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import convert, read_text, write_bytes
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

FORMAT = 1
NAME = "manifest.json"
_SHARD = re.compile(r"state-\d{5,9}\.safetensors")


class Run(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a run stands: the trainer's part of a checkpoint. Plain values only (numbers, texts, lists, dicts)."""

    step: int
    """optimizer steps done; the data's position too, since a step's batches are a function of seed and number"""
    loss: float | None = None
    """by which the best are kept: lower is better, None never is"""
    settings: dict[str, Any] = {}
    """what must be the same at resume, or the run would not be the same: learning-rate schedule, seed, data"""
    progress: dict[str, Any] = {}
    """what the trainer wants back: position in its schedule, patience left, tokens seen"""

    def __post_init__(self) -> None:
        if not 0 <= self.step < 10**8:
            raise UserError("checkpoint: step", found=self.step, allowed="0 to 99999999", fix="count steps from 1")


class Shard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of tensors."""

    file: str
    bytes: int
    checksum: str
    """xxh3, 128 bits, of all of it"""
    tensors: tuple[str, ...]
    """`LAYER.CLASS`, in the order of their bytes"""

    def __post_init__(self) -> None:
        if not _SHARD.fullmatch(self.file):
            raise UserError("file", found=repr(self.file), allowed="state-00001.safetensors and so on, beside the manifest", fix="use another checkpoint")


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A checkpoint's index."""

    format: int
    run: Run
    model: ModelSpec
    workload: Workload
    optimizer: dict[str, Any]
    """its name and hyperparameters"""
    random: RandomState
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise UserError("format", found=self.format, allowed=FORMAT, fix="resume with the version that wrote the checkpoint")

    def save(self, folder: Path) -> None:
        """Into `folder`, atomically. Raises UserError where the disk has no room."""
        content = msgspec.json.encode(self)
        write_bytes(folder / NAME, msgspec.json.encode(_Sealed(checksum=xxhash.xxh3_128_hexdigest(content), content=msgspec.Raw(content))))

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Raises MalformedFile where there is none, it was altered, or says what cannot be."""
        path = folder / NAME
        try:
            if folder.is_symlink() or path.is_symlink():
                raise UserError(str(path), found="a link", allowed="a file in the checkpoint's own folder", fix="copy the checkpoint, not a link to it")
            sealed = msgspec.json.decode(read_text(path).encode(), type=_Sealed)
            if xxhash.xxh3_128_hexdigest(sealed.content) != sealed.checksum:
                raise UserError(str(path), found="another checksum than it was written with", allowed="a file as it was written", fix="use another checkpoint")
            return convert(msgspec.json.decode(sealed.content), cls, str(path))
        except UserError as error:
            raise MalformedFile(error.where, found=error.found, allowed=error.allowed, fix=error.fix) from None
        except (ValueError, RecursionError) as error:
            raise MalformedFile(str(path), found=f"no manifest ({error})", allowed="a file as it was written", fix="use another checkpoint") from None


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    checksum: str
    content: msgspec.Raw
