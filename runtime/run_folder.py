"""RunFolder: what a run leaves on disk, a callback.

`plan.toml`, `hardware.toml`, `config.toml` and `environment.json` at the start; `metrics.jsonl`, a line a step and a line an evaluation; at the end
`measured.json` (the timeline of the steady step whose duration is the median), `memory.json` (bytes allocated) and the model in Hugging Face format.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from megatrain.runtime.callback import Callback, Evaluation, Step
from megatrain.runtime.executor import Executor
from megatrain.runtime.machine import describe
from megatrain.runtime.model_files import export
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import read_text, write_json, write_text, write_toml
from megatrain.simulator.plan import Plan

if TYPE_CHECKING:
    from megatrain.runtime.trainer import Trainer


class RunFolder(Callback):
    """Writes into `path`."""

    def __init__(self, path: Path, origin: Path) -> None:
        """`origin`: the folder that the plan's relative paths are relative to. Raises UserError where `path` holds something already."""
        self.path, self._origin = path, origin
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise UserError(str(path), found="something there already", allowed="a new or empty folder", fix="name another one with --out")

    def on_start(self, trainer: Trainer) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(str(self.path), found=str(error.strerror).lower(), allowed="a folder that can be made", fix="name another one with --out") from None
        self._save_plan(trainer.plan)
        write_toml(self.path / "config.toml", trainer.config, "The config of this run, every field; `megatrain train --config` takes it.")
        write_json(self.path / "environment.json", describe(trainer.device))

    def on_step(self, trainer: Trainer, step: Step) -> None:
        row = {
            "step": step.number, "loss": step.loss, "gradient_norm": step.gradient_norm, "rate": step.rate,
            "seconds": round(step.seconds, 6), "tokens_per_second": round(step.tokens_per_second, 1),
        }  # fmt: skip
        append(self.path / "metrics.jsonl", row if step.checksum is None else {**row, "checksum": step.checksum})

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        row = {"step": evaluation.number, "evaluation_loss": evaluation.loss, "perplexity": evaluation.perplexity, "tokens": evaluation.tokens}
        append(self.path / "metrics.jsonl", {**row, "seconds": round(evaluation.seconds, 6)})

    def on_save(self, trainer: Trainer, number: int) -> None:
        if trainer.config.saving.export and not trainer.finished:
            export(trainer.state, trainer.plan, trainer.model_config, self.path / "models" / f"step-{number}")

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        if error is not None:
            return
        write_json(self.path / "memory.json", measured_memory(trainer.executor, trainer.device_bytes_before))
        if trainer.timelines:
            trainer.measured.save(self.path / "measured.json")
        if trainer.config.saving.export:
            export(trainer.state, trainer.plan, trainer.model_config, self.path / "model")

    def _save_plan(self, plan: Plan) -> None:
        """The plan, and the hardware file that it was made for, so that the run can be compared wherever its folder goes."""
        hardware = self._origin / plan.hardware
        if hardware.suffix == ".toml" and hardware.is_file():
            write_text(self.path / "hardware.toml", read_text(hardware))
            plan = msgspec.structs.replace(plan, hardware="hardware.toml")
        source = self._origin / plan.source
        if source.exists():
            plan = msgspec.structs.replace(plan, source=os.path.relpath(source.resolve(), self.path.resolve()))
        plan.save(self.path / "plan.toml")


def append(metrics: Path, row: Mapping[str, object]) -> None:
    """One more line of `metrics`; JSON knows no infinity and no NaN, so they are null. Raises UserError where it cannot be written."""
    plain = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
    try:
        with metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")
    except OSError as error:
        raise UserError(str(metrics), found=str(error.strerror).lower(), allowed="a disk with room", fix="free some space or name another folder") from None


def measured_memory(executor: Executor, before: int) -> dict[str, object]:
    """Bytes: each pool as allocated, and with CUDA the most that was allocated on the device, less what was there `before`."""
    sizes: dict[str, object] = {"pools": dict(executor.arenas.pool_bytes)}
    sizes.update({f"{place}_pool_bytes": executor.arenas.total(place) for place in ("device", "host")})
    if executor.device.type == "cuda":
        sizes["device_peak_bytes"] = torch.cuda.max_memory_allocated(executor.device) - before
    return sizes
