"""Saves and restores a checkpoint: a folder of safetensors files with a manifest.

The folder is written under a temporary name, synced and renamed. It contains the state by layer and
class (weights, low halves of the masters, moments). This does not depend on where a plan keeps the
state, so a checkpoint can be restored with any plan for the same model and workload, and for any
number of GPUs. With several GPUs, each rank writes the part of the state that it owns to files of
its own.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatrain.runtime.checkpoint.manifest import FORMAT, Manifest, RunState, Shard
from megatrain.runtime.checkpoint.randomness import RandomState
from megatrain.runtime.checkpoint.same_run import description, refuse_other_run
from megatrain.runtime.checkpoint.stored_parts import StoredParts
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.malformed_file import MalformedFile, readable
from megatrain.runtime.files.tensor_stream import (
    TensorSource,
    checksum_of,
    read_tensors,
    write_tensors,
)
from megatrain.runtime.ranks import Ranks
from megatrain.simulator.base.errors import RunError, UserError

SHARD_BYTES = 4 * 10**9
"""Maximum size of the tensors in a file. A larger tensor has a file of its own."""
ASIDE = ".saving-"
"""Prefix of the name of a folder that is not complete yet."""
REPLACED = ".replaced-"
"""Prefix of the name of an old folder while a new folder replaces it."""
_OVERHEAD_BYTES = 2**20  # manifest and headers


class CheckpointError(RunError):
    """A checkpoint could not be written. Earlier checkpoints are unchanged."""


def save(executor: Executor, run: RunState, folder: Path) -> None:
    """Writes the checkpoint `folder`, completely or not at all. Replaces an existing folder.

    Needs additional host memory for one piece of a tensor (`tensor_stream.PIECE_BYTES`). With
    several GPUs, every rank must call this at the same point. Each rank writes the state that it
    owns, and then rank 0 writes the manifest.

    Raises CheckpointError on every rank if the checkpoint cannot be written.
    """
    ranks, number = executor.ranks, executor.rank

    def begin() -> str:
        if number:
            return ""
        if not folder.parent.is_dir():
            folder.parent.mkdir(parents=True)
            sync(folder.parent.parent)
        needed, free = checkpoint_bytes(executor), shutil.disk_usage(folder.parent).free
        if needed > free:
            raise OSError(
                28, f"no space left on device: {needed} bytes are needed, {free} are free"
            )
        return tempfile.mkdtemp(dir=folder.parent, prefix=f"{ASIDE}{folder.name}-")

    def write() -> list[Shard]:
        tensors = executor.state.tensors()
        firsts = dict.fromkeys(tensors, 0)
        if ranks is not None:
            layers = executor.plan.model.stack.values()
            own = {layer.name: executor.state.first(layer) for layer in layers}
            firsts = {name: own[name.rpartition(".")[0]] for name in tensors}
            tensors = {name: tensor for name, tensor in tensors.items() if tensor.numel()}
        files = range(number + 1, 10**9, ranks.count if ranks else 1)
        return [
            _write(
                aside / f"state-{file:05d}.safetensors",
                part,
                tuple(firsts[name] for name in part) if ranks else (),
            )
            for file, part in zip(files, _parts(tensors), strict=False)
        ]

    def finish() -> None:
        if number:
            return
        manifest = Manifest(
            format=FORMAT,
            run=run,
            model=executor.plan.model,
            workload=executor.plan.workload,
            optimizer=description(executor.settings, executor.plan.workload.optimizer),
            random=RandomState.take(executor.device),
            shards=tuple(shards),
        )
        manifest.save(aside)
        aside.chmod(0o755)
        sync(aside)
        replace(aside, folder)

    aside = Path(_on_all_ranks(ranks, begin, folder)[0])
    try:
        shards = msgspec.convert(
            [shard for own in _on_all_ranks(ranks, write, folder) for shard in own], list[Shard]
        )
        _on_all_ranks(ranks, finish, folder)
    except BaseException:
        if not number:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _on_all_ranks(ranks: Ranks | None, work: Callable[[], Any], folder: Path) -> list[Any]:
    """Calls `work` and returns the results of all ranks. With several ranks, the results are
    decoded from JSON. Raises CheckpointError on every rank if a rank fails because of the disk.
    """
    result, reason = None, ""
    try:
        result = work()
    except UserError as error:
        reason = str(error.found) or "a mistake"
    except OSError as error:  # some errors have no text
        reason = (error.strerror or str(error)).lower() or type(error).__name__
    results = [(result, reason)] if ranks is None else ranks.values((result, reason))
    for _, text in results:
        if text:
            raise CheckpointError(
                f"checkpoint {folder} was not saved: {text}; earlier checkpoints are unchanged;"
                " free some space or name another folder"
            )
    return [value for value, _ in results]


def checkpoint_bytes(executor: Executor) -> int:
    """Returns an upper bound of the size of a checkpoint in bytes. It is close to the size."""
    own = sum(tensor.nbytes for tensor in executor.state.tensors().values())
    # the parts of rank 0 are at least as large as the parts of other ranks
    return executor.plan.gpus * own + _OVERHEAD_BYTES


def restore(executor: Executor, folder: Path, settings: Mapping[str, Any]) -> RunState:
    """Restores weights, moments and random generators from the checkpoint `folder`. Returns the
    state of the run.

    The executor's plan may differ from the plan that wrote the checkpoint, and may have another
    number of GPUs, if model and workload are the same. With several GPUs, every rank must call
    this.

    Raises:
        MalformedFile: if the checkpoint is damaged. Files are verified while they are read, so
            after this error the state is undefined until another restore.
        UserError: if model, workload, optimizer or `settings` are not the same as in the
            checkpoint. The state does not change in this case.
    """
    manifest = Manifest.load(folder)
    refuse_other_run(manifest, executor.plan, executor.settings, settings, folder)
    tensors = executor.state.tensors()
    in_parts = executor.ranks is not None or any(shard.firsts for shard in manifest.shards)
    named = [name for shard in manifest.shards for name in shard.tensors]
    # several files may have parts of a tensor, which `StoredParts` checks
    if sorted(set(named) if in_parts else named) != sorted(tensors):
        differs = sorted(set(named) ^ set(tensors)) or sorted(
            name for name in set(named) if named.count(name) > 1
        )
        raise MalformedFile(
            f"{folder}: tensors",
            found=", ".join(differs)[:200],
            allowed="each tensor of the state once",
            fix="use another checkpoint",
        )
    check_sizes(folder, manifest)
    if in_parts:
        _restore_parts(executor, folder, manifest, tensors)
    else:
        for shard in manifest.shards:
            path = folder / shard.file
            with readable(path):
                checksum = read_tensors(path, {name: tensors[name] for name in shard.tensors})
            _refuse_checksum(path, checksum, shard)
    manifest.random.put(executor.device)
    return manifest.run


def _restore_parts(
    executor: Executor, folder: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fills `tensors`, this rank's part of the state, from files with any parts of tensors. Each
    rank verifies some of the files, and no file is used before all files are verified.
    """
    ranks = executor.ranks
    for shard in manifest.shards[executor.rank :: ranks.count if ranks else 1]:
        path = folder / shard.file
        with readable(path):
            checksum = checksum_of(path)
        _refuse_checksum(path, checksum, shard)
    if ranks is not None:
        ranks.meet()
    stored = StoredParts(folder, manifest)
    for layer in executor.plan.model.stack.values():
        first = executor.state.first(layer)
        for name in [name for name in tensors if name.rpartition(".")[0] == layer.name]:
            target = tensors[name]
            shape = (*target.shape[:-1], layer.elements if ranks else target.shape[-1])
            expected = (target.dtype, shape)
            if (found := (stored.dtype(name), stored.shape(name))) != expected:
                raise MalformedFile(
                    f"{folder}: {name}", found=found, allowed=expected, fix="use another checkpoint"
                )
            stored.fill(name, target, first)


