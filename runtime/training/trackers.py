"""Callbacks that send metrics to TensorBoard, Weights & Biases or trackio.

The packages of these trackers are optional, and imported only when they are used. A training that
needs a missing package is refused before it begins.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megatrain.runtime.memory.process_memory import host_peak_bytes
from megatrain.runtime.training.callback import Callback, EvaluationResult, Step
from megatrain.runtime.training.config import Logging
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.files import convert, read_json, write_json

if TYPE_CHECKING:
    from megatrain.runtime.training.training_run import TrainingRun


def step_values(trainer: TrainingRun, step: Step) -> dict[str, float]:
    """Returns the logged values of a step by name.

    `step/predicted` is the step time that the plan predicts, and `step/prediction_error` is the
    predicted step time divided by the measured one, minus 1. Device memory is the peak so far.
    Without a GPU, it is the size of the pools.
    """
    values = {
        "train/loss": step.loss,
        "train/learning_rate": step.rate,
        "train/tokens_per_second": step.tokens_per_second,
        "step/seconds": step.seconds,
    }
    if step.gradient_norm is not None:
        values["train/gradient_norm"] = step.gradient_norm
    if step.clip_factor is not None:
        values["train/clip_factor"] = step.clip_factor
    if trainer.plan.prediction is not None:
        predicted = trainer.plan.prediction.step_seconds
        error = predicted / step.seconds - 1
        values |= {"step/predicted": predicted, "step/prediction_error": error}
    values["memory/device_GiB"] = _device_bytes(trainer) / 2**30
    values["memory/host_pools_GiB"] = trainer.executor.allocated("host") / 2**30
    if (process := host_peak_bytes()) is not None:
        values["memory/process_peak_GiB"] = process / 2**30
    return values


def _device_bytes(trainer: TrainingRun) -> int:
    """Returns the peak of the device memory so far, or the size of the pools without a GPU."""
    if trainer.device.type != "cuda":
        return trainer.executor.allocated("device")
    import torch

    return torch.cuda.max_memory_allocated(trainer.device) - trainer.device_bytes_before


class _Metrics(Callback):
    """Base class that passes the values of each step and evaluation to `write`."""

    def write(self, values: Mapping[str, float], number: int) -> None:
        """Logs `values` for step `number`."""
        raise NotImplementedError

    def on_step(self, trainer: TrainingRun, step: Step) -> None:
        self.write(step_values(trainer, step), step.number)

    def on_evaluation(self, trainer: TrainingRun, evaluation: EvaluationResult) -> None:
        values = {
            "evaluation/loss": evaluation.loss,
            "evaluation/perplexity": evaluation.perplexity,
        }
        self.write(values, evaluation.number)


class TensorBoard(_Metrics):
    """Writes TensorBoard event files to `folder`."""

    def __init__(self, folder: Path) -> None:
        """Creates the callback. Raises UserError if the package is not installed."""
        refuse_missing(Logging(tensorboard=True))
        self._folder = folder
        self._writer: Any = None
        self._purge_step: int | None = None

    def on_start(self, trainer: TrainingRun) -> None:
        self._writer = None
        self._purge_step = trainer.first_step if trainer.first_step > 1 else None

    def write(self, values: Mapping[str, float], number: int) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # slow

            # Not in `on_start`: this hides the steps that are repeated, also if the resume fails
            # before it repeats one.
            self._writer = SummaryWriter(str(self._folder), purge_step=self._purge_step)
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)

    def on_end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close()


class Tracker(_Metrics):
    """Logs to wandb or trackio.

    The two modules have nearly the same `init`, and their runs have the methods `log(values, step)`
    and `finish()`.

    The file `tracker.json` in the run folder identifies the tracker's run. A resumed training
    continues this run. wandb finds a run by its id, trackio by its name. Steps after the checkpoint
    are logged a second time with the same values, which wandb ignores.
    """

    def __init__(
        self, module: str, project: str, name: str = "", *, file: Path | None = None
    ) -> None:
        """Creates the callback.

        Args:
            module: "wandb" or "trackio".
            project: the name of the project in the tracker.
            name: the name of the run. If empty, the tracker chooses one.
            file: the file that identifies the tracker's run, or None to write no such file.

        Raises UserError if the package `module` is not installed.
        """
        _refuse_missing(module, f"tracker: {module}", "leave tracker out")
        self._module, self._project, self._name, self._file = module, project, name, file
        self._run: Any = None

    def on_start(self, trainer: TrainingRun) -> None:
        config = {
            "config": msgspec.to_builtins(trainer.config),
            "plan": msgspec.to_builtins(trainer.plan),
        }
        earlier = self._earlier_run() if trainer.first_step > 1 else None
        identity: dict[str, Any] = {"name": self._name or None}
        if earlier is not None:
            identity = {
                "name": earlier.name,
                "resume": "allow",
                **({"id": earlier.id} if self._module == "wandb" else {}),
            }
        self._run = importlib.import_module(self._module).init(
            project=self._project, config=config, **identity
        )
        if self._file is not None:
            names = {key: str(getattr(self._run, key, None) or "") for key in ("id", "name")}
            write_json(self._file, _Tracked(tracker=self._module, project=self._project, **names))

    def _earlier_run(self) -> _Tracked | None:
        """Returns the tracker's run to which this training has logged so far, or None.

        A run of another tracker or project does not count. Raises UserError if the file is not
        valid.
        """
        if self._file is None or not self._file.exists():
            return None
        run = convert(read_json(self._file), _Tracked, str(self._file))
        return run if (run.tracker, run.project) == (self._module, self._project) else None

    def write(self, values: Mapping[str, float], number: int) -> None:
        self._run.log(
            {name: value for name, value in values.items() if math.isfinite(value)}, step=number
        )

    def on_end(self, trainer: TrainingRun, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.finish()


class _Tracked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `tracker.json`."""

    tracker: str
    """`wandb` or `trackio`."""
    project: str
    """The name of the project in the tracker."""
    id: str
    """The id of the run. Empty if the tracker has none."""
    name: str
    """The name of the run."""


