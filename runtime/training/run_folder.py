"""RunFolder: what a run leaves on disk, a callback.

`plan.toml`, `hardware.toml`, `config.toml` and `environment.json` at the start, and `chat_template.jinja` where the config names a
template; `metrics.jsonl`, a line a step and a line an evaluation; at the end
`measured.json` (the timeline of the steady step whose duration is the median), `memory.json` (bytes allocated) and the model in Hugging Face format.
The trainer itself keeps `checkpoints/` there. When a run goes on, what its metrics say of steps after the checkpoint is cut off.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from megatrain.runtime.checkpoint.checkpoint import replace
from megatrain.runtime.executor import Executor
from megatrain.runtime.files.model_files import export
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE
from megatrain.runtime.machine import describe
from megatrain.runtime.training.callback import Callback, Evaluation, Step
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_text, write_json, write_text, write_toml

if TYPE_CHECKING:
    from megatrain.runtime.training.trainer import Trainer


class RunFolder(Callback):
    """Writes into `path`."""

    def __init__(self, path: Path, origin: Path, *, resumed: bool = False) -> None:
        """`origin`: the folder that the plan's relative paths are relative to. Raises UserError where `path` holds something and is not `resumed`."""
        self.path, self._origin, self._resumed = path, origin, resumed
        if not resumed and path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(str(path), found="something there already", allowed="a new or empty folder", fix="name another one with --out")

    def on_start(self, trainer: Trainer) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(str(self.path), found=str(error.strerror).lower(), allowed="a folder that can be made", fix="name another one with --out") from None
        if self._resumed:
            self._cut(trainer.first_step)
        self._save_plan(trainer)
        write_toml(self.path / "config.toml", trainer.config, "The config of this run, every field; `megatrain train --config` takes it.")
        if trainer.config.data.chat_template:  # as it was when the run began: exports take it from here
            write_text(self.path / CHAT_TEMPLATE, read_text(Path(trainer.config.data.chat_template)))
        write_json(self.path / "environment.json", describe(trainer.device))

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
            trainer.state,
            trainer.plan,
            trainer.model_config,
            aside,
            dtype=config.export_dtype or None,
            source=trainer.folder,
            chat_template=self.path / CHAT_TEMPLATE,
        )
        if aside != model:
            replace(aside, model)

    def _cut(self, first_step: int) -> None:
        """Removes what a run that was cut off has left: metrics from `first_step` on, half a line, half a model."""
        for path in [*self.path.glob(".*model*"), self.path / "model.new"]:
            shutil.rmtree(path, ignore_errors=True)
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            lines = read_text(metrics).splitlines(keepends=True)
            write_text(metrics, "".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] < first_step))

    def _save_plan(self, trainer: Trainer) -> None:
        """The plan, and the hardware file that it was made for, so that the run can be compared wherever its folder goes."""
        plan, source = trainer.plan, Path(trainer.source)
        hardware = self._origin / plan.hardware
        if hardware.suffix == ".toml" and hardware.is_file():
            write_text(self.path / "hardware.toml", read_text(hardware))
            plan = msgspec.structs.replace(plan, hardware="hardware.toml")
        name = os.path.relpath(source.resolve(), self.path.resolve()) if source.exists() else trainer.source
        msgspec.structs.replace(plan, source=name).save(self.path / "plan.toml")


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
