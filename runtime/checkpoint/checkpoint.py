"""Saves and restores one checkpoint: a folder of safetensors files with a manifest.

The folder is written under a temporary name, synced and renamed. It contains the state by layer and
class (weights, low halves of the masters, moments), independently of where a plan keeps it. So it
can be restored with any plan of the same model and workload, for any number of GPUs. With several,
each rank writes the part of the state that it owns to files of its own.
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
from megatrain.runtime.checkpoint.stored_parts import StoredParts
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.malformed_file import MalformedFile, readable
from megatrain.runtime.files.tensor_stream import (
    TensorSource,
    checksum_of,
    read_tensors,
    write_tensors,
)
from megatrain.runtime.layers.model_config import differences
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.ranks import Ranks
from megatrain.simulator.base.errors import RunError, UserError
from megatrain.simulator.schedule.plan import Plan

SHARD_BYTES = 4 * 10**9
ASIDE = ".saving-"
"""prefix of a folder's name until it is complete"""
REPLACED = ".replaced-"
"""prefix of an old folder's name while a new folder replaces it"""
_OVERHEAD_BYTES = 2**20  # manifest and headers


class CheckpointError(RunError):
    """The error for a checkpoint that could not be written. Earlier checkpoints are unchanged."""


def save(executor: Executor, run: RunState, folder: Path) -> None:
    """Writes the checkpoint `folder`, completely or not at all. Replaces a folder of that name.

    Needs additional host memory for one piece of a tensor. With several GPUs, every rank must call
    this at the same point. Each writes the state that it owns, and rank 0 the manifest after it.

    Raises CheckpointError, on every rank, if the checkpoint cannot be written.
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
            optimizer=_described(executor.settings),
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
            [shard for each in _on_all_ranks(ranks, write, folder) for shard in each], list[Shard]
        )
        _on_all_ranks(ranks, finish, folder)
    except BaseException:
        if not number:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _on_all_ranks(ranks: Ranks | None, work: Callable[[], Any], folder: Path) -> list[Any]:
    """Does `work` and returns the results of all ranks, with several as plain values.

    Raises CheckpointError, on every rank, if one of them fails because of the disk.
    """
    made, reason = None, ""
    try:
        made = work()
    except UserError as error:
        reason = str(error.found) or "a mistake"
    except OSError as error:  # some have no text
        reason = (error.strerror or str(error)).lower() or type(error).__name__
    found = [(made, reason)] if ranks is None else ranks.values((made, reason))
    for _, text in found:
        if text:
            raise CheckpointError(
                f"checkpoint {folder} was not saved: {text}; earlier checkpoints are unchanged;"
                " free some space or name another folder"
            )
    return [each for each, _ in found]


def checkpoint_bytes(executor: Executor) -> int:
    """Returns the size of a checkpoint on the disk, or a little more."""
    own = sum(tensor.nbytes for tensor in executor.state.tensors().values())
    # rank 0 has no smaller parts than the others
    return executor.plan.gpus * own + _OVERHEAD_BYTES


def restore(executor: Executor, folder: Path, settings: Mapping[str, Any]) -> RunState:
    """Restores weights, moments and random generators. Returns the state of the run.

    The executor's plan may differ from the one that wrote the checkpoint, also in the number of
    GPUs, if model and workload are the same. With several GPUs, every rank must call this.

    Raises:
        MalformedFile: if the checkpoint is damaged. Files are verified while they are read, so the
            state is undefined after this error until another restore.
        UserError: if model, workload, optimizer or `settings` differ from those of the checkpoint.
            Nothing has been changed then.
    """
    manifest = Manifest.load(folder)
    refuse_other_run(manifest, executor.plan, executor.settings, settings, folder)
    tensors = executor.state.tensors()
    in_parts = executor.ranks is not None or any(shard.firsts for shard in manifest.shards)
    named = [name for shard in manifest.shards for name in shard.tensors]
    # a tensor in parts is named by several files, which `StoredParts` checks
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
        manifest.random.put(executor.device)
        return manifest.run
    for shard in manifest.shards:
        path = folder / shard.file
        with readable(path):
            found = read_tensors(path, {name: tensors[name] for name in shard.tensors})
        _refuse_checksum(path, found, shard)
    manifest.random.put(executor.device)
    return manifest.run


def _restore_parts(
    executor: Executor, folder: Path, manifest: Manifest, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Fills `tensors`, of which this rank owns what it owns, from files that have any parts.

    Each rank verifies some of the files, and all of them are verified before any is used.
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
    """Reads all files of a checkpoint and compares their checksums. Returns the manifest.

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
    """Raises MalformedFile if a file is missing, is a link, or has another size than it should.

    Does not read the files.
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
    """Syncs the entries of `folder` to disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(aside: Path, folder: Path) -> None:
    """Renames `aside` to `folder`, and removes the folder that was there before.

    The old folder is first renamed, so that `put_back` can restore it after a crash.
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
    """Cleans up after a `replace` that was interrupted.

    Renames the old folder back if the new one is not there, and removes it otherwise.
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
    held = SHARD_BYTES
    for name, tensor in tensors.items():
        if held + tensor.nbytes > SHARD_BYTES:
            parts.append({})
            held = 0
        parts[-1][name] = tensor
        held += tensor.nbytes
    return parts


