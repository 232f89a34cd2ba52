"""Checkpoints: the folder with a run's checkpoints, which have names like `step-00000123`."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megatrain.runtime.checkpoint.checkpoint import (
    ASIDE,
    REPLACED,
    check_sizes,
    put_back,
    refuse_other_run,
    restore,
    save,
    verify,
)
from megatrain.runtime.checkpoint.manifest import Manifest, RunState
from megatrain.runtime.checkpoint.stored_steps import checkpoint_name, stored_steps
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.malformed_file import MalformedFile
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.schedule.plan import Plan

_REMOVING = ".removing-"
"""prefix of a checkpoint's name while it is removed"""


class Checkpoints:
    """Saves, restores and removes the checkpoints of one run. No other process may write there,
    except for the ranks of the run: each has a `Checkpoints`, and only rank 0 tidies the folder.
    """

    def __init__(
        self, folder: Path, *, keep_last: int = 2, keep_best: int = 0, tidies: bool = True
    ) -> None:
        """Uses the folder `folder`, which need not exist.

        Args:
            folder: the folder.
            keep_last: number of newest checkpoints to keep, at least 1.
            keep_best: number of checkpoints with the lowest loss to keep as well.
            tidies: whether to remove what is not needed, as rank 0 does.

        Raises UserError if one of these numbers is too small.
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
        there = next(
            each for each in (self.folder, *self.folder.absolute().parents) if each.exists()
        )
        return shutil.disk_usage(there).free

    def path(self, step: int) -> Path:
        """Returns the folder of the checkpoint of `step`, which need not exist."""
        return self.folder / checkpoint_name(step)

    def save(self, executor: Executor, run: RunState) -> Path:
        """Saves a checkpoint, then removes those that are not to be kept. Returns its folder.

        Checkpoints of later steps are also removed. They are there if the run was resumed from an
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

    def refuse(
        self,
        plan: Plan,
        optimizer: AdamW,
        settings: Mapping[str, Any],
        step: int | Literal["newest"] = "newest",
        *,
        known: bool = True,
    ) -> None:
        """Raises the errors of `restore` that can be found without reading the tensors.

        Called before memory is allocated.

        Args:
            plan: plan of the run.
            optimizer: optimizer of the run.
            settings: settings of the run.
            step: step of the checkpoint to restore.
            known: whether `settings` are complete. If not, only those that are there are compared.
        """
        self.recover()
        chosen = self._choose(step)
        if chosen is None:
            return
        with self._suggesting_earlier(chosen):
            path = self.path(chosen)
            manifest = self._manifest(path, chosen)
            check_sizes(path, manifest)
            refuse_other_run(manifest, plan, optimizer, settings, path, known=known)

    def restore(
        self,
        executor: Executor,
        settings: Mapping[str, Any],
        step: int | Literal["newest"] = "newest",
    ) -> RunState | None:
        """Restores the newest checkpoint, or that of `step`. Returns None if there is none.

        Raises UserError if there is no checkpoint of `step`, if it belongs to another run, or if it
        is damaged. In the last case, the error names the newest undamaged checkpoint before it.
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
        """Returns `step` as a number, or None for the newest step if there is no checkpoint.

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
        """Makes a MalformedFile suggest the newest undamaged checkpoint before `step`."""
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
        for other in reversed([found for found in self.steps() if found < step]):
            try:
                if verify(self.path(other)).run.step == other:
                    return other
            except (MalformedFile, OSError):
                continue
        return None

    def _prune(self) -> None:
        assert self._current is not None
        mine = [step for step in self.steps() if step <= self._current]
        kept = set(mine[-self._keep_last :])
        if self._keep_best:
            losses = {step: self._loss(step) for step in mine}
            kept.update(
                sorted(
                    (step for step in mine if losses[step] < math.inf),
                    key=lambda step: (losses[step], -step),
                )[: self._keep_best]
            )
        for step in self.steps():
            if step not in kept:
                path = self.path(step)
                renamed = path.with_name(f"{_REMOVING}{path.name}")
                path.rename(renamed)  # an incomplete checkpoint must not have a checkpoint's name
                shutil.rmtree(renamed, ignore_errors=True)

    def _loss(self, step: int) -> float:
        try:
            manifest = Manifest.load(self.path(step))
            check_sizes(self.path(step), manifest)
        except MalformedFile:
            return math.inf
        loss = manifest.run.loss
        return math.inf if loss is None or math.isnan(loss) else loss

    def recover(self) -> None:
        """Cleans up after a save or a removal that was interrupted.

        Removes incomplete folders, and renames a checkpoint back if its replacement is missing.
        """
        there = self._tidies and self.folder.is_dir()
        for path in list(self.folder.iterdir()) if there else ():
            if path.name.startswith(REPLACED):
                put_back(path.with_name(path.name.removeprefix(REPLACED)))
            elif path.name.startswith((ASIDE, _REMOVING)):
                shutil.rmtree(path, ignore_errors=True)
