"""Checkpoints: a run's folder of them, `step-00000123` and so on: saved, found, pruned."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrain.runtime.checkpoint.checkpoint import ASIDE, REPLACED, check_sizes, put_back, refuse_another, restore, save, verify
from megatrain.runtime.checkpoint.manifest import Manifest, Run
from megatrain.runtime.executor import Executor
from megatrain.runtime.files.tensor_file import MalformedFile
from megatrain.runtime.hyperparameters import AdamW
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan

_NAME = re.compile(r"step-(\d{8})")
_REMOVING = ".removing-"


class Checkpoints:
    """Of one run, which alone writes there."""

    def __init__(self, folder: Path, *, keep_last: int = 2, keep_best: int = 0) -> None:
        """Kept are the `keep_last` newest and the `keep_best` of least loss."""
        for name, value, least in (("keep_last", keep_last, 1), ("keep_best", keep_best, 0)):
            if value < least:
                raise UserError(f"checkpoints: {name}", found=value, allowed=f">= {least}", fix=f"set {name} = {least}")
        self.folder, self._keep_last, self._keep_best = folder, keep_last, keep_best
        self._current: int | None = None

    def steps(self) -> list[int]:
        """Of every checkpoint, in order; whether one is sound is seen when it is read."""
        if not self.folder.is_dir():
            return []
        return sorted(int(match[1]) for path in self.folder.iterdir() if (match := _NAME.fullmatch(path.name)) and path.is_dir())

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def save(self, executor: Executor, run: Run) -> Path:
        """Saves, then removes what is no longer kept, and what is of a later step: it was left behind when the run went back to an earlier one.

        A step that was just saved or restored is not saved again. Raises CheckpointError.
        """
        path = self.path(run.step)
        if self._current != run.step:
            self._recover()
            save(executor, run, path)
            self._current = run.step
            self._prune()
        return path

    def refuse(self, plan: Plan, optimizer: AdamW, settings: Mapping[str, Any], step: int | None = None, *, known: bool = True) -> None:
        """What `restore` would raise, as far as it can be seen without reading the tensors: before memory is allocated.

        `known`: `settings` are all there; otherwise those that it has are looked at.
        """
        self._recover()
        chosen = self._choose(step)
        if chosen is None:
            return
        with self._offering(chosen):
            path = self.path(chosen)
            manifest = self._manifest(path, chosen)
            check_sizes(path, manifest)
            refuse_another(manifest, plan, optimizer, settings, path, known=known)

    def restore(self, executor: Executor, settings: Mapping[str, Any], step: int | None = None) -> Run | None:
        """The newest checkpoint, or that of `step`, into the executor; None where there is none yet.

        Raises UserError for one that is not as it was written, and offers the newest sound one before it, for one of another run, and for a `step`
        that is not there.
        """
        self._recover()
        chosen = self._choose(step)
        if chosen is None:
            return None
        with self._offering(chosen):
            self._manifest(self.path(chosen), chosen)
            run = restore(executor, self.path(chosen), settings)
        self._current = chosen
        return run

    def _choose(self, step: int | None) -> int | None:
        """The step whose checkpoint is meant; None where there is none yet. Raises UserError for a `step` that has none."""
        steps = self.steps()
        if step is not None and step not in steps:
            raise UserError(str(self.folder), found=f"no checkpoint of step {step}", allowed=", ".join(map(str, steps)) or "none yet", fix="name one of these")
        return step if step is not None else max(steps, default=None)

    @staticmethod
    def _manifest(path: Path, step: int) -> Manifest:
        manifest = Manifest.load(path)
        if manifest.run.step != step:
            raise MalformedFile(str(path), found=f"a checkpoint of step {manifest.run.step}", allowed=f"step {step}", fix="rename it back")
        return manifest

    @contextlib.contextmanager
    def _offering(self, step: int) -> Iterator[None]:
        """A MalformedFile of the checkpoint of `step` names the newest sound one before it as the way out."""
        try:
            yield
        except MalformedFile as error:
            sound = self._sound_before(step)
            fix = "there is no sound one before it: start anew" if sound is None else f"resume from step {sound}, the newest sound one before it"
            raise MalformedFile(error.where, found=error.found, allowed=error.allowed, fix=fix) from None

    def _sound_before(self, step: int) -> int | None:
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
            kept.update(sorted((step for step in mine if losses[step] < math.inf), key=lambda step: (losses[step], -step))[: self._keep_best])
        for step in self.steps():
            if step not in kept:
                path = self.path(step)
                doomed = path.with_name(f"{_REMOVING}{path.name}")
                path.rename(doomed)  # half of a checkpoint never has a checkpoint's name
                shutil.rmtree(doomed, ignore_errors=True)

    def _loss(self, step: int) -> float:
        try:
            manifest = Manifest.load(self.path(step))
            check_sizes(self.path(step), manifest)
        except MalformedFile:
            return math.inf
        loss = manifest.run.loss
        return math.inf if loss is None or math.isnan(loss) else loss

    def _recover(self) -> None:
        """Removes what a save or a removal that was cut off has left, and moves back what it had moved away."""
        for path in list(self.folder.iterdir()) if self.folder.is_dir() else ():
            if path.name.startswith(REPLACED):
                put_back(path.with_name(path.name.removeprefix(REPLACED)))
            elif path.name.startswith((ASIDE, _REMOVING)):
                shutil.rmtree(path, ignore_errors=True)
