"""Trainer: executes a plan for some steps on some data.

Trainer("plan.toml", "models/qwen2.5-3b", "corpus/", Config(training=Training(steps=1000)), out="run").fit()
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from megatrain.runtime.attention import refuse_attention
from megatrain.runtime.callback import Callback, CallbackError, Evaluation, Step
from megatrain.runtime.config import Config, checked
from megatrain.runtime.executor import Executor
from megatrain.runtime.groups import refuse_unmatched
from megatrain.runtime.machine import default_device, forget_device_memory, make_deterministic
from megatrain.runtime.model_files import ModelState, folder_weights, random_weights
from megatrain.runtime.opening import Source, find_model, open_data, refuse_what_does_not_fit
from megatrain.runtime.run_folder import RunFolder
from megatrain.runtime.supported import refuse_unsupported
from megatrain.runtime.templates import config_of
from megatrain.runtime.trackers import trackers
from megatrain.simulator.errors import RunError, UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import executable
from megatrain.simulator.timeline import Timeline, median_timeline

WARM_UP_STEPS = 2
"""not counted as steady: memory is touched and libraries are initialised for the first time"""
_KEPT_TIMELINES = 64


class Fitted(NamedTuple):
    """What `Trainer.fit` has to say."""

    steps: int
    """the last one's number"""
    loss: float | None
    """of the last step; None where no step was left to do"""
    evaluation: Evaluation | None
    """the last one"""
    stopped: str
    """why it ended before the config's last step; empty where it did not"""


