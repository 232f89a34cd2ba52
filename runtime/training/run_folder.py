"""RunFolder: a callback that writes the files of a run.

At the start:
    plan_code/              the files of the plan's policy, optimizer and cost model, if they are in
                            files
    plan.toml, hardware.toml, config.toml, environment.json
    data.json               the summaries of the data, unless the caller passed its own batches
    chat_template.jinja     if the config names a chat template
During the run:
    metrics.jsonl           one line per step and one line per evaluation
With each checkpoint, and when the run ends or is stopped:
    measured.json           timeline of the step with the median duration, without warm-up steps
    memory.json             the sizes of the memory pools, and the peak of the device memory
After the first step under another plan:
    plans/SCHEDULE/         the former plan, its hardware file and its measurements
    hardware-DIGEST.toml    the hardware file of the other plan, if it differs from hardware.toml
    plan_code/DIGEST/       files of the other plan, if one differs from a file in plan_code/
At the end:
    model/                  the model in Hugging Face format. If the run is resumed later, its next
                            model is in model-STEP/. models.json lists all (`exported_models.py`)

The trainer writes `checkpoints/` into the same folder. When a resumed run writes its first line to
`metrics.jsonl`, it removes the lines of the steps that it repeats. If a checkpoint of these steps
exists, `metrics-before-resume.jsonl` has them until the next checkpoint is saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from megatrain.runtime.checkpoint.same_run import CODE
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.files.exported_models import add_model, exported_models
from megatrain.runtime.files.model_files import export
from megatrain.runtime.files.model_folder import CHAT_TEMPLATE
from megatrain.runtime.files.model_source import hub_name, planned_source
from megatrain.runtime.machine import describe
from megatrain.runtime.training.callback import Callback, EvaluationResult, Step
from megatrain.runtime.training.metrics_file import MetricsFile
from megatrain.runtime.training.run_lock import LOCK, START, remove_start
from megatrain.simulator.base.atomic_files import remove_abandoned
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import (
    read_text,
    read_toml,
    toml_text,
    write_bytes,
    write_json,
    write_text,
    write_toml,
)
from megatrain.simulator.base.plugins import digest, path_from, path_in, source
from megatrain.simulator.schedule.plan import Plan

if TYPE_CHECKING:
    from megatrain.runtime.training.training_run import TrainingRun


PLANS = "plans"
"""The folder of the plans that a run does not use at present. Each is in a folder whose name is the
digest of its schedule."""


class RunFolder(Callback):
    """Writes plan, config, metrics, measurements and model to the run folder."""

    def __init__(self, path: Path, *, resumed: bool = False) -> None:
        """Creates the callback. `path` is the run folder, which the run's lock has made. It is
        empty unless the run is `resumed`.
        """
        self.path, self._resumed = path, resumed
        self._metrics, self._cuts = MetricsFile(path), False
        self._last_step, self._trained = 0, False
        self._saved_digest = ""

    def on_start(self, trainer: TrainingRun) -> None:
        self._cuts = self._resumed
        if self._resumed:
            self._clean_up(trainer)
        self._last_step = trainer.first_step - 1
        self._save_plan(trainer)
        # Exports copy the template from here, because the user's file may change.
        if trainer.config.data.chat_template:
            write_text(
                self.path / CHAT_TEMPLATE, read_text(Path(trainer.config.data.chat_template))
            )
        write_json(self.path / "environment.json", describe(trainer.device))
        if trainer.data_summaries:
            write_json(self.path / "data.json", trainer.data_summaries)
        # Written last, because its presence means that the run can be resumed.
        write_toml(
            self.path / "config.toml",
            trainer.config,
            "All settings of this run. `megatrain train --config` reads this file.",
        )

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        self._last_step, self._trained = step.number, True
        if trainer.plan.digest != self._saved_digest:
            # After the first step, so a run that the other plan killed resumes under the former.
            self._save_plan(trainer)
        row = {
            "step": step.number,
            "loss": step.loss,
            "gradient_norm": step.gradient_norm,
            "rate": step.rate,
            "seconds": round(step.seconds, 6),
            "tokens_per_second": round(step.tokens_per_second, 1),
            "schedule": trainer.plan.digest,
        }
        if step.clip_factor is not None:
            row["clip_factor"] = step.clip_factor
        if step.checksum is not None:
            row["checksum"] = f"{step.checksum:016x}"
        self._cut_metrics(trainer)
        self._metrics.forget_former(step.number - 1)
        self._metrics.append(row)

    def on_evaluation(self, trainer: TrainingRun, evaluation: EvaluationResult) -> None:
        row = {
            "step": evaluation.number,
            "evaluation_loss": evaluation.loss,
            "perplexity": evaluation.perplexity,
            "tokens": evaluation.tokens,
        }
        self._cut_metrics(trainer, evaluation.number)
        self._metrics.append({**row, "seconds": round(evaluation.seconds, 6)})

    def on_save(self, trainer: TrainingRun, number: int) -> None:
        self._metrics.forget_former(number)
        self._save_measurements(trainer)

    def on_end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        self._save_measurements(trainer)
        if error is None and trainer.config.saving.export:
            self._export(trainer)
        if error is None:
            self._cut_metrics(trainer)  # no line was written if no step was left to do
        if error is not None and not (self._resumed or isinstance(error, KeyboardInterrupt)):
            self._leave_nothing()

    def _save_measurements(self, trainer: TrainingRun) -> None:
        """Saves the measurements for `megatrain compare`, if a step after the warm-up was done."""
        if trainer.timelines:
            write_json(
                self.path / "memory.json",
                measured_memory(trainer.executor, trainer.device_bytes_before),
            )
            trainer.measured.save(self.path / "measured.json")

    def _export(self, trainer: TrainingRun) -> None:
        """Exports the model, and keeps the models that the run exported before it was resumed.

        A run that had no step left to do is not exported again.
        """
        before = exported_models(self.path)
        if before and not self._trained and before[-1].step == self._last_step:
            return
        folder = add_model(self.path, self._last_step)
        if before:
            trainer.note(
                f"the model after step {self._last_step} is in {folder}; earlier ones stay:"
                f" {', '.join(model.folder for model in before)}"
            )
        export(
            trainer.state,
            trainer.plan,
            trainer.exported_config,
            folder,
            dtype=trainer.config.saving.export_dtype or None,
            source=trainer.folder,
            chat_template=self.path / CHAT_TEMPLATE,
        )

    def _leave_nothing(self) -> None:
        """Removes the files of `on_start` if there are no others.

        A run that failed before its first step then does not block the folder for the next run.
        """
        with contextlib.suppress(OSError):
            if all(path.name in START or path.name == LOCK for path in self.path.iterdir()):
                remove_start(self.path)

    def _clean_up(self, trainer: TrainingRun) -> None:
        """Removes the remains of an interrupted run: an incomplete model, and damaged lines of the
        metrics.
        """
        for path in self.path.glob(".model*"):
            remove_abandoned(self.path / path.name[1:].partition(".aside-")[0])
        metrics = self._metrics.path
        if damaged := self._metrics.mend():
            counted = f"{damaged} damaged line{'s' * (damaged > 1)}"
            trainer.note(f"{metrics}: {counted} removed; the weights are not affected")
        if trainer.first_step > 1 and not self._metrics.has_steps_before(trainer.first_step):
            trainer.note(
                f"{metrics} has no earlier steps: it was lost or emptied, so reports begin with"
                f" step {trainer.first_step}; the weights are not affected"
            )

    def _cut_metrics(self, trainer: TrainingRun, evaluated: int | None = None) -> None:
        """Removes the metrics of the steps that a resumed run repeats, and of an evaluation that it
        repeats after step `evaluated`. Does nothing in later calls.

        Called before the first line is written, because a resume that fails before must not lose
        the lines of later checkpoints.
        """
        if self._cuts:
            self._metrics.cut(trainer.first_step, evaluated)
            self._cuts = False

    def _save_plan(self, trainer: TrainingRun) -> None:
        """Saves the plan, and copies of its hardware file and of the files that it needs.

        With the copies, `megatrain compare` also works after the run folder was moved, or the
        originals were edited or removed. If the plan that was saved before has another schedule, it
        is moved to `plans/` with its measurements.

        A run that continues keeps the model of its first plan, because it began from these weights.
        Only if this model is gone, the plan names the model that replaces it.
        """
        former, source = trainer.plan, trainer.source
        with contextlib.suppress(UserError):  # no plan yet, or a damaged one
            former = Plan.load(self.path / "plan.toml")
            first = planned_source(former.source, self.path)
            known = former.source and (os.path.isdir(first) or hub_name(first))
            if trainer.first_step > 1 and known:
                source = first
                if not self._saved_digest and not _same_place(first, trainer.source):
                    trainer.note(
                        f"the weights are those of the checkpoint, not of {trainer.source}; the"
                        f" plan still names {first}, with which the run began"
                    )
        if former.digest != trainer.plan.digest:
            aside = self.path / PLANS / former.digest
            save_plan(former, self.path, source, aside)
            for name in ("measured.json", "memory.json"):
                with contextlib.suppress(FileNotFoundError):
                    (self.path / name).replace(aside / name)
        save_plan(trainer.plan, trainer.origin, source, self.path)
        self._saved_digest = trainer.plan.digest


def _same_place(one: str, other: str) -> bool:
    """Returns whether two sources of a model are the same folder, or the same name on the hub."""
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def save_plan(plan: Plan, origin: Path, source: str, folder: Path) -> None:
    """Saves `plan` to `plan.toml` in `folder`, with copies of the files that it needs.

    Its hardware file, if it has one, is saved as `hardware.toml`, or as `hardware-DIGEST.toml` if
    the folder has another file of this name. Files that define its policy, optimizer and cost
    model, and modules that they import from their folder, are saved in `plan_code` under their own
    names, or in `plan_code/DIGEST`. No file is overwritten by another one, so the plan in the
    folder names the right ones at any time.

    Args:
        plan: the plan.
        origin: the folder to which its paths are relative.
        source: the model's folder, or its name on the hub.
        folder: the folder to write to.
    """
    hardware = origin / plan.hardware
    if hardware.suffix == ".toml" and hardware.is_file():
        text, file = _hardware_text(hardware, folder), folder / "hardware.toml"
        other = file.with_stem(f"hardware-{_digest(text.encode())}")
        plan = msgspec.structs.replace(plan, hardware=_kept(text.encode(), file, other).name)
    plan = plan.with_files(lambda what, file: _kept_code(what, file, folder))
    local = Path(source)
    model = os.path.relpath(local.resolve(), folder.resolve()) if local.exists() else source
    msgspec.structs.replace(plan, source=model).save(folder / "plan.toml")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _kept(content: bytes, file: Path, other: Path) -> Path:
    """Writes `content` to `file` or, if `file` has another content, to `other`. Returns the path of
    the written file.
    """
    if file.is_file() and file.read_bytes() != content:
        file = other
    write_bytes(file, content)
    return file


def _kept_code(what: str, file: str, folder: Path) -> str:
    """Saves copies of the `.py` file `file`, with the content that this process uses, and of the
    modules that it imports from its folder, in `folder`. Returns the path of the copy of `file`, or
    `file` if there is no such file.

    The copies have the same names. The name of `file` is part of a schedule's digest.
    """
    files = source(what, file)
    if not files:
        return file
    place, own = folder / CODE, Path(Path(file).name)
    if any(
        (place / name).is_file() and (place / name).read_bytes() != content
        for name, content in files.items()
    ):
        place = place / digest(what, file)
    for name in sorted(files, key=lambda name: name == own):  # the file itself comes last
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        write_bytes(place / name, files[name])
    return str(place / own)


def _hardware_text(hardware: Path, folder: Path) -> str:
    """Returns the text of the file `hardware` for `folder`. If a file defines its cost model, a
    copy is saved in `folder`, and the text names this copy.
    """
    text = read_text(hardware)
    try:
        machine = read_toml(hardware, dict[str, Any])
    except UserError:  # a training does not need it
        return text
    name = machine.get("cost_model")
    if not (isinstance(name, str) and name.endswith(".py")):
        return text
    copy = _kept_code("cost model", path_in(hardware.parent, name), folder)
    if (kept := path_from(folder, copy)) == name:
        return text
    heading = "The machine of the plan. `cost_model` names a copy of the file."
    return toml_text({**machine, "cost_model": kept}, heading)


def measured_memory(executor: Executor, before: int) -> dict[str, object]:
    """Returns the memory of a training in bytes, by the keys of `memory.json`.

    `pools` has the size of each memory pool, and `device_pool_bytes` and `host_pool_bytes` are
    their sums. With CUDA, `device_peak_bytes` is the peak of the bytes allocated on the device,
    minus the bytes that were allocated `before` the training.
    """
    sizes: dict[str, object] = {"pools": executor.pool_bytes}
    sizes.update({f"{place}_pool_bytes": executor.allocated(place) for place in ("device", "host")})
    if executor.device.type == "cuda":
        sizes["device_peak_bytes"] = torch.cuda.max_memory_allocated(executor.device) - before
    return sizes