def verify(folder: Path) -> Manifest:
    """Reads all files of a checkpoint and verifies their checksums. Returns the manifest.

    Raises MalformedFile for the first file that is damaged.
    """
    manifest = Manifest.load(folder)
    check_sizes(folder, manifest)
    for shard in manifest.shards:
        path = folder / shard.file
        with readable(path):
            checksum = checksum_of(path)
        _refuse_checksum(path, checksum, shard)
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises MalformedFile if a file is missing, is a link, or does not have the size in the
    manifest. Does not read the files.
    """
    for shard in manifest.shards:
        path = folder / shard.file
        found: object
        if path.is_symlink():
            found = "a link, which may point outside the checkpoint's folder"
        elif not path.is_file():
            found = "no such file"
        elif (size := path.stat().st_size) != shard.bytes:
            found = f"{size} bytes"
        else:
            continue
        raise MalformedFile(
            str(path),
            found=found,
            allowed=f"a file of {shard.bytes} bytes",
            fix="use another checkpoint",
        )


def sync(folder: Path) -> None:
    """Syncs the directory `folder` to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(aside: Path, folder: Path) -> None:
    """Renames `aside` to `folder`, and removes the old folder if there is one. The old folder is
    renamed first, so `put_back` can restore it after a crash.
    """
    old = _moved_away(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    try:
        aside.rename(folder)
    except BaseException:
        if old.exists():
            old.rename(folder)
        raise
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def put_back(folder: Path) -> None:
    """Cleans up after an interrupted `replace`: renames the old folder back if the new folder is
    missing, and otherwise removes the old folder.
    """
    old = _moved_away(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _moved_away(folder: Path) -> Path:
    return folder.with_name(f"{REPLACED}{folder.name}")


def _write(path: Path, tensors: Mapping[str, torch.Tensor], firsts: tuple[int, ...]) -> Shard:
    size, checksum = write_tensors(
        path, {name: TensorSource.of(tensor) for name, tensor in tensors.items()}
    )
    names = tuple(tensors)
    return Shard(file=path.name, bytes=size, checksum=checksum, tensors=names, firsts=firsts)


def _parts(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Splits tensors into shards of at most `SHARD_BYTES`. A larger tensor has its own shard."""
    parts: list[dict[str, torch.Tensor]] = []
    size = SHARD_BYTES
    for name, tensor in tensors.items():
        if size + tensor.nbytes > SHARD_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    return parts


def _refuse_checksum(path: Path, found: str, shard: Shard) -> None:
    if found != shard.checksum:
        raise MalformedFile(
            str(path),
            found=f"checksum {found}",
            allowed=f"{shard.checksum}, as it was written",
            fix="use another checkpoint",
        )
