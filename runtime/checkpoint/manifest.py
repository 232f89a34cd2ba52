"""Manifest: the description of a checkpoint's files, and of the run that they belong to.

It is written last and includes its own checksum. A folder without a manifest is not a checkpoint.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import xxhash

from megatrain.runtime.checkpoint.randomness import RandomState
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_text, write_bytes
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

FORMAT = 1
NAME = "manifest.json"
_SHARD = re.compile(r"state-\d{5,9}\.safetensors")


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of the trainer, as plain values: numbers, texts, lists and dicts."""

    step: int
    """number of optimizer steps done. It is also the position in the data, because the batches of a
    step depend only on the seed and the step's number"""
    loss: float | None = None
    """loss that `keep_best` compares; a checkpoint without a loss is never one of the best"""
    settings: dict[str, Any] = {}
    """settings that must not change when the run is resumed: learning-rate schedule, seed, data"""
    progress: dict[str, Any] = {}
    """further values that the trainer restores, such as whether an evaluation is pending"""

    def __post_init__(self) -> None:
        if not 0 <= self.step < 10**8:
            raise UserError(
                "checkpoint: step",
                found=self.step,
                allowed="0 to 99999999",
                fix="count steps from 1",
            )


class Shard(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """A file with some of a checkpoint's tensors, or with parts of them."""

    file: str
    """name of the file"""
    bytes: int
    """size of the file"""
    checksum: str
    """xxh3 checksum of the file, 128 bits, hexadecimal"""
    tensors: tuple[str, ...]
    """names of its tensors, `LAYER.CLASS`, in the order of their data"""
    firsts: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    """for each tensor, the index in the last dimension of the first element that the file has, if a
    rank of several saved its part; empty if the file has whole tensors"""

    def __post_init__(self) -> None:
        if self.firsts and len(self.firsts) != len(self.tensors):
            raise UserError(
                "firsts",
                found=f"{len(self.firsts)} numbers",
                allowed=f"none, or {len(self.tensors)}, one for each tensor",
                fix="use another checkpoint",
            )
        if not _SHARD.fullmatch(self.file):
            raise UserError(
                "file",
                found=repr(self.file),
                allowed="state-00001.safetensors and so on, next to the manifest",
                fix="use another checkpoint",
            )


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a checkpoint's manifest."""

    format: int
    """version of the format, `FORMAT`"""
    run: RunState
    """state of the trainer"""
    model: ModelSpec
    """model of the run"""
    workload: Workload
    """workload of the run"""
    optimizer: dict[str, Any]
    """name and hyperparameters of the optimizer"""
    random: RandomState
    """states of the random generators"""
    shards: tuple[Shard, ...]
    """files of the checkpoint"""

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise UserError(
                "format",
                found=self.format,
                allowed=FORMAT,
                fix="resume with the version that wrote the checkpoint",
            )

    def save(self, folder: Path) -> None:
        """Writes the manifest to `folder`, atomically. Raises UserError if it cannot be written."""
        content = msgspec.json.encode(self)
        write_bytes(
            folder / NAME,
            msgspec.json.encode(
                _Sealed(checksum=xxhash.xxh3_128_hexdigest(content), content=msgspec.Raw(content))
            ),
        )

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Reads the manifest of the checkpoint `folder`.

        Raises MalformedFile if there is none, or if it is damaged or not valid.
        """
        path = folder / NAME
        try:
            if folder.is_symlink() or path.is_symlink():
                raise UserError(
                    str(path),
                    found="a link",
                    allowed="a file in the checkpoint's own folder",
                    fix="copy the checkpoint, not a link to it",
                )
            sealed = msgspec.json.decode(read_text(path).encode(), type=_Sealed)
            if xxhash.xxh3_128_hexdigest(sealed.content) != sealed.checksum:
                raise UserError(
                    str(path),
                    found="a checksum that differs from the one in the file",
                    allowed="a file as it was written",
                    fix="use another checkpoint",
                )
            return convert(msgspec.json.decode(sealed.content), cls, str(path))
        except UserError as error:
            raise MalformedFile(
                error.where, found=error.found, allowed=error.allowed, fix=error.fix
            ) from None
        except (ValueError, RecursionError) as error:
            raise MalformedFile(
                str(path),
                found=f"not a manifest ({error})",
                allowed="a file as it was written",
                fix="use another checkpoint",
            ) from None


class _Sealed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file's content: a manifest with its checksum."""

    checksum: str
    """xxh3 checksum of `content`, 128 bits, hexadecimal"""
    content: msgspec.Raw
    """the manifest as JSON"""
