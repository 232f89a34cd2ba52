"""Trainer: trains a model by executing a plan.

For example:

    config = Config(training=TrainingSettings(steps=1000))
    Trainer("plan.toml", data="corpus/", config=config, out="run").fit()
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import torch

from megatrain.runtime.batch import Batch, count_labelled
from megatrain.runtime.checkpoint.checkpoint import CheckpointError, checkpoint_bytes
from megatrain.runtime.checkpoint.folder import Checkpoints
from megatrain.runtime.checkpoint.manifest import EVALUATION_DATA, TOKENIZER, RunState
from megatrain.runtime.data.corpus.corpus import Corpus
from megatrain.runtime.data.rows.sources import pinned
from megatrain.runtime.data.summary import DataSummary
from megatrain.runtime.data.tokens.tokenize import tokenizer_digest, tokenizer_files
from megatrain.runtime.execution.executor import Executor, StateUndefined
from megatrain.runtime.execution.param_groups import refuse_unmatched
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.files.model_files import folder_weights, random_weights
from megatrain.runtime.files.model_source import planned_source
from megatrain.runtime.host import free_host_bytes
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import (
    default_device,
    device_bytes,
    forget_device_memory,
    grow_segments,
    host_bytes,
    make_deterministic,
    usable_device,
)
from megatrain.runtime.memory.fitting import little_memory_note, refuse_what_does_not_fit
from megatrain.runtime.ranks import Ranks, identity
from megatrain.runtime.training.callback import Callback, CallbackError, EvaluationResult, Step
from megatrain.runtime.training.callbacks import Callbacks, refuse_callbacks
from megatrain.runtime.training.config import Config, checked, with_data
from megatrain.runtime.training.evaluating import SAME_DATA, checked_batches, evaluate, same_batches
from megatrain.runtime.training.from_data import with_counted_steps, with_document_length
from megatrain.runtime.training.interruption import Interruption
from megatrain.runtime.training.notes import (
    best_checkpoints_note,
    continuation_notes,
    learning_rate_notes,
    little_room_note,
    plan_notes,
)
from megatrain.runtime.training.opening import (
    BatchSource,
    EvaluationSource,
    exported_config,
    find_data,
    find_model,
    not_trained,
    refuse_packing,
    refuse_unread_data,
    refuse_unusable_data,
)
from megatrain.runtime.training.progress import Progress
from megatrain.runtime.training.resumption import (
    refuse_done_steps,
    refuse_to_start_over,
    settings_of,
)
from megatrain.runtime.training.run_folder import RunFolder
from megatrain.runtime.training.run_lock import RunLock
from megatrain.runtime.training.shared_folder import refuse_unseen
from megatrain.runtime.training.stopped_run import command_to_continue, how_to_continue
from megatrain.runtime.training.trackers import trackers
from megatrain.runtime.training.training_run import TrainingRun
from megatrain.runtime.training.unused_fields import refuse_unused
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base.errors import RunError, UserError
from megatrain.simulator.base.plugins import changes, digest, unchanging
from megatrain.simulator.hardware.machine import is_calibrated
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.arithmetic import own_micro_batches
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline

T = TypeVar("T")
_KEPT_TIMELINES = 64
"""The number of newest steps from which the median step is chosen."""
_SAME_FIRST_STEP = "set `trainer.first_step` in a callback of every rank"


class Fitted(NamedTuple):
    """The result of `Trainer.fit`."""

    steps: int
    """The number of the last step, counted from 1."""
    loss: float | None
    """The training loss of the last step, or None if no step was left to do."""
    evaluation: EvaluationResult | None
    """The last evaluation, or None if there was none."""
    stopped: str
    """The reason if a callback stopped the training early, otherwise empty."""


class WeightsNotFinite(UserError):
    """The weights that a training begins with contain infinity or NaN. The first step has found
    this, and has changed nothing.
    """


class _Execution(NamedTuple):
    """A plan to execute."""

    plan: Plan
    """The plan."""
    schedule: Schedule
    """The schedule of the plan."""
    origin: Path
    """The folder to which paths in the plan are relative."""


def _is_due(number: int, every: int) -> bool:
    """Returns whether something that is done every `every` steps, or never if this is 0, is done
    after step `number`.
    """
    return every > 0 and number % every == 0


def _same_bits(work: Workload) -> Workload:
    """Returns `work.same_bits` with the content of the optimizer's file instead of its path, since
    a run folder has copies of the file.
    """
    name = work.optimizer
    if name.endswith(".py"):
        name = digest("optimizer", name)
    return msgspec.structs.replace(work.same_bits, optimizer=name)


class Trainer(TrainingRun):
    """Trains a model by executing a plan.

    It uses one device or, with `ranks`, one device in each of several processes. `TrainingRun`
    documents the attributes, which callbacks read.
    """

    def __init__(
        self,
        plan: Plan | Path | str,
        model: Path | str | None = None,
        data: BatchSource | Path | str | None = None,
        config: Config | None = None,
        *,
        out: RunLock | Path | str | None = None,
        resume: Literal["newest", "scratch"] | int | None = None,
        callbacks: Sequence[Callback] = (),
        progress: bool = True,
        evaluation_data: EvaluationSource | None = None,
        device: torch.device | str | None = None,
        ranks: Ranks | None = None,
        predict: Callable[[Plan, Path], float] | None = None,
    ) -> None:
        """Checks the plan, the config and the run folder. Nothing is allocated or written yet.

        Args:
            plan: the plan, or the path of its TOML file.
            model: a Hugging Face folder or a name on the hub, or None for the model in the plan.
            data: the path of the training data, any object with a method
                `step(number) -> list[Batch]` (`BatchSource`), or None for the path in the config.
            config: all other settings, or None for the defaults and one epoch.
            out: the run folder, its lock if the caller already holds it, or None for no run folder.
                The folder must be new or empty, unless `resume` is given.
            resume: continues the run in `out`, from its newest checkpoint ("newest") or from the
                checkpoint of the given step. With "scratch", a run that has no checkpoint begins
                again at step 1.
            callbacks: called after the built-in callbacks: run folder, trackers and progress.
            progress: whether to print notes and progress (`Progress`).
            evaluation_data: any object with a method `batches()` (`EvaluationSource`), or None for
                the evaluation data in the config.
            device: the device to train on, or None for the default device.
            ranks: the ranks of a plan for several GPUs (`joined`), or None for one GPU. Each rank
                has a trainer with the same arguments. Only rank 0 locks and writes the run folder,
                and has the built-in callbacks.
            predict: returns the predicted step time in seconds of a plan, whose files are seen from
                a folder. It is called if the data has shorter documents than the plan assumes. None
                keeps the plan's prediction.

        Raises UserError if the plan, the config or `out` cannot be used.
        """
        config = Config() if config is None else config
        self.plan = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
        self.config = checked(
            config if not isinstance(data, Path | str) else with_data(config, str(data))
        )
        grow_segments()
        self.device = default_device() if device is None else usable_device(device)
        self.origin = origin = Path() if isinstance(plan, Plan) else Path(plan).parent
        self.source = str(model if model is not None else planned_source(self.plan.source, origin))
        self._data, self._evaluation_data, self._predict = data, evaluation_data, predict
        refuse_unusable_data(data, evaluation_data)
        refuse_unread_data(self.config.data, data, evaluation_data)
        refuse_callbacks(callbacks)
        self._ranks, self._leads = ranks, ranks is None or ranks.leads
        self._changes, self.schedule = changes(), self._checked_schedule(self.plan)
        refuse_unmatched(self.config.optimizer, self.plan.model)
        lock = RunLock(Path(out)) if isinstance(out, Path | str) else out
        self._lock = lock if self._leads else None
        self.out = place = None if lock is None else lock.folder
        refuse_unused(
            self.config,
            self.plan.workload.clipping,
            run=None if resume is None else place,
            evaluates=evaluation_data is not None,
        )
        logging, self._notes = trackers(self.config.logging, place) if self._leads else ([], [])
        saving = self.config.saving
        if place is None and (saving.every_steps or resume is not None):
            raise UserError(
                "training: out",
                found="no run folder",
                allowed="a run folder, which checkpoints need",
                fix="pass out, or leave out saving and resume",
            )
        self._checkpoints = (
            None
            if place is None
            else Checkpoints(
                place / "checkpoints",
                keep_last=saving.keep_last,
                keep_best=saving.keep_best,
                tidies=self._leads,
            )
        )
        self._resume: Literal["newest", "scratch"] | int | None = resume
        folder = [] if place is None else [RunFolder(place, resumed=resume is not None)]
        self._refuse_taken()
        printed = [Progress()] if progress else []
        built_in: list[Callback] = [*folder, *logging, *printed]
        self._callbacks = Callbacks([*(built_in if self._leads else ()), *callbacks])
        self.folder: Path | None = None
        # A virtual machine may report less memory than it can grow to. The plan for a calibrated
        # machine has a better limit.
        self._host_bytes = (
            None
            if is_calibrated(origin / self.plan.hardware)
            else host_bytes() // self.plan.gpus_per_host
        )
        self.first_step = 1
        self.data_summaries: dict[str, DataSummary] = {}
        self.device_bytes_before = 0
        self._settings: dict[str, Any] = {}
        self._evaluation_pending = False
        self._evaluation_digest = self._tokenizer_digest = ""
        self._executing = contextlib.ExitStack()
        self._forget()

    def _forget(self) -> None:
        """Forgets the results of an earlier call of `fit`, and a switch that it did not make."""
        self.finished = False
        self.timelines: list[Timeline] = []
        self.saved_step: int | None = None
        self._not_saved: CheckpointError | None = None
        self._checked: Iterable[Batch] | None = None
        """The micro-batches of the first evaluation, if the first of them have been checked."""
        self._next: _Execution | None = None
        """The plan to continue under after the current step, or None."""
        self._former: _Execution | None = None
        """The plan before a switch, until the first step after it has ended, or None."""
        self._stopped = ""
        """The reason that `stop` was called with."""
        self._done = 0
        """The number of the last step that has ended, or 0."""

    @property
    def _start(self) -> Literal["newest"] | int | None:
        """The checkpoint to continue from, or None for a run that begins at step 1."""
        return None if self._resume == "scratch" else self._resume

    @property
    def stopped(self) -> str:
        return self._stopped if self._done < self.config.training.steps else ""

    def stop(self, reason: str) -> None:
        self._stopped = reason

    def switch(self, plan: Path | str) -> None:
        if self._ranks is not None:
            raise UserError(
                "training: switch",
                found=f"a plan for {self.plan.gpus} GPUs",
                allowed="a plan for one GPU",
                fix="let the training end, and resume it with the other plan",
            )
        if self._checkpoints is None:
            raise UserError(
                "training: switch",
                found="no run folder",
                allowed="a run folder, because a switch writes a checkpoint",
                fix="pass `out`",
            )
        other = Plan.load(Path(plan))
        for what, found, allowed in (
            ("model", other.model, self.plan.model),
            ("workload", *(_same_bits(plan.workload) for plan in (other, self.plan))),
        ):
            if found != allowed:
                raise UserError(
                    f"{plan}: {what}",
                    found=f"another {what}",
                    allowed=f"the {what} of the run",
                    fix="switch to a plan that differs in its policy and its knobs only",
                )
        schedule = self._checked_schedule(other)
        self._refuse_what_does_not_fit(other, schedule)
        self._next = _Execution(other, schedule, Path(plan).parent)

    def note(self, text: str) -> None:
        self._callbacks.notify("on_note", text)

    def fit(self) -> Fitted:
        """Trains the model and returns the result.

        The run folder is locked while this method runs, so a second run in it is refused. The
        files of a policy and an optimizer are read before, and an edit has no effect. With
        `deterministic` in the config, the process stays in deterministic mode afterwards.

        After the first SIGINT, SIGTERM or SIGHUP, the current step is completed, a checkpoint is
        saved and Interrupted is raised. After a second signal other than SIGHUP, it is raised at
        once.

        All memory is released when the method returns or raises.

        Raises:
            UserError: if memory, model or data do not fit the plan, or if memory runs out. If this
                happens before the first step, nothing has been written.
            OpFailed: if an op fails. The message names the op.
            CallbackError: if a callback fails. The message names the callback.
            CheckpointError: if a checkpoint cannot be written and `on_failure` is "stop".
            FloatingPointError: if the loss or the gradient norm is not finite.
            Interrupted: after a signal.
            RankLost: if another rank ended or does not answer.

        If a step, the data, an evaluation or a callback fails on one GPU, a checkpoint of the last
        step that has ended is written first, if the weights are still those after this step.
        """
        with self._lock or contextlib.nullcontext(), unchanging():
            self._refuse_taken()
            if changes() != self._changes:
                self._changes, self.schedule = changes(), self._checked_schedule(self.plan)
            return self._fit()

    def _checked_schedule(self, plan: Plan) -> Schedule:
        """Returns the schedule of `plan`. Raises UserError if it cannot be executed."""
        return preflight(
            plan,
            self.config.optimizer,
            self.device,
            deterministic=self.config.training.deterministic,
            ranks=self._ranks,
        )

    def _refuse_what_does_not_fit(self, plan: Plan, schedule: Schedule) -> None:
        """Raises UserError if `plan` needs more memory than this machine has."""
        refuse_what_does_not_fit(
            plan,
            schedule,
            host_bytes=self._host_bytes,
            device_bytes=device_bytes(self.device),
            on_cpu=self.device.type != "cuda",
        )

    def _refuse_taken(self) -> None:
        if self._lock is not None and self._resume is None:
            self._lock.refuse_taken()

    def _fit(self) -> Fitted:
        self._forget()
        training = self.config.training
        self._refuse_what_does_not_fit(self.plan, self.schedule)
        if self._ranks is not None:
            given = {"resume": self._resume, "whether there is a run folder": self.out is not None}
            self._ranks.agree(identity(self.plan, self.config, given))
            if self.out is not None:
                refuse_unseen(self.out, self._ranks)
        # Rank 0 goes first: it tidies the run folder, and fills the caches of data and tokens.
        with self._ranks.in_turn() if self._ranks else contextlib.nullcontext():
            data, held_out = self._prepare()
        if self._ranks is not None:
            self._ranks.agree(
                {
                    "data": str(self._settings.get("data.digest")),
                    "evaluation data": "none" if held_out is None else self._evaluation_digest,
                },
                SAME_DATA,
            )
            self._ranks.agree({"steps": str(self.config.training.steps)})
        for note in self._notes:
            self.note(note)
        self._notes = []
        if training.deterministic:
            make_deterministic()
        torch.manual_seed(training.seed)
        with self._executing:
            self._open_executor()
            self._load(buffers_alone=self._restore())
            self._note_little_room()
            try:
                self._callbacks.notify("on_start", self)
                self._of_rank_0(None)  # until then, its callbacks may read weights of other ranks
                if self._ranks is not None:
                    self._ranks.agree({"first step": str(self.first_step)}, _SAME_FIRST_STEP)
                with Interruption(self._how_it_ended) as interruption:
                    fitted = self._loop(data, held_out, interruption)
            except BaseException as error:
                self.finished = True
                self._callbacks.end(self, error)
                raise
            self.finished = True
            self._callbacks.end(self, None)
            self._of_rank_0(None)  # the other ranks wait here while rank 0 exports the model
        if self._not_saved is not None:
            raise self._not_saved
        return fitted

    def _prepare(self) -> tuple[BatchSource, EvaluationSource | None]:
        """Finds and checks the model, the data and the checkpoint, before memory is allocated.

        Returns the training data, and the evaluation data or None.
        """
        training = self.config.training
        if self._checkpoints is not None and self._resume is not None:
            self._checkpoints.recover()
            refuse_to_start_over(self._checkpoints, self._resume)
        self._refuse_steps_that_are_done()
        self._refuse_another_run(settings_of(self.config, None), known=False)
        self.folder = find_model(self.source, self.plan.model, needed=training.init == "model")
        self.model_config = config_of(self.plan.model)
        self.exported_config = exported_config(self.folder, self.plan.model, init=training.init)
        if self.folder is not None and training.init == "model":
            # Opening the weights raises UserError if they do not belong to the planned model.
            with folder_weights(self.folder, self._notes.append):
                pass
        if self.folder is not None and tokenizer_files(self.folder):
            self._tokenizer_digest = tokenizer_digest(self.folder)
        self._notes += plan_notes(self.plan, deterministic=training.deterministic)
        data, held_out = self._open_data()
        self._refuse_steps_that_are_done(training.epochs)
        self._refuse_another_run(self._settings, known=True)
        if note := not_trained(self.folder, self.exported_config):
            self._notes.append(note)
        free, on_cpu = free_host_bytes() // self.plan.gpus_per_host, self.device.type != "cuda"
        if note := little_memory_note(self.schedule, free, on_cpu=on_cpu):
            self._notes.append(note)
        return data, held_out

    def _open_executor(self) -> None:
        """Creates the executor, which allocates the memory. `_executing` releases it."""
        forget_device_memory(self.device)
        self.device_bytes_before = (
            torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else 0
        )
        self.executor = self._executing.enter_context(
            Executor(
                self.plan,
                self.model_config,
                self.config.optimizer,
                self.device,
                schedule=self.schedule,
                on_allocate=lambda done, total: self._callbacks.notify("on_allocate", done, total),
                seed=self.config.training.seed,
                ranks=self._ranks,
                strict=False,  # a step that is slow for want of memory must not end a training
            )
        )

    def _of_rank_0(self, value: T) -> T:
        """Returns the `value` of rank 0, on every rank.

        Until rank 0 calls this, the other ranks serve the weights that it reads, for an export or a
        callback.
        """
        if self._ranks is None:
            return value
        if not self._leads:
            leading_value: T = self.state.follow()
            return leading_value
        self.state.end_reads(value)
        return value

    def _of_any_rank(self, reason: str) -> str:
        """Returns the first `reason` that is not empty, of all ranks in their order."""
        led = self._of_rank_0(reason)
        if self._ranks is None:
            return led
        return next(filter(None, self._ranks.values(reason)), "")

    def _interrupted(self, interruption: Interruption) -> bool:
        """Returns whether a signal was received, by any rank if there are several."""
        if self._ranks is None:
            return bool(interruption)
        self._ranks.board.signalled = bool(interruption)
        return self._of_rank_0(self._ranks.signalled())

    def _refuse_steps_that_are_done(self, epochs: float = 0.0) -> None:
        """Raises UserError if the checkpoint to continue from is after the last step. If the config
        had `epochs`, they are named instead of their steps.
        """
        start = self._start
        done = self._checkpoints.steps() if self._checkpoints and start is not None else []
        refuse_done_steps(done, start, self.config.training.steps, epochs)

    def _refuse_another_run(self, settings: Mapping[str, Any], *, known: bool) -> None:
        """Raises UserError if the run to resume was started with other settings.

        Called before the data is tokenized, and again with `known` set when `settings` contain the
        digest of the data.
        """
        if self._checkpoints is not None and self._start is not None:
            self._checkpoints.refuse(
                self.plan,
                self.config.optimizer,
                settings,
                self._start,
                known=known,
                tokenizer=self._tokenizer_digest,
            )

    def _open_data(self) -> tuple[BatchSource, EvaluationSource | None]:
        """Opens the training and the evaluation data, and sets the steps that follow from them."""
        data, held_out = self._data, self._evaluation_data
        if data is None or isinstance(data, Path | str):
            # config.toml then names the commit of the data, so a resumed run reads the same data.
            self.config = msgspec.structs.replace(self.config, data=pinned(self.config.data))
            opened = find_data(
                self.config.data,
                self.plan,
                self.folder,
                self.config.training.seed,
                self._notes.append,
                self.data_summaries.update,
            )
            data = opened[0]
            held_out = opened[1] if held_out is None else held_out
        elif hasattr(data, "packing"):  # a Corpus
            refuse_packing(data.packing, self.plan)
        self.plan, length = with_document_length(self.plan, self.origin, data, self._predict)
        self.config, epochs = with_counted_steps(self.config, self.plan.workload, data)
        self._notes += [*filter(None, (length, epochs)), *learning_rate_notes(self.config)]
        self._settings = settings_of(self.config, data)
        self._evaluation_digest = str(getattr(held_out, "digest", ""))
        if held_out is not None and (note := best_checkpoints_note(self.config)):
            self._notes.append(note)
        return data, held_out

    def _note_little_room(self) -> None:
        """Notes if the free disk space is less than the run's checkpoints need."""
        saving = self.config.saving
        if self._checkpoints is not None and (saving.every_steps or saving.every_minutes):
            size = checkpoint_bytes(self.executor)
            if note := little_room_note(saving, self._checkpoints, size):
                self.note(note)

    def _restore(self) -> bool:
        """Restores the checkpoint to resume from. Returns whether there is one."""
        if self._checkpoints is None or self._start is None:
            return False
        run = self._checkpoints.restore(self.executor, self._settings, self._start)
        assert run is not None, "a run without a checkpoint has been refused"
        for layer in self.plan.model.stack.values():
            self._callbacks.notify("on_load", layer.parameters)
        self.first_step = run.step + 1
        self._evaluation_pending = bool(run.progress.get("evaluation_owed"))
        for note in continuation_notes(run, self.config, self._settings, self._evaluation_digest):
            self.note(note)
        return True

    def _load(self, *, buffers_alone: bool) -> None:
        """Loads the initial weights and buffers, or with `buffers_alone` only the buffers.

        A checkpoint contains no buffers, because no step changes them.
        """
        seed = self.config.training.seed
        folder = None if self.config.training.init == "random" else self.folder
        with (
            contextlib.nullcontext(random_weights(seed, self.device))
            if folder is None
            else folder_weights(folder)
        ) as weights:
            if buffers_alone:
                self.state.load_buffers(weights)
            else:
                self.state.load(weights, lambda count: self._callbacks.notify("on_load", count))

    def _loop(
        self, data: BatchSource, held_out: EvaluationSource | None, interruption: Interruption
    ) -> Fitted:
        """Executes all steps, and the evaluations and checkpoints that are due after them."""
        steps, saving = self.config.training.steps, self.config.saving
        evaluate_every = self.config.evaluation.every_steps
        clock = saving.every_minutes if self._checkpoints is not None else 0.0
        saved_at = time.monotonic()
        number = self._done = self.first_step - 1
        loss, evaluation = None, None
        if self._evaluation_data is not None:
            with self._kept_if_it_fails(None, "the evaluation"):
                self._checked = checked_batches(self._evaluation_data, self.executor)
        if self._evaluation_pending and held_out is not None:
            with self._kept_if_it_fails(None, "the evaluation"):
                evaluation = self._evaluate(held_out, number, interruption)
            if evaluation is not None:
                self._callbacks.notify("on_evaluation", self, evaluation)
                self._note_evaluation(evaluation)
                self._finish_if_stopped()
        stopping, run = False, None
        for number in range(self.first_step, steps + 1):
            if stopping or self.finished or self._interrupted(interruption):
                break
            step = self._step(data, number, run)
            self._done, loss = number, step.loss
            owed = held_out is not None and (number == steps or _is_due(number, evaluate_every))
            done = RunState(
                step=number,
                loss=loss if held_out is None else None,
                settings=self._settings,
                progress=self._run_progress(owed),
            )
            self._notify_after("on_step", step, done)
            if step.warning:
                with self._kept_if_it_fails(done, "a callback"):
                    self.note(f"step {number}: {step.warning}")
            self._finish_if_stopped()
            evaluate = self.finished or _is_due(number, evaluate_every)
            result = None
            if evaluate and held_out is not None:
                with self._kept_if_it_fails(done, "the evaluation"):
                    result = self._evaluate(held_out, number, interruption)
            if result is not None:
                done = msgspec.structs.replace(
                    done, loss=result.loss, progress=self._run_progress(False)
                )
                self._notify_after("on_evaluation", result, done)
                self._finish_if_stopped()
            evaluation = result or evaluation
            save = self.finished or _is_due(number, saving.every_steps)
            by_clock = self._of_rank_0(clock > 0 and time.monotonic() - saved_at >= 60 * clock)
            stopping = self._interrupted(interruption)
            due = stopping or by_clock or (save and (saving.every_steps or clock))
            switch = self._next is not None and not (self.finished or stopping)
            pending = evaluate and held_out is not None and result is None
            run = msgspec.structs.replace(done, progress=self._run_progress(pending))
            if due or switch:
                saved = self._save(run) if due else None
                if switch:
                    self._switch(run, saved=saved)
                saved_at = time.monotonic()
            if self.finished:
                break
        if stopping or self._interrupted(interruption):
            if run is not None and not stopping and self.saved_step != run.step:
                self._save(run)  # the signal came after the last look at the end of the step
            raise interruption.error()
        return Fitted(self._done, loss, evaluation, self.stopped)

    def _finish_if_stopped(self) -> None:
        """Sets `finished`: whether all steps are done, or a callback of any rank has called
        `stop`.
        """
        self._stopped = self._of_any_rank(self._stopped)
        self.finished = self._done >= self.config.training.steps or bool(self._stopped)

    def _how_it_ended(self) -> str:
        """Returns when a signal ended the training, what is saved, and how to continue."""
        when = f"after step {self._done}" if self._done else "before the first step"
        return f"{when}; {how_to_continue(self.out)}"

    def _note_evaluation(self, result: EvaluationResult) -> None:
        """Writes the result of an evaluation at the start to the checkpoint that was restored, so
        the evaluation is not repeated when it is restored again.
        """
        if self._checkpoints is not None:
            try:
                progress = self._run_progress(False)
                self._checkpoints.evaluated(result.number, result.loss, progress)
            except UserError as error:
                self.note(f"{error}; the next resume from step {result.number} evaluates again")

    def _run_progress(self, owed: bool) -> dict[str, Any]:
        """Returns `RunState.progress`. `owed` says whether the evaluation after this step is still
        to be done.
        """
        return {
            "evaluation_owed": owed,
            EVALUATION_DATA: self._evaluation_digest,
            TOKENIZER: self._tokenizer_digest,
        }

    def _step(self, data: BatchSource, number: int, before: RunState | None) -> Step:
        """Executes step `number`. `before` is the run after the step before, if there was one.

        If the first step after a switch fails, it is executed under the former plan.
        """
        steps = self.config.training.steps
        rate, failed = self.config.schedule.at(number, steps), ""
        with self._kept_if_it_fails(before, "the data"):
            batches = self._read(data, number)
            # `step` checks them too. Here, nothing is lost if they are refused.
            self.executor.check(batches)
            self._refuse_unlabelled(batches, number)
        try:
            # After a loss that is not finite, a resume would come to the same loss. An older
            # checkpoint may be better, and saving could remove it.
            with self._kept_if_it_fails(before, "the step", unless=FloatingPointError):
                result = self.executor.step(batches, rate=rate, number=number)
        except FloatingPointError:
            if number == self.first_step:
                self._refuse_weights_that_are_not_finite()
            raise
        except (UserError, RuntimeError) as error:  # out of memory, or an op that failed
            if self._former is None:
                raise
            failed = str(error).partition("\n")[0]
        if self._former is not None and failed:
            # Not inside `except`, because the traceback keeps the memory of the failed plan.
            self._return(self._former, number - 1, failed)
            return self._step(data, number, before)
        self._former = None
        if number >= self.first_step + WARM_UP_STEPS or steps < self.first_step + WARM_UP_STEPS:
            self.timelines = [*self.timelines[1 - _KEPT_TIMELINES :], result.timeline]
        return Step(
            number=number,
            loss=result.loss,
            gradient_norm=result.gradient_norm,
            clip_factor=result.clip_factor,
            rate=rate,
            seconds=result.seconds,
            tokens_per_second=self.plan.workload.step_tokens / result.seconds,
            timeline=result.timeline,
            checksum=result.checksum,
            warning=result.warning,
        )

    def _read(self, data: BatchSource, number: int) -> list[Batch]:
        """Returns the micro-batches of step `number` that this rank computes."""
        if self._ranks is None:
            return data.step(number)
        places = own_micro_batches(self.plan, self._ranks.rank)
        if isinstance(data, Corpus):
            return data.micro_batches(number, places)
        batches = data.step(number)
        planned = self.plan.workload.accumulation
        if len(batches) != planned:
            raise UserError(
                "data",
                found=f"{len(batches)} micro-batches on rank {self._ranks.rank}",
                allowed=f"{planned}, as planned for all ranks together",
                fix="return all micro-batches of the step on each rank, which takes its own",
            )
        return [batches[place] for place in places]

    def _switch(self, run: RunState, *, saved: bool | None) -> None:
        """Continues under the plan of `switch`, from a checkpoint of `run`.

        `saved` says whether the checkpoint has been written. If it is None, this method writes it.
        If it cannot be written, or if the other plan cannot be executed, the training continues
        under its present plan.
        """
        assert self._next is not None
        other, self._next = self._next, None
        former, begin = _Execution(self.plan, self.schedule, self.origin), time.monotonic()
        failed = ""
        try:
            saved = self._save(run) if saved is None else saved
        except CheckpointError as error:
            self.note(str(error))
        if not saved:
            self.note(
                "the training continues under the same plan, since no checkpoint could be written"
            )
            return
        try:
            self._reopen(other, run.step)
        except CallbackError:
            raise
        except (UserError, RuntimeError) as error:
            failed = str(error).partition("\n")[0]
        if failed:  # handled outside `except`, as in `_step`
            self._return(former, run.step, failed)
            return
        self._former = former
        self._callbacks.notify("on_switch", self, time.monotonic() - begin)

    def _return(self, former: _Execution, step: int, reason: str) -> None:
        """Continues under the plan `former` from the checkpoint of `step`, and calls `on_switch` of
        the callbacks, because the executor is a new one.

        `reason` says why the other plan failed. Raises RunError if the former plan fails, too, as
        after an error that leaves the device unusable. The run folder then still has the former
        plan.
        """
        self._former = None
        self.note(
            "the training continues under the former plan, since the other cannot be executed:"
            f" {reason}"
        )
        failed = ""
        try:
            self._reopen(former, step)
        except CallbackError:
            raise
        except (UserError, RuntimeError) as error:
            failed = str(error).partition("\n")[0]
        if failed:
            assert self.out is not None
            raise RunError(
                f"neither the other plan nor, after it, the former one can be executed: {failed};"
                f" continue under the former one with: {command_to_continue(self.out)}"
            )
        self._callbacks.notify("on_switch", self, 0.0)

    def _reopen(self, execution: _Execution, step: int) -> None:
        """Releases all memory, and restores the checkpoint of `step` under another plan."""
        assert self._checkpoints is not None
        self.timelines = []
        self._executing.close()
        self.plan, self.schedule, self.origin = execution
        self._open_executor()
        self._checkpoints.restore(self.executor, self._settings, step)
        self._load(buffers_alone=True)
        self.first_step = step + 1

    def _refuse_weights_that_are_not_finite(self) -> None:
        """Raises WeightsNotFinite if the loaded weights contain infinity or NaN.

        Called if the loss or the gradient norm of the first step is not finite. This step has not
        changed the weights, so infinity or NaN in them was loaded.
        """
        if not self._leads:
            self.state.follow()  # serves weights until rank 0 has checked all of them
            return
        names = self.state.not_finite()
        if self._ranks is not None:
            self.state.end_reads(None)
        if names:
            others = f" and {len(names) - 3} other tensors" if len(names) > 3 else ""
            where, fix = (
                (f"model {self.folder}", "fetch the model again")
                if self.first_step == 1
                else ("checkpoint", "resume from an earlier step")
            )
            raise WeightsNotFinite(
                where,
                found=f"infinity or NaN in {', '.join(names[:3])}{others}",
                allowed="finite numbers",
                fix=fix,
            )

    def _evaluate(
        self, held_out: EvaluationSource, number: int, interruption: Interruption
    ) -> EvaluationResult | None:
        """Evaluates the weights after step `number` on `held_out`.

        Returns None if a signal interrupted the evaluation. With several ranks, raises UserError on
        all of them if their micro-batches differ.
        """
        batches = held_out.batches() if self._checked is None else self._checked
        self._checked = None
        if self._ranks is not None:
            batches = same_batches(batches, self.plan.workload.accumulation, self._ranks)
        return evaluate(
            self.executor,
            batches,
            number=number,
            over_steps=self.config.evaluation.over_steps,
            stop=lambda: self._interrupted(interruption),
        )

    def _refuse_unlabelled(self, batches: Sequence[Batch], number: int) -> None:
        """Raises UserError if no position of step `number` has a label, and the data is an object
        of the user. The loss would be 0, which looks perfect. Rows from files may be parts of a
        long prompt, so they are not refused. With several ranks, another rank may have labels.
        """
        own = self._data is not None and not isinstance(self._data, Path | str | Corpus)
        if (
            own
            and self._ranks is None
            and not any(count_labelled(batch.trained_labels) for batch in batches)
        ):
            raise UserError(
                f"data: step {number}",
                found="no position that has a label",
                allowed="at least one label other than -100 in the micro-batches of a step",
                fix="look at the labels that step(number) returns, and at its documents",
            )

    def _notify_after(self, event: str, result: Step | EvaluationResult, run: RunState) -> None:
        """Calls the method `event` of every callback with `result`. If one fails, writes the
        checkpoint `run`.
        """
        with self._kept_if_it_fails(run, "a callback"):
            self._callbacks.notify(event, self, result)

    @contextlib.contextmanager
    def _kept_if_it_fails(
        self, run: RunState | None, what: str, unless: type[Exception] | tuple[()] = ()
    ) -> Iterator[None]:
        """Writes the checkpoint `run` if code of the user or a step fails in the block, so that no
        finished step is lost. `what` is this code in words. None means that there is no new step to
        save. The checkpoint is not written if the weights are no longer those after `run.step`, or
        after an error of the type `unless`.

        Raises UserError in place of a StopIteration, which has no text.

        With several ranks no checkpoint is written, because the other ranks do not write their
        parts.
        """
        try:
            yield
        except Exception as failure:
            saves = self._ranks is None and not isinstance(failure, unless)
            checkpoints = self._checkpoints if saves else None
            if checkpoints and run is not None and self.saved_step != run.step:
                try:
                    if not self.executor.intact:
                        raise StateUndefined
                    checkpoints.save(self.executor, run)
                    self.saved_step = run.step
                    said = f"{what} failed; a checkpoint of step {run.step} was written"
                except Exception as error:  # the executor may have failed, too
                    said = f"{what} failed, and then no checkpoint could be written: {error}"
                with contextlib.suppress(UserError, RunError):  # the first error is reported
                    self.note(said)
            if isinstance(failure, StopIteration):
                raise UserError(
                    f"training: {what}",
                    found="a StopIteration: an iterator has ended",
                    allowed="micro-batches in each call",
                    fix="begin again at its end, or train for fewer steps",
                ) from failure
            raise

    def _save(self, run: RunState) -> bool:
        """Saves a checkpoint, then calls `on_save` of the callbacks. Returns whether it was saved.

        Raises CheckpointError if it cannot be written and `on_failure` is "stop". After the last
        step, `fit` raises this error once the model is exported.
        """
        saved = False
        try:
            if self._checkpoints is not None:
                self._checkpoints.save(self.executor, run)
                saved, self.saved_step = True, run.step
        except CheckpointError as error:
            if self.config.saving.on_failure == "go on":
                self.note(str(error))
            elif self.finished:
                self._not_saved = error
            else:
                raise
        self._callbacks.notify("on_save", self, run.step)
        return saved