def trackers(chosen: Logging, out: Path | None) -> tuple[list[Callback], list[str]]:
    """Returns the callbacks that `chosen` selects, and notes for the user.

    Without a run folder, TensorBoard is left out, with a note.

    Args:
        chosen: the section `logging` of the config.
        out: the run folder, or None.

    Raises UserError if a package that `chosen` needs is not installed.
    """
    refuse_missing(chosen)
    callbacks: list[Callback] = []
    notes: list[str] = []
    if chosen.tensorboard and out is None:
        notes.append("no TensorBoard files: there is no run folder")
    elif chosen.tensorboard and out is not None:
        callbacks.append(TensorBoard(out / "tensorboard"))
    if chosen.tracker:
        callbacks.append(
            Tracker(
                chosen.tracker,
                chosen.project,
                chosen.name,
                file=None if out is None else out / "tracker.json",
            )
        )
    return callbacks, notes


def refuse_missing(chosen: Logging) -> None:
    """Raises UserError if a package that `chosen` needs is not installed.

    No package is imported, so a command can call this before it loads torch.
    """
    if chosen.tensorboard:
        _refuse_missing("tensorboard", "tensorboard", "leave --tensorboard out")
    if chosen.tracker:
        _refuse_missing(chosen.tracker, f"tracker: {chosen.tracker}", "leave tracker out")


def _refuse_missing(package: str, field: str, otherwise: str) -> None:
    """Raises UserError, with `otherwise` as the other fix, if `package` is not installed.

    A folder of that name without modules, such as the `wandb` that an offline run of wandb leaves
    in the current folder, is not the package, although Python would import it.
    """
    found = importlib.util.find_spec(package)
    if found is None or (found.origin is None and found.submodule_search_locations is not None):
        raise UserError(
            f"logging: {field}",
            found=f"no package {package}",
            allowed="an installed package",
            fix=f"pip install {package}, or {otherwise}",
        )
