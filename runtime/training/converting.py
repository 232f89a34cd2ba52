"""convert_run: writes a copy of a run with one of its checkpoints in another state format.

This needs no GPU, and only a small part of the memory that training needs.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatrain.runtime.checkpoint.checkpoint import SHARD_BYTES, sync
from megatrain.runtime.checkpoint.conversion import ConvertedState
from megatrain.runtime.checkpoint.manifest import Manifest, Shard
from megatrain.runtime.checkpoint.stored_steps import checkpoint_name
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE
from megatrain.runtime.files.tensor_stream import TensorSource, write_tensors
from megatrain.runtime.training.exporting import undamaged_checkpoint
from megatrain.runtime.training.metrics_file import FORMER, METRICS
from megatrain.runtime.training.run_folder import save_plan
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import refuse_existing
from megatrain.simulator.model.optimizer import WITH_STATE_FORMATS
from megatrain.simulator.model.state_format import EXACT, FORMATS
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule.plan import Plan

_COPIED = ("config.toml", METRICS, FORMER, CHAT_TEMPLATE)
"""Files of a run that do not depend on the state format."""


class Converted(NamedTuple):
    """The result of `convert_run`."""

    step: int
    """The step of the checkpoint."""
    before: str
    """The state format of the old checkpoint."""
    bytes: int
    """The size of the new checkpoint's files in bytes."""
    is_run: bool
    """Whether the new folder has a plan, and so can be resumed without naming one."""


def convert_run(
    run: Path,
    out: Path,
    state: str,
    *,
    step: int | None = None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Converted:
    """Writes a copy of a run with one checkpoint in the format `state` to the new folder `out`.

    The folder is written completely or not at all. The new plan differs from the run's plan only in
    the state format. It may no longer fit its memory limits. The run can then be resumed with
    another plan.

    Args:
        run: the folder of a run or of one checkpoint.
        out: the folder to write. It must not exist.
        state: the name of the new format.
        step: the step of the checkpoint, or None for the newest undamaged one.
        on_note: called with lines for the user.

    Raises UserError if there is no undamaged checkpoint, if it already has the format or cannot
    have it, or if `out` exists.
    """
    refuse_existing(out)
    folder, manifest = undamaged_checkpoint(run, step, on_note)
    work = manifest.workload
    if work.dtype != "bf16" or work.optimizer not in WITH_STATE_FORMATS:
        raise UserError(
            f"{folder}: --state",
            found=f"{state}, with dtype {work.dtype} and optimizer {work.optimizer}",
            allowed=f"{EXACT}, which such a run has already",
            fix=f"convert a run with dtype bf16 and optimizer {' or '.join(WITH_STATE_FORMATS)}",
        )
    if work.state == state:
        raise UserError(
            f"{folder}: --state",
            found=f"{state}, which the checkpoint has already",
            allowed=", ".join(name for name in FORMATS if name != state),
            fix="name another format",
        )
    seed = manifest.run.settings.get("training.seed", 0)
    changed = msgspec.structs.replace(work, state=state)
    home = run if folder != run else run.parent.parent  # RUN/checkpoints/step-00000123
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".converting-{out.name}-"))
    try:
        place = aside / "checkpoints" / checkpoint_name(manifest.run.step)
        place.mkdir(parents=True)
        shards = _write(ConvertedState(folder, manifest, state, seed).sources(), place)
        new = msgspec.structs.replace(manifest, workload=changed, shards=tuple(shards))
        assert isinstance(new, Manifest)
        new.save(place)
        is_run = (home / "plan.toml").is_file()
        if is_run:
            _save_run(home, aside, state)
        for synced in (place, place.parent, aside):
            sync(synced)
        aside.chmod(0o755)
        aside.rename(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return Converted(manifest.run.step, work.state, sum(shard.bytes for shard in shards), is_run)


def _write(tensors: Mapping[str, TensorSource], place: Path) -> list[Shard]:
    """Writes the files of the checkpoint `place`. Each has about 4 GB, or one larger tensor."""
    parts: list[dict[str, TensorSource]] = []
    part_bytes = SHARD_BYTES
    for name, source in tensors.items():
        if part_bytes + source.bytes > SHARD_BYTES:
            parts.append({})
            part_bytes = 0
        parts[-1][name] = source
        part_bytes += source.bytes
    shards = []
    for number, part in enumerate(parts, 1):
        path = place / f"state-{number:05d}.safetensors"
        size, checksum = write_tensors(path, part)
        shards.append(Shard(file=path.name, bytes=size, checksum=checksum, tensors=tuple(part)))
    return shards


def _save_run(home: Path, aside: Path, state: str) -> None:
    """Writes the files of a run except its checkpoints, with a plan in the format `state`."""
    for name in _COPIED:
        if (home / name).is_file():
            shutil.copyfile(home / name, aside / name)
    plan = Plan.load(home / "plan.toml")
    work = msgspec.structs.replace(plan.workload, state=state)
    plan = msgspec.structs.replace(plan, workload=work, prediction=None, digest="")
    plan = msgspec.structs.replace(plan, digest=lower(plan).digest)
    local = home / plan.source
    save_plan(plan, home, str(local) if local.exists() else plan.source, aside)