def _described(optimizer: AdamW) -> dict[str, Any]:
    return {"name": type(optimizer).__name__, **msgspec.to_builtins(optimizer)}


def _refuse_checksum(path: Path, found: str, shard: Shard) -> None:
    if found != shard.checksum:
        raise MalformedFile(
            str(path),
            found=f"checksum {found}",
            allowed=f"{shard.checksum}, as it was written",
            fix="use another checkpoint",
        )


def refuse_other_run(
    manifest: Manifest,
    plan: Plan,
    optimizer: AdamW,
    settings: Mapping[str, Any],
    folder: Path,
    *,
    known: bool = True,
) -> None:
    """Raises UserError if the checkpoint belongs to another run. The error names all differences.

    A run may become longer, but not shorter if its learning rate depends on the number of steps.

    Args:
        manifest: manifest of the checkpoint.
        plan: plan of the run.
        optimizer: optimizer of the run.
        settings: settings of the run.
        folder: folder of the checkpoint, for the error message.
        known: whether `settings` are complete. If not, only those that are there are compared.
    """
    model = plan.model
    pairs: list[tuple[str, Any, Any]] = [
        (f"model.{key}", was, now) for key, was, now in differences(manifest.model, model)
    ]
    pairs.append(("model", _tensor_names(manifest.model.stack), _tensor_names(model.stack)))
    before = {
        key: value for key, value in manifest.run.settings.items() if known or key in settings
    }
    if is_longer(before, settings):
        before["training.steps"] = settings["training.steps"]
    for prefix, was, now in (
        ("workload", manifest.workload, plan.workload),
        # a setting that is newer than the checkpoint had its default
        ("optimizer", _described(AdamW()) | manifest.optimizer, _described(optimizer)),
        ("settings", before, dict(settings)),
    ):
        old, new = (_plain(values) for values in (was, now))
        pairs += [
            (f"{prefix}.{key}", old.get(key), new.get(key))
            for key in sorted(old.keys() | new.keys())
        ]
    differing = [(name, was, now) for name, was, now in pairs if was != now]
    if [name for name, *_ in differing] == ["settings.training.steps"]:
        ((_, was, now),) = differing
        if isinstance(was, int) and isinstance(now, int):
            raise UserError(
                str(folder),
                found=f"{was} steps",
                allowed=f"at least {was} steps, not {now}: the learning rate depends on the number"
                " of steps, so a run can become longer, but not shorter",
                fix=f"leave out --steps, or pass at least {was}",
            )
    if differing:
        raise UserError(
            str(folder),
            found=", ".join(f"{name} {_short(was)}" for name, was, _ in differing),
            allowed=(
                f"{', '.join(f'{name} {_short(now)}' for name, _, now in differing)}, as in"
                " this run"
            ),
            fix=(
                "resume with what the checkpoint was made with, or start a new run from its weights"
            ),
        )


def is_longer(before: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Returns whether a run whose learning rate depends on its steps has more steps than before."""
    was, now = before.get("training.steps"), settings.get("training.steps")
    return isinstance(was, int) and isinstance(now, int) and now > was


def _tensor_names(stack: Mapping[str, Any]) -> list[str]:
    return [
        f"{layer.name}.{tensor.name}{list(tensor.shape)}"
        for layer in stack.values()
        for tensor in layer.tensors
    ]


def _plain(values: object) -> dict[str, Any]:
    """Returns `values` as they are after writing them to a file and reading them back."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return made


def _short(value: object) -> str:
    return str(value)[:60]
