"""One checkpoint: a folder of safetensors files and a manifest, written aside, synced and renamed; read back into any plan of the same workload.

What is stored is the state's content by layer and class (bf16 weights, the low plane of the master, moments), not where a plan keeps it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatrain.runtime.checkpoint.manifest import FORMAT, Manifest, Run, Shard
from megatrain.runtime.checkpoint.randomness import RandomState
from megatrain.runtime.executor import Executor
from megatrain.runtime.files.tensor_file import MalformedFile
from megatrain.runtime.files.tensor_stream import Source, checksum_of, read_tensors, write_tensors
from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.layers.model_config import differences
from megatrain.simulator.errors import RunError, UserError
from megatrain.simulator.plan import Plan

SHARD_BYTES = 4 * 10**9
ASIDE = ".saving-"
"""what a folder's name begins with until it is whole"""
REPLACED = ".replaced-"
"""what its name begins with while another one takes its place"""
_OVERHEAD_BYTES = 2**20  # manifest and headers


class CheckpointError(RunError):
    """A checkpoint could not be written; what was there before is as it was."""


def save(executor: Executor, run: Run, folder: Path) -> None:
    """Writes the checkpoint `folder`, replacing one of that name: whole, or not at all.

    Holds one piece of a tensor in host memory besides what is there. Raises CheckpointError where it cannot be written.
    """
    tensors = executor.state.tensors()
    try:
        if not folder.parent.is_dir():
            folder.parent.mkdir(parents=True)
            sync(folder.parent.parent)
        needed, free = sum(tensor.nbytes for tensor in tensors.values()) + _OVERHEAD_BYTES, shutil.disk_usage(folder.parent).free
        if needed > free:
            raise OSError(28, f"no space left on device: {needed} bytes are needed, {free} are free")
        aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{ASIDE}{folder.name}-"))
    except OSError as error:
        raise _failed(folder, error) from None
    try:
        shards = [_write(aside / f"state-{number:05d}.safetensors", part) for number, part in enumerate(_parts(tensors), 1)]
        manifest = Manifest(
            format=FORMAT, run=run, model=executor.plan.model, workload=executor.plan.workload, optimizer=_described(executor.settings),
            random=RandomState.take(executor.device), shards=tuple(shards),
        )  # fmt: skip
        manifest.save(aside)
        aside.chmod(0o755)
        sync(aside)
        replace(aside, folder)
    except (OSError, UserError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise _failed(folder, error) from None
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def restore(executor: Executor, folder: Path, settings: Mapping[str, Any]) -> Run:
    """Fills weights and moments and sets the random generators; returns where the run stood. The executor's plan may be another one of the same workload.

    Raises MalformedFile where the checkpoint is not as it was written, and UserError where it is another model's, workload's, optimizer's or of other
    `settings`, before anything is changed. Files are verified while they are read: after a MalformedFile the state is undefined until another restore.
    """
    manifest = Manifest.load(folder)
    refuse_another(manifest, executor.plan, executor.settings, settings, folder)
    tensors = executor.state.tensors()
    named = [name for shard in manifest.shards for name in shard.tensors]
    if sorted(named) != sorted(tensors):
        differs = sorted(set(named) ^ set(tensors)) or sorted(name for name in set(named) if named.count(name) > 1)
        raise MalformedFile(f"{folder}: tensors", found=", ".join(differs)[:200], allowed="each tensor of the state once", fix="use another checkpoint")
    check_sizes(folder, manifest)
    for shard in manifest.shards:
        path = folder / shard.file
        try:
            found = read_tensors(path, {name: tensors[name] for name in shard.tensors})
        except OSError as error:
            raise MalformedFile(str(path), found=(error.strerror or str(error)).lower(), allowed="a readable file", fix="use another checkpoint") from None
        _refuse_checksum(path, found, shard)
    manifest.random.put(executor.device)
    return manifest.run


def verify(folder: Path) -> Manifest:
    """Reads all of a checkpoint. Raises MalformedFile, by name, for the first file that is not as it was written."""
    manifest = Manifest.load(folder)
    check_sizes(folder, manifest)
    for shard in manifest.shards:
        _refuse_checksum(folder / shard.file, checksum_of(folder / shard.file), shard)
    return manifest


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises MalformedFile where a file is missing, is a link, or is not of its size: at the cost of looking."""
    for shard in manifest.shards:
        path = folder / shard.file
        found: object
        if path.is_symlink():
            found = "a link, which may leave the checkpoint's folder"
        elif not path.is_file():
            found = "no such file"
        elif (size := path.stat().st_size) != shard.bytes:
            found = f"{size} bytes"
        else:
            continue
        raise MalformedFile(str(path), found=found, allowed=f"a file of {shard.bytes} bytes", fix="use another checkpoint")


def sync(folder: Path) -> None:
    """Makes the folder's list of names durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace(aside: Path, folder: Path) -> None:
    """Renames `aside` to `folder`; one that stands there is moved away first, under a name from which `put_back` moves it back after a crash."""
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
    """Undoes a `replace` that was cut off: the folder that stood there before is there again, unless the new one is there."""
    old = _moved_away(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _moved_away(folder: Path) -> Path:
    return folder.with_name(f"{REPLACED}{folder.name}")


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> Shard:
    size, checksum = write_tensors(path, {name: Source.of(tensor) for name, tensor in tensors.items()})
    return Shard(file=path.name, bytes=size, checksum=checksum, tensors=tuple(tensors))


def _parts(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Runs of tensors of at most `SHARD_BYTES`, or of one tensor that is larger."""
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
        raise MalformedFile(str(path), found=f"checksum {found}", allowed=f"{shard.checksum}, as it was written", fix="use another checkpoint")


def refuse_another(manifest: Manifest, plan: Plan, optimizer: AdamW, settings: Mapping[str, Any], folder: Path, *, known: bool = True) -> None:
    """Raises UserError that names each value which is not as it was. `known`: `settings` are all there; otherwise those that it has are looked at."""
    model = plan.model
    pairs: list[tuple[str, Any, Any]] = [(f"model.{key}", was, now) for key, was, now in differences(manifest.model, model)]
    pairs.append(("model", _tensor_names(manifest.model.stack), _tensor_names(model.stack)))
    before = {key: value for key, value in manifest.run.settings.items() if known or key in settings}
    for prefix, was, now in (
        ("workload", manifest.workload, plan.workload), ("optimizer", manifest.optimizer, _described(optimizer)), ("settings", before, dict(settings)),
    ):  # fmt: skip
        old, new = (_plain(values) for values in (was, now))
        pairs += [(f"{prefix}.{key}", old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())]
    differing = [(name, was, now) for name, was, now in pairs if was != now]
    if differing:
        raise UserError(
            str(folder), found=", ".join(f"{name} {_short(was)}" for name, was, _ in differing),
            allowed=f"{', '.join(f'{name} {_short(now)}' for name, _, now in differing)}, as in this run",
            fix="resume with what the checkpoint was made with, or start a new run from its weights",
        )  # fmt: skip


def _tensor_names(stack: Mapping[str, Any]) -> list[str]:
    return [f"{layer.name}.{tensor.name}{list(tensor.shape)}" for layer in stack.values() for tensor in layer.tensors]


def _plain(values: object) -> dict[str, Any]:
    """As it is after a file."""
    made: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(values))
    return made


def _short(value: object) -> str:
    return str(value)[:60]


def _failed(folder: Path, error: OSError | UserError) -> CheckpointError:
    reason = str(error.found) if isinstance(error, UserError) else (error.strerror or str(error)).lower()
    return CheckpointError(f"checkpoint {folder} was not saved: {reason}; the ones before it are as they were; free some space or name another folder")
