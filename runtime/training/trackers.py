"""Trackers: metrics to TensorBoard, Weights & Biases or trackio, each a callback. Their packages are optional, imported when asked for."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from megatrain.runtime.training.callback import Callback, Evaluation, Step
from megatrain.runtime.training.config import Logging
from megatrain.simulator.errors import UserError
from megatrain.simulator.files import convert, read_json, write_json

if TYPE_CHECKING:
    from megatrain.runtime.training.trainer import Trainer


def step_values(step: Step) -> dict[str, float]:
    """What is drawn of a step."""
    values = {"train/loss": step.loss, "train/learning_rate": step.rate, "train/tokens_per_second": step.tokens_per_second}
    return values if step.gradient_norm is None else {**values, "train/gradient_norm": step.gradient_norm}


def evaluation_values(evaluation: Evaluation) -> dict[str, float]:
    """What is drawn of an evaluation."""
    return {"evaluation/loss": evaluation.loss, "evaluation/perplexity": evaluation.perplexity}


class _Metrics(Callback):
    """Steps and evaluations as named numbers."""

    def write(self, values: Mapping[str, float], number: int) -> None:
        """`values` of step `number`."""
        raise NotImplementedError

    def on_step(self, trainer: Trainer, step: Step) -> None:
        self.write(step_values(step), step.number)

    def on_evaluation(self, trainer: Trainer, evaluation: Evaluation) -> None:
        self.write(evaluation_values(evaluation), evaluation.number)


class TensorBoard(_Metrics):
    """Event files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def on_start(self, trainer: Trainer) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=trainer.first_step if trainer.first_step > 1 else None)

    def write(self, values: Mapping[str, float], number: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, number)

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close()


class Tracker(_Metrics):
    """wandb or trackio: two modules with nearly the same `init`, and a run with `log(values, step)` and `finish()`.

    Which run it is stands in the run folder's `tracker.json`, so that a training that goes on goes on there too: wandb finds a run by its id, trackio by
    its name. What is logged again of steps after the checkpoint has the same values; wandb leaves it out.
    """

    def __init__(self, module: str, project: str, name: str = "", *, file: Path | None = None) -> None:
        """`file`: where to keep which run it is; None for nowhere. Raises UserError where the package `module` is not installed."""
        if importlib.util.find_spec(module) is None:
            raise UserError(
                f"logging: tracker: {module}", found="no such package", allowed="an installed one", fix=f"pip install {module}, or leave tracker out"
            )
        self._module, self._project, self._name, self._file = module, project, name, file
        self._run: Any = None

    def on_start(self, trainer: Trainer) -> None:
        config = {"config": msgspec.to_builtins(trainer.config), "plan": msgspec.to_builtins(trainer.plan)}
        held = self._held() if trainer.first_step > 1 else None
        given: dict[str, Any] = {"name": self._name or None}
        if held is not None:
            given = {"name": held.name, "resume": "allow", **({"id": held.id} if self._module == "wandb" else {})}
        self._run = importlib.import_module(self._module).init(project=self._project, config=config, **given)
        if self._file is not None:
            names = {key: str(getattr(self._run, key, None) or "") for key in ("id", "name")}
            write_json(self._file, _Tracked(tracker=self._module, project=self._project, **names))

    def _held(self) -> _Tracked | None:
        """The run that this training has had so far, where it is one of the same tracker and project. Raises UserError for a file that is none."""
        if self._file is None or not self._file.exists():
            return None
        held = convert(read_json(self._file), _Tracked, str(self._file))
        return held if (held.tracker, held.project) == (self._module, self._project) else None

    def write(self, values: Mapping[str, float], number: int) -> None:
        self._run.log({name: value for name, value in values.items() if math.isfinite(value)}, step=number)

    def on_end(self, trainer: Trainer, error: BaseException | None) -> None:
        if self._run is not None:
            self._run.finish()


class _Tracked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `tracker.json` holds."""

    tracker: str
    project: str
    id: str
    name: str


def trackers(chosen: Logging, out: Path | None) -> tuple[list[Callback], list[str]]:
    """Those that `chosen` asks for, and notes on what cannot be. Raises UserError for a tracker whose package is not installed."""
    found: list[Callback] = []
    notes: list[str] = []
    if chosen.tensorboard and out is None:
        notes.append("no TensorBoard files: there is no run folder")
    elif chosen.tensorboard and importlib.util.find_spec("tensorboard") is None:
        notes.append("no TensorBoard files: the package tensorboard is not installed (pip install 'megatrain[tensorboard]')")
    elif chosen.tensorboard and out is not None:
        found.append(TensorBoard(out / "tensorboard"))
    if chosen.tracker:
        found.append(Tracker(chosen.tracker, chosen.project, chosen.name, file=None if out is None else out / "tracker.json"))
    return found, notes