class Trainer:
    """One training. While it runs, callbacks find here `plan`, `config`, `device`, `executor`, `state`, `model_config` and `timelines`."""

    executor: Executor
    state: ModelState

    def __init__(
        self, plan: Plan | Path | str, model: Path | str | None, data: Source | Path | str, config: Config, *, out: Path | str | None = None,
        callbacks: Sequence[Callback] = (), evaluation_data: Source | None = None, device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """`plan`: or its file. `model`: a Hugging Face folder, None for the one that the plan names. `data`: a path, or anything with
        `step(number) -> list[Batch]`; so too `evaluation_data`, else the config's. `out`: a new folder for the run, None for none. Its callbacks,
        the config's trackers and then `callbacks` are told of everything, in this order.

        Raises UserError for a plan, a config or an `out` that cannot be used. Nothing is allocated or written yet.
        """
        self.plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
        self.config = checked(config)
        self.device = device or default_device()
        self._origin = Path() if isinstance(plan, Plan) else Path(plan).parent
        self._folder = self._origin / self.plan.source if model is None else Path(model)
        self._data, self._evaluation_data = data, evaluation_data
        refuse_unsupported(self.plan.model, self.plan.workload)
        refuse_attention(self.plan, self.device)
        self.schedule = executable(self.plan)
        refuse_unmatched(self.config.optimizer, self.plan.model)
        logging, self._notes = trackers(self.config.logging, None if out is None else Path(out))
        folder = [] if out is None else [RunFolder(Path(out), self._origin)]
        self._callbacks: list[Callback] = [*folder, *logging, *callbacks]
        self.first_step = 1
        """the next step to do; one that restores a checkpoint sets it"""
        self.finished = False
        """no further step comes"""
        self.timelines: list[Timeline] = []
        """of the last steady steps"""
        self.device_bytes_before = 0
        """allocated on the device before this training"""
        self._stopped = ""

    @property
    def measured(self) -> Timeline:
        """The steady step whose duration is the median."""
        return median_timeline(self.timelines)

    def stop(self, reason: str) -> None:
        """Ends the training after this step, as if it were the last: evaluated and saved. From a callback or a signal handler."""
        self._stopped = reason

    def fit(self) -> Fitted:
        """Trains. In deterministic mode the whole process stays so.

        Raises UserError, before anything is written, where memory, model or data are not what is needed; LaneError with the op's name where one
        fails; CallbackError with the callback's; FloatingPointError where loss or gradient norm is not finite. All memory is released either way.
        """
        training = self.config.training
        refuse_what_does_not_fit(self.plan, self.schedule)
        folder = find_model(self._folder, self.plan, random=training.init == "random")
        data, held_out = open_data(self._data, self.config, self.plan)
        held_out = self._evaluation_data or held_out
        for note in self._notes:
            self._tell("on_note", note)
        if training.deterministic:
            make_deterministic()
        torch.manual_seed(training.seed)
        self.model_config = config_of(self.plan.model, None if folder is None else str(folder))
        forget_device_memory(self.device)
        self.device_bytes_before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        with Executor(self.plan, self.model_config, self.config.optimizer, self.device, schedule=self.schedule) as self.executor:
            self.state = ModelState(self.plan, self.executor.schedule, self.executor.arenas, self.executor.templates.persistent)
            self._load(folder)
            try:
                self._tell("on_start", self)
                fitted = self._loop(data, held_out)
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)
        return fitted

    def _load(self, folder: Path | None) -> None:
        if folder is None or self.config.training.init == "random":
            self.state.load(random_weights(self.config.training.seed, self.device), lambda count: self._tell("on_load", count))
        else:
            with folder_weights(folder) as weights:
                self.state.load(weights, lambda count: self._tell("on_load", count))

    def _loop(self, data: Source, held_out: Source | None) -> Fitted:
        """All steps, with what comes between them and after the last."""
        steps, every = self.config.training.steps, (self.config.evaluation.every_steps, self.config.saving.every_steps)
        number, loss, evaluation = self.first_step - 1, None, None
        for number in range(self.first_step, steps + 1):
            step = self._step(data, number)
            loss = step.loss
            self._tell("on_step", self, step)
            self.finished = number == steps or bool(self._stopped)
            evaluate, save = (self.finished or (interval > 0 and number % interval == 0) for interval in every)
            if evaluate and held_out is not None:
                evaluation = self._evaluate(held_out, number)
                self._tell("on_evaluation", self, evaluation)
            if save:
                self.executor.drain()
                self._tell("on_save", self, number)
            if self.finished:
                break
        return Fitted(number, loss, evaluation, self._stopped if number < steps else "")

    def _step(self, data: Source, number: int) -> Step:
        steps = self.config.training.steps
        rate = self.config.schedule.at(number, steps)
        result = self.executor.step(data.step(number), rate=rate, number=number)
        if number >= self.first_step + WARM_UP_STEPS or steps < self.first_step + WARM_UP_STEPS:
            self.timelines = [*self.timelines[1 - _KEPT_TIMELINES :], result.timeline]
        return Step(
            number=number, loss=result.loss, gradient_norm=result.gradient_norm, rate=rate, seconds=result.seconds,
            tokens_per_second=self.plan.workload.step_tokens / result.seconds, timeline=result.timeline, checksum=result.checksum,
        )  # fmt: skip

    def _evaluate(self, held_out: Source, number: int) -> Evaluation:
        """Mean over all labelled tokens of all evaluation steps."""
        parts = [self.executor.evaluate(held_out.step(index)) for index in range(1, self.config.evaluation.over_steps + 1)]
        tokens = sum(part.labelled for part in parts)
        loss = sum(part.loss * part.labelled for part in parts) / max(tokens, 1)
        return Evaluation(number=number, loss=loss, tokens=tokens, seconds=sum(part.seconds for part in parts))

    def _tell(self, event: str, *details: object) -> None:
        for callback in self._callbacks:
            self._tell_one(callback, event, *details)

    def _tell_one(self, callback: Callback, event: str, *details: object) -> None:
        """Raises CallbackError for what `callback` raises, unless that is one line for the user already."""
        try:
            getattr(callback, event)(*details)
        except (UserError, RunError):
            raise
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            raise CallbackError(f"callback {type(callback).__name__}.{event}: {type(error).__name__}: {first_line}") from error

    def _end(self, error: BaseException | None) -> None:
        """Every callback hears of the end, whatever the others do; the first failure is raised, unless `error` is under way already."""
        self.finished = True
        failure = error
        for callback in self._callbacks:
            try:
                self._tell_one(callback, "on_end", self, failure)
            except BaseException as raised:
                failure = failure or raised
        if failure is not None and failure is not error:
            raise failure
