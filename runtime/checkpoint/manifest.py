"""Manifest: describes the files of a checkpoint and the state of the run.

The manifest is written last and includes its own checksum. A folder without a manifest is not a
checkpoint.
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
"""Version of the checkpoint format."""
NAME = "manifest.json"
"""Name of the manifest's file."""
_SHARD = re.compile(r"state-\d{5,9}\.safetensors")


EVALUATION_DATA = "evaluation_data"
"""The key of `RunState.progress` with the digest of the evaluation data."""
TOKENIZER = "tokenizer"
"""The key of `RunState.progress` with the digest of the tokenizer."""


class RunState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of the trainer, as JSON values."""

    step: int
    """Number of completed optimizer steps. It is also the position in the data, because the batches
    of a step depend only on the seed and on the number of the step."""
    loss: float | None = None
    """Loss that `keep_best` compares. A checkpoint without a loss is not kept by `keep_best`."""
    settings: dict[str, Any] = {}
    """Settings that must not change when the run is resumed: learning-rate schedule, seed, data."""
    progress: dict[str, Any] = {}
    """Further values that the trainer restores, such as whether an evaluation is pending.
    `EVALUATION_DATA` is the digest of the data to which `loss` belongs, and empty for the training
    data. `TOKENIZER` is the digest of the tokenizer, and empty without one."""

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
    """A file with tensors of a checkpoint, or with parts of tensors."""

    file: str
    """Name of the file."""
    bytes: int
    """Size of the file in bytes."""
    checksum: str
    """128-bit xxh3 checksum of the file, hexadecimal."""
    tensors: tuple[str, ...]
    """Names of the tensors in the file, `LAYER.CLASS`, in the order of their data."""
    firsts: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] = ()
    """If several ranks saved the checkpoint, the index of the part's first element in the last
    dimension of each tensor. Empty if the file has whole tensors."""

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
    """Version of the format, `FORMAT`."""
    run: RunState
    """State of the trainer."""
    model: ModelSpec
    """Model of the run."""
    workload: Workload
    """Workload of the run."""
    optimizer: dict[str, Any]
    """Name and hyperparameters of the optimizer."""
    random: RandomState
    """States of the random generators."""
    shards: tuple[Shard, ...]
    """Files of the checkpoint with its tensors."""

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

        Raises MalformedFile if there is no manifest, or if it is damaged or not valid.
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
    """The content of the manifest file: a manifest and its checksum."""

    checksum: str
    """128-bit xxh3 checksum of `content`, hexadecimal."""
    content: msgspec.Raw
    """The manifest as JSON."""
