"""Checkpoints: the folder with the checkpoints of a run, which have names like `step-00000123`."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from megatrain.runtime.checkpoint.checkpoint import (
    ASIDE,
    REPLACED,
    check_sizes,
    put_back,
    restore,
    save,
    verify,
)
from megatrain.runtime.checkpoint.manifest import EVALUATION_DATA, Manifest, RunState
from megatrain.runtime.checkpoint.same_run import refuse_other_run
from megatrain.runtime.checkpoint.stored_steps import checkpoint_name, stored_steps
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

_REMOVING = ".removing-"
"""Prefix of the name of a checkpoint while it is removed."""


class Checkpoints:
    """Saves, restores and removes the checkpoints of a run. No other process may write to the
    folder, except for the ranks of the run: each rank has a `Checkpoints`, but only rank 0 removes
    files.
    """

    def __init__(
        self, folder: Path, *, keep_last: int = 2, keep_best: int = 0, tidies: bool = True
    ) -> None:
        """Uses the folder `folder`, which need not exist.

        Args:
            folder: the folder.
            keep_last: number of newest checkpoints to keep, at least 1.
            keep_best: number of checkpoints with the lowest loss to keep in addition. Losses on
                different evaluation data are not compared: of each, so many are kept.
            tidies: whether this process removes old checkpoints and incomplete folders. True only
                on rank 0.

        Raises UserError if `keep_last` or `keep_best` is too small.
        """
        for name, value, least in (("keep_last", keep_last, 1), ("keep_best", keep_best, 0)):
            if value < least:
                raise UserError(
                    f"checkpoints: {name}",
                    found=value,
                    allowed=f">= {least}",
                    fix=f"set {name} = {least}",
                )
        self.folder, self._keep_last, self._keep_best = folder, keep_last, keep_best
        self._tidies = tidies
        self._current: int | None = None

    def steps(self) -> list[int]:
        """Returns the steps of all checkpoints in ascending order, including damaged ones."""
        return stored_steps(self.folder)

    def free_bytes(self) -> int:
        """Returns the free bytes of the disk with the folder, which need not exist yet."""
        paths = (self.folder, *self.folder.absolute().parents)
        return shutil.disk_usage(next(path for path in paths if path.exists())).free

    def path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of `step`, which need not exist."""
        return self.folder / checkpoint_name(step)

    def save(self, executor: Executor, run: RunState) -> Path:
        """Saves a checkpoint, and removes checkpoints that `keep_last` and `keep_best` do not keep.
        Returns the folder of the checkpoint.

        Checkpoints of later steps are also removed. They exist if the run was resumed from an
        earlier step. A step that was just saved or restored is not saved again.

        Raises CheckpointError if the checkpoint cannot be written.
        """
        path = self.path(run.step)
        if self._current != run.step:
            self.recover()
            save(executor, run, path)
            self._current = run.step
            if self._tidies:
                self._prune()
        return path

    def evaluated(self, step: int, loss: float, progress: Mapping[str, Any]) -> None:
        """Writes the `loss` and the `progress` after an evaluation to the checkpoint of `step`, so
        `keep_best` compares it, too. Does nothing if another step was saved or restored last.

        Raises UserError if the manifest cannot be written. The checkpoint is then unchanged.
        """
        if self._tidies and self._current == step:
            path = self.path(step)
            manifest = self._manifest(path, step)
            progress = {**manifest.run.progress, **progress}
            run = msgspec.structs.replace(manifest.run, loss=loss, progress=progress)
            msgspec.structs.replace(manifest, run=run).save(path)

    def refuse(
        self,
        plan: Plan,
        optimizer: AdamW,
        settings: Mapping[str, Any],
        step: int | Literal["newest"] = "newest",
        *,
        known: bool,
        tokenizer: str | None = None,
    ) -> None:
        """Raises the errors of `restore` that can be found without reading the tensors. Call it
        before memory is allocated.

        Args:
            plan: plan of the run.
            optimizer: hyperparameters of the run's optimizer.
            settings: settings of the run.
            step: step of the checkpoint to restore.
            known: whether `settings` are complete. If not, only the settings that it contains are
                compared.
            tokenizer: digest of the run's tokenizer, empty if it has none, or None if it is not
                known. An error says whether it changed.
        """
        self.recover()
        chosen = self._choose(step)
        if chosen is None:
            return
        with self._suggesting_earlier(chosen):
            path = self.path(chosen)
            manifest = self._manifest(path, chosen)
            check_sizes(path, manifest)
            refuse_other_run(
                manifest, plan, optimizer, settings, path, known=known, tokenizer=tokenizer
            )

    def restore(
        self,
        executor: Executor,
        settings: Mapping[str, Any],
        step: int | Literal["newest"] = "newest",
    ) -> RunState | None:
        """Restores the newest checkpoint or the checkpoint of `step`. Returns the state of the run,
        or None if there are no checkpoints and `step` is `newest`.

        Raises UserError if there is no checkpoint of `step`, if it belongs to another run, or if it
        is damaged. If it is damaged, the error names the newest undamaged checkpoint before it.
        """
        self.recover()
        chosen = self._choose(step)
        if chosen is None:
            return None
        with self._suggesting_earlier(chosen):
            self._manifest(self.path(chosen), chosen)
            run = restore(executor, self.path(chosen), settings)
        self._current = chosen
        return run

    def _choose(self, step: int | Literal["newest"]) -> int | None:
        """Returns the number of `step`, or None if `step` is `newest` and there are no checkpoints.
        Raises UserError if there is no checkpoint of `step`.
        """
        steps = self.steps()
        if step == "newest":
            return max(steps, default=None)
        if step not in steps:
            raise UserError(
                str(self.folder),
                found=f"no checkpoint of step {step}",
                allowed=", ".join(map(str, steps)) or "none yet",
                fix="name one of these",
            )
        return step

    @staticmethod
    def _manifest(path: Path, step: int) -> Manifest:
        manifest = Manifest.load(path)
        if manifest.run.step != step:
            raise MalformedFile(
                str(path),
                found=f"a checkpoint of step {manifest.run.step}",
                allowed=f"step {step}",
                fix="rename it back",
            )
        return manifest

    @contextlib.contextmanager
    def _suggesting_earlier(self, step: int) -> Iterator[None]:
        """Makes a MalformedFile from the block suggest the newest undamaged checkpoint before
        `step`.
        """
        try:
            yield
        except MalformedFile as error:
            undamaged = self._undamaged_before(step)
            fix = (
                "start a new run, since there is no undamaged checkpoint before it"
                if undamaged is None
                else f"resume from step {undamaged}, the newest undamaged checkpoint before it"
            )
            raise MalformedFile(
                error.where, found=error.found, allowed=error.allowed, fix=fix
            ) from None

    def _undamaged_before(self, step: int) -> int | None:
        for earlier in reversed([saved for saved in self.steps() if saved < step]):
            try:
                if verify(self.path(earlier)).run.step == earlier:
                    return earlier
            except (MalformedFile, OSError):
                continue
        return None

    def _prune(self) -> None:
        assert self._current is not None
        past = [step for step in self.steps() if step <= self._current]
        kept = set(past[-self._keep_last :])
        if self._keep_best:
            by_data: dict[str, list[tuple[float, int]]] = defaultdict(list)
            for step in past:
                if (run := self._run_of(step)) and run.loss is not None and run.loss < math.inf:
                    data = str(run.progress.get(EVALUATION_DATA))
                    by_data[data].append((run.loss, -step))
            for losses in by_data.values():
                kept.update(-step for _, step in sorted(losses)[: self._keep_best])
        for step in self.steps():
            if step not in kept:
                path = self.path(step)
                renamed = path.with_name(f"{_REMOVING}{path.name}")
                path.rename(renamed)  # an incomplete checkpoint must not have a checkpoint's name
                shutil.rmtree(renamed, ignore_errors=True)

    def _run_of(self, step: int) -> RunState | None:
        """Returns the state of the run in the checkpoint of `step`, or None if it is damaged."""
        try:
            manifest = Manifest.load(self.path(step))
            check_sizes(self.path(step), manifest)
        except MalformedFile:
            return None
        return manifest.run

    def recover(self) -> None:
        """Cleans up after an interrupted save or removal: removes incomplete folders, and renames a
        checkpoint back if its replacement is missing.
        """
        if not (self._tidies and self.folder.is_dir()):
            return
        for path in list(self.folder.iterdir()):
            if path.name.startswith(REPLACED):
                put_back(path.with_name(path.name.removeprefix(REPLACED)))
            elif path.name.startswith((ASIDE, _REMOVING)):
                shutil.rmtree(path, ignore_errors=True)
