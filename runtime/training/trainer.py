"""Trainer: executes a plan for some steps on some data.

Trainer("plan.toml", "models/qwen2.5-3b", "corpus/", Config(training=Training(steps=1000)), out="run").fit()
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from megatrain.runtime.batch import IGNORED
from megatrain.runtime.checkpoint.checkpoint import CheckpointError
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.checkpoint.manifest import Run
from megatrain.runtime.executor import Executor
from megatrain.runtime.files.model_files import ModelState, folder_weights, random_weights
from megatrain.runtime.groups import refuse_unmatched
from megatrain.runtime.layers.attention import refuse_attention
from megatrain.runtime.layers.supported import refuse_unsupported
from megatrain.runtime.layers.templates import config_of
from megatrain.runtime.machine import default_device, device_bytes, forget_device_memory, grow_segments, host_bytes, make_deterministic
from megatrain.runtime.memory.fitting import refuse_what_does_not_fit
from megatrain.runtime.training.callback import Callback, CallbackError, Evaluation, Step
from megatrain.runtime.training.config import Config, checked, with_data
from megatrain.runtime.training.interruption import Interruption
from megatrain.runtime.training.opening import HeldOut, Source, exported_config, find_data, find_model, not_trained, refuse_packing
from megatrain.runtime.training.resumption import settings_of
from megatrain.runtime.training.run_folder import RunFolder
from megatrain.runtime.training.run_lock import RunLock
from megatrain.runtime.training.trackers import trackers
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.errors import RunError, UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import executable
from megatrain.simulator.timeline import Timeline, median_timeline

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
    """One training. While it runs, callbacks find here `plan`, `config`, `device`, `executor`, `state`, `model_config`, `exported_config` and `timelines`."""

    executor: Executor

    def __init__(
        self, plan: Plan | Path | str, model: Path | str | None, data: Source | Path | str | None, config: Config, *, out: RunLock | Path | str | None = None,
        resume: Literal["newest"] | int | None = None, callbacks: Sequence[Callback] = (), evaluation_data: HeldOut | None = None,
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        """`plan`: or its file. `model`: a Hugging Face folder or a name on the hub, None for the one that the plan names. `data`: a path, None for the
        config's, or anything with `step(number) -> list[Batch]`; `evaluation_data`: anything with `batches()`, else what the config says. `out`: a folder
        for the run, or the lock of one that is held already; None for none. It must be new, unless the run in it is to `resume`, from its newest checkpoint or that of a step; where it has none
        yet, it begins. The run folder's callback, the config's trackers and then `callbacks` are told of everything, in this order.

        Raises UserError for a plan, a config or an `out` that cannot be used. Nothing is allocated or written yet.
        """
        self.plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
        self.config = checked(config if not isinstance(data, Path | str) else with_data(config, str(data)))
        grow_segments()
        self.device = device or default_device()
        origin = Path() if isinstance(plan, Plan) else Path(plan).parent
        self.source = str(model if model is not None else origin / self.plan.source if (origin / self.plan.source).exists() else self.plan.source)
        """the model's folder, or its name on the hub"""
        self._data, self._evaluation_data = data, evaluation_data
        refuse_unsupported(self.plan.model, self.plan.workload)
        refuse_attention(self.plan, self.device)
        self.schedule = executable(self.plan)
        refuse_unmatched(self.config.optimizer, self.plan.model)
        self._lock = RunLock(Path(out)) if isinstance(out, Path | str) else out
        place = None if self._lock is None else self._lock.folder
        logging, self._notes = trackers(self.config.logging, place)
        saving = self.config.saving
        if place is None and (saving.every_steps or resume is not None):
            raise UserError("training: out", found="no run folder", allowed="one, for checkpoints to lie in", fix="pass out, or leave out saving and resume")
        self._checkpoints = None if place is None else Checkpoints(place / "checkpoints", keep_last=saving.keep_last, keep_best=saving.keep_best)
        self._resume: Literal["newest"] | int | None = resume
        folder = [] if place is None else [RunFolder(place, origin, resumed=resume is not None)]
        self._refuse_taken()
        self._callbacks: list[Callback] = [*folder, *logging, *callbacks]
        self.folder: Path | None = None
        """where the model, its tokenizer and its generation config are; None where random weights need none"""
        measured_there = (origin / self.plan.hardware).is_file()
        # a plan for a calibrated machine knows its limit better than a virtual machine that shows less memory than it can grow to
        self._host_bytes = None if measured_there else host_bytes()
        self.first_step = 1
        """the next step to do; one that restores a checkpoint sets it"""
        self.finished = False
        """no further step comes"""
        self.timelines: list[Timeline] = []
        """of the last steady steps"""
        self.device_bytes_before = 0
        """allocated on the device before this training"""
        self._settings: dict[str, Any] = {}
        self._evaluation_owed = False
        self._stopped = ""

    @property
    def measured(self) -> Timeline:
        """The steady step whose duration is the median."""
        return median_timeline(self.timelines)

    @property
    def state(self) -> ModelState:
        """Weights and moments after every step so far, while the training runs."""
        return self.executor.state

    def stop(self, reason: str) -> None:
        """Ends the training after this step, as if it were the last: evaluated and saved. From a callback."""
        self._stopped = reason

    def note(self, text: str) -> None:
        """Tells every callback something that the user may want to read."""
        self._tell("on_note", text)

    def fit(self) -> Fitted:
        """Trains. The run's folder is locked meanwhile: a second run there is refused. In deterministic mode the whole process stays so.

        The first SIGINT or SIGTERM ends the step, saves a checkpoint and raises Interrupted; the second raises it at once.

        Raises UserError, before anything is written, where memory, model or data are not what is needed; LaneError with the op's name where one
        fails; CallbackError with the callback's; CheckpointError where one cannot be written, unless the config says to go on; FloatingPointError where
        loss or gradient norm is not finite. All memory is released either way.
        """
        with self._lock or contextlib.nullcontext():
            self._refuse_taken()
            return self._fit()

    def _refuse_taken(self) -> None:
        if self._lock is not None and self._resume is None:
            self._lock.refuse_taken()

    def _fit(self) -> Fitted:
        training = self.config.training
        refuse_what_does_not_fit(self.plan, self.schedule, host_bytes=self._host_bytes, device_bytes=device_bytes(self.device))
        self._refuse_steps_that_are_done()
        self._refuse_another_run(settings_of(self.config, None), known=False)
        self.folder = find_model(self.source, self.plan.model, needed=training.init == "model")
        self.model_config = config_of(self.plan.model, self.plan.workload)
        self.exported_config = exported_config(self.folder, self.plan.model, init=training.init)
        if self.folder is not None and training.init == "model":
            with folder_weights(self.folder, self._notes.append):  # refuses a folder that is not the model's before anything is allocated
                pass
        data, held_out = self._open_data()
        self._refuse_another_run(self._settings, known=True)
        if note := not_trained(self.folder, self.exported_config):
            self._notes.append(note)
        for note in self._notes:
            self.note(note)
        if training.deterministic:
            make_deterministic()
        torch.manual_seed(training.seed)
        forget_device_memory(self.device)
        self.device_bytes_before = torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        with Executor(
            self.plan, self.model_config, self.config.optimizer, self.device, schedule=self.schedule,
            on_allocate=lambda done, total: self._tell("on_allocate", done, total),
        ) as self.executor:  # fmt: skip
            self._load(buffers_alone=self._restore())
            try:
                self._tell("on_start", self)
                with Interruption() as interruption:
                    fitted = self._loop(data, held_out, interruption)
            except BaseException as error:
                self._end(error)
                raise
            self._end(None)
        return fitted

    def _refuse_steps_that_are_done(self) -> None:
        done = self._checkpoints.steps() if self._checkpoints is not None and self._resume is not None else []
        if done and (least := done[-1] if self._resume == "newest" else int(self._resume or 0)) > self.config.training.steps:
            raise UserError(
                "training: steps", found=self.config.training.steps, allowed=f">= {least}, which are done already", fix=f"go on to a step after {least}"
            )

    def _refuse_another_run(self, settings: Mapping[str, Any], *, known: bool) -> None:
        """Before anything is tokenised, and again before memory is allocated, when the data is `known`. Raises UserError."""
        if self._checkpoints is not None and self._resume is not None:
            step = None if self._resume == "newest" else self._resume
            self._checkpoints.refuse(self.plan, self.config.optimizer, settings, step, known=known)

    def _open_data(self) -> tuple[Source, HeldOut | None]:
        data, held_out = self._data, self._evaluation_data
        if data is None or isinstance(data, Path | str):
            found = find_data(self.config.data, self.plan, self.folder, self.config.training.seed, self._notes.append)
            data, held_out = found[0], held_out or found[1]
        elif hasattr(data, "packing"):  # a Corpus
            refuse_packing(data.packing, self.plan)
        self._settings = settings_of(self.config, data)
        steps, evaluate, save = self.config.training.steps, self.config.evaluation.every_steps, self.config.saving.every_steps
        if self.config.saving.keep_best and save and held_out and save % (evaluate or steps):
            meet = f"those of every {math.lcm(save, evaluate)} steps and the last" if evaluate else "the last alone"
            self._notes.append(f"keep_best chooses among checkpoints at which the evaluation data is evaluated: {meet}")
        return data, held_out

    def _restore(self) -> bool:
        """Whether there was a checkpoint to go on from."""
        if self._checkpoints is None or self._resume is None:
            return False
        run = self._checkpoints.restore(self.executor, self._settings, None if self._resume == "newest" else self._resume)
        if run is None:
            self._tell("on_note", "no checkpoint yet: the run begins")
            return False
        for layer in self.plan.model.stack.values():
            self._tell("on_load", layer.parameters)
        self.first_step, self._evaluation_owed = run.step + 1, bool(run.progress.get("evaluation_owed"))
        self._tell(
            "on_note",
            f"goes on after step {run.step}"
            + (", the last: --steps may be larger" if run.step == self.config.training.steps and self.config.schedule.kind == "constant" else ""),
        )
        return True

    def _load(self, *, buffers_alone: bool) -> None:
        """Weights and buffers; or buffers alone, which a checkpoint leaves out: no step changes them."""
        seed = self.config.training.seed
        folder = None if self.config.training.init == "random" else self.folder
        with contextlib.nullcontext(random_weights(seed, self.device)) if folder is None else folder_weights(folder) as weights:
            if buffers_alone:
                self.state.load_buffers(weights)
            else:
                self.state.load(weights, lambda count: self._tell("on_load", count))

    def _loop(self, data: Source, held_out: HeldOut | None, interruption: Interruption) -> Fitted:
        """All steps, with what comes between them and after the last."""
        steps, every = self.config.training.steps, (self.config.evaluation.every_steps, self.config.saving.every_steps)
        number, loss, evaluation = self.first_step - 1, None, None
        if self._evaluation_owed and held_out is not None:
            evaluation = self._evaluate(held_out, number, interruption)
        for number in range(self.first_step, steps + 1):
            if interruption:
                break
            step = self._step(data, number)
            loss = step.loss
            self._tell("on_step", self, step)
            self.finished = number == steps or bool(self._stopped)
            evaluate, save = (self.finished or (interval > 0 and number % interval == 0) for interval in every)
            found = self._evaluate(held_out, number, interruption) if evaluate and held_out else None
            evaluation = found or evaluation
            if interruption or (save and self.config.saving.every_steps):
                best_by = found.loss if found else None if held_out else loss
                owed = bool(evaluate and held_out and not found)
                self._save(Run(step=number, loss=best_by, settings=self._settings, progress={"evaluation_owed": owed}))
            if self.finished:
                break
        if interruption:
            raise interruption.error()
        return Fitted(number, loss, evaluation, self._stopped if number < steps else "")

    def _step(self, data: Source, number: int) -> Step:
        steps = self.config.training.steps
        rate = self.config.schedule.at(number, steps)
        try:
            result = self.executor.step(data.step(number), rate=rate, number=number)
        except FloatingPointError:
            if number == self.first_step:
                self._refuse_weights_that_are_not_finite()
            raise
        if number >= self.first_step + WARM_UP_STEPS or steps < self.first_step + WARM_UP_STEPS:
            self.timelines = [*self.timelines[1 - _KEPT_TIMELINES :], result.timeline]
        return Step(
            number=number, loss=result.loss, gradient_norm=result.gradient_norm, rate=rate, seconds=result.seconds,
            tokens_per_second=self.plan.workload.step_tokens / result.seconds, timeline=result.timeline, checksum=result.checksum,
        )  # fmt: skip

    def _refuse_weights_that_are_not_finite(self) -> None:
        """Where no rate and no data can be at fault. A loss that is not finite has left the weights as they were loaded."""
        if names := self.state.not_finite():
            others = f" and {len(names) - 3} other tensors" if len(names) > 3 else ""
            where, fix = (f"model {self.folder}", "fetch the model again") if self.first_step == 1 else ("checkpoint", "resume from an earlier step")
            raise UserError(where, found=f"infinity or NaN in {', '.join(names[:3])}{others}", allowed="finite numbers", fix=fix)

    def _evaluate(self, held_out: HeldOut, number: int, interruption: Interruption) -> Evaluation | None:
        """Mean over all labelled tokens, told to the callbacks; None where a signal came before the end."""
        parts, work = [], self.plan.workload
        batches = iter(held_out.batches())
        while group := list(itertools.islice(batches, work.accumulation)):
            if interruption:
                return None
            empty = group[0]._replace(labels=torch.full_like(group[0].labels, IGNORED))
            parts.append(self.executor.evaluate([*group, *[empty] * (work.accumulation - len(group))]))
            if len(parts) == self.config.evaluation.over_steps:
                break
        tokens = sum(part.labelled for part in parts)
        loss = sum(part.loss * part.labelled for part in parts) / max(tokens, 1)
        evaluation = Evaluation(number=number, loss=loss, tokens=tokens, seconds=sum(part.seconds for part in parts))
        self._tell("on_evaluation", self, evaluation)
        return evaluation

    def _save(self, run: Run) -> None:
        """A checkpoint, and whatever callbacks save. Raises CheckpointError unless the config says to go on."""
        try:
            if self._checkpoints is not None:
                self._checkpoints.save(self.executor, run)
        except CheckpointError as error:
            if self.config.saving.on_failure == "stop":
                raise
            self._tell("on_note", str(error))
        self._tell("on_save", self, run.step)

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
