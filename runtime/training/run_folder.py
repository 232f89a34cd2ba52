"""RunFolder: what a run leaves on disk, a callback.

`plan.toml`, `hardware.toml`, `config.toml` and `environment.json` at the start, and `chat_template.jinja` where the config names a
template; `metrics.jsonl`, a line a step and a line an evaluation; at the end
`measured.json` (the timeline of the steady step whose duration is the median), `memory.json` (bytes allocated) and the model in Hugging Face format.
The trainer itself keeps `checkpoints/` there. When a run goes on, what its metrics say of steps after the checkpoint is cut off.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch

from megatrain.runtime.checkpoint.checkpoint import put_back, replace
from megatrain.runtime.executor import Executor
from megatrain.runtime.files.model_files import export
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE
from megatrain.runtime.machine import describe
from megatrain.runtime.training.callback import Callback, Evaluation, Step
from megatrain.runtime.training.run_lock import LOCK, START
from megatrain.simulator.aside import remove_abandoned
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_text, write_json, write_text, write_toml

if TYPE_CHECKING:
    from megatrain.runtime.training.trainer import Trainer


class RunFolder(Callback):
    """Writes into `path`."""

    def __init__(self, path: Path, origin: Path, *, resumed: bool = False) -> None:
        """`origin`: the folder that the plan's relative paths are relative to. `path` is a new or empty folder, or has a run that is `resumed`."""
        self.path, self._origin, self._resumed = path, origin, resumed

    def on_start(self, trainer: Trainer) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(str(self.path), found=str(error.strerror).lower(), allowed="a folder that can be made", fix="name another one with --out") from None
        if self._resumed:
            self._cut(trainer)
        self._save_plan(trainer)
        if trainer.config.data.chat_template:  # as it was when the run began: exports take it from here
            write_text(self.path / CHAT_TEMPLATE, read_text(Path(trainer.config.data.chat_template)))
        write_json(self.path / "environment.json", describe(trainer.device))
        # the last one: with it the run has begun and can be resumed
        write_toml(self.path / "config.toml", trainer.config, "The config of this run, every field; `megatrain train --config` takes it.")

    def on_step(self, trainer: Trainer, step: Step) -> None:
        row = {
            "step": step.number, "loss": step.loss, "gradient_norm": step.gradient_norm, "rate": step.rate,
            "seconds": round(step.seconds, 6), "tokens_per_second": round(step.tokens_per_second, 1),
        }  # fmt: skip
        append(self.path / "metrics.jsonl", row if step.checksum is None else {**row, "checksum": f"{step.checksum:016x}"})

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        row = {"step": evaluation.number, "evaluation_loss": evaluation.loss, "perplexity": evaluation.perplexity, "tokens": evaluation.tokens}
        append(self.path / "metrics.jsonl", {**row, "seconds": round(evaluation.seconds, 6)})

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        if error is not None:
            if not (self._resumed or isinstance(error, KeyboardInterrupt)):
                self._leave_nothing()
            return
        if trainer.timelines:
            write_json(self.path / "memory.json", measured_memory(trainer.executor, trainer.device_bytes_before))
            trainer.measured.save(self.path / "measured.json")
        if trainer.config.saving.export:
            self._export(trainer)

    def _export(self, trainer: Trainer) -> None:
        """Over the model of an earlier end, if the run has gone on after it."""
        model, config = self.path / "model", trainer.config.saving
        aside = self.path / "model.new" if model.exists() else model
        export(
            trainer.state, trainer.plan, trainer.exported_config, aside, dtype=config.export_dtype or None, source=trainer.folder,
            chat_template=self.path / CHAT_TEMPLATE,
        )  # fmt: skip
        if aside != model:
            replace(aside, model)

    def _leave_nothing(self) -> None:
        """Removes what `on_start` has written, where there is nothing else: a run that could not do a step is not in the way of the next one."""
        with contextlib.suppress(OSError):
            if all(path.name in START or path.name == LOCK for path in self.path.iterdir()):
                for name in START:
                    (self.path / name).unlink(missing_ok=True)

    def _cut(self, trainer: Trainer) -> None:
        """Removes what a run that was cut off has left: half a model, and of the metrics steps that will be done again and damaged lines."""
        put_back(self.path / "model")
        shutil.rmtree(self.path / "model.new", ignore_errors=True)
        for name in ("model", "model.new"):
            remove_abandoned(self.path / name)
        kept, damaged = readable(self.path / "metrics.jsonl")
        if damaged:
            lines = f"{damaged} damaged line{'s' * (damaged > 1)}"
            trainer.note(f"{self.path / 'metrics.jsonl'}: {lines} left out; the weights are not affected")
        write_text(self.path / "metrics.jsonl", "".join(line for step, line in kept if step < trainer.first_step))

    def _save_plan(self, trainer: Trainer) -> None:
        """The plan, and the hardware file that it was made for, so that the run can be compared wherever its folder goes."""
        plan, source = trainer.plan, Path(trainer.source)
        hardware = self._origin / plan.hardware
        if hardware.suffix == ".toml" and hardware.is_file():
            write_text(self.path / "hardware.toml", read_text(hardware))
            plan = msgspec.structs.replace(plan, hardware="hardware.toml")
        name = os.path.relpath(source.resolve(), self.path.resolve()) if source.exists() else trainer.source
        msgspec.structs.replace(plan, source=name).save(self.path / "plan.toml")


def readable(metrics: Path) -> tuple[list[tuple[int, str]], int]:
    """The lines of `metrics` with their steps, and how many others there are that are damaged. Half a line at the end is not counted as one."""
    kept: list[tuple[int, str]] = []
    damaged = 0
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.is_file() else []
    for line in lines:
        try:
            kept.append((msgspec.json.decode(line, type=_Row).step, line.decode()))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            damaged += line.endswith(b"\n")
    return kept, damaged


class _Row(msgspec.Struct):
    """What every line has."""

    step: Annotated[int, msgspec.Meta(ge=1)]


def append(metrics: Path, row: Mapping[str, object]) -> None:
    """One more line of `metrics`; JSON knows no infinity and no NaN, so they are null. Raises UserError where it cannot be written."""
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    try:
        with metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint's steps must not be missing here after a power failure
    except OSError as error:
        raise UserError(str(metrics), found=str(error.strerror).lower(), allowed="a disk with room", fix="free some space or name another folder") from None


def measured_memory(executor: Executor, before: int) -> dict[str, object]:
    """Bytes: each pool as allocated, and with CUDA the most that was allocated on the device, less what was there `before`."""
    sizes: dict[str, object] = {"pools": executor.pool_bytes}
    sizes.update({f"{place}_pool_bytes": executor.allocated(place) for place in ("device", "host")})
    if executor.device.type == "cuda":
        sizes["device_peak_bytes"] = torch.cuda.max_memory_allocated(executor.device) - before
    return sizes
