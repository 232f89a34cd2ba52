"""Executes a schedule in PyTorch.

The executor runs ops in the order of the schedule and never reorders them. When it is built, it
turns each op into a task: a closure over the op's tensors (`binding.py`) and the marks of the ops
that the op depends on. In a step, each lane runs its tasks in order (`lanes.py`).
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from transformers import PretrainedConfig

from megatrain.runtime import host
from megatrain.runtime.batch import Batch, count_labelled, refuse_batch
from megatrain.runtime.execution.binding import Binder
from megatrain.runtime.execution.checksum import checksum
from megatrain.runtime.execution.lanes import (
    DEVICE_LANES,
    HostMark,
    Lane,
    LaneGroup,
    OpFailed,
    Origin,
    StreamMark,
    Task,
)
from megatrain.runtime.execution.out_of_memory import out_of_memory
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.execution.step_state import StepState
from megatrain.runtime.files.model_files import ModelState
from megatrain.runtime.layers.functional_layers import FunctionalLayers
from megatrain.runtime.machine import usable_device
from megatrain.runtime.memory.allocation_guard import AllocationGuard
from megatrain.runtime.memory.arenas import Arenas, OnAllocate
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.ranks import Ranks, refuse_without_ranks
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.base.errors import RunError, UserError
from megatrain.simulator.model.workload import BY_LAYER, BY_TENSOR
from megatrain.simulator.policies import evaluation, flush_update
from megatrain.simulator.schedule import DataClass, Schedule, base_buffer
from megatrain.simulator.schedule.arithmetic import UPDATED, own_micro_batches
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline


@dataclass(frozen=True)
class StepResult:
    """The results of one optimizer step."""

    loss: float
    """Mean loss over all labelled tokens of all micro-batches."""
    gradient_norm: float | None
    """L2 norm over all gradients before clipping. None with clipping by `update` or `none`, which
    do not compute it."""
    clip_factor: float | None
    """With clipping by `adagc`, the smallest factor on the gradient of any tensor, or 1 if no
    gradient was clipped. None with other clipping."""
    seconds: float
    """Wall time of the whole step, in seconds."""
    timeline: Timeline
    """Measured start and end of each op."""
    checksum: int | None
    """Checksum (`checksum.py`) of the weights that this step's forward pass used, which is the same
    for every plan. None without deterministic mode, and with several GPUs. The weights in memory
    when a step returns are not the same for every plan, because a plan that defers updates has not
    applied the last update."""
    warning: str = ""
    """What has made the step slower, in words for the user, or empty. Always empty if the executor
    is `strict`."""


@dataclass(frozen=True)
class Evaluated:
    """The results of an evaluation: as many micro-batches as a step has, forward only."""

    loss: float
    """Mean loss over all labelled tokens of all micro-batches; 0 without labelled tokens."""
    labelled: int
    """Number of labelled tokens."""
    seconds: float
    """Wall time of the whole evaluation, in seconds."""
    timeline: Timeline
    """Measured start and end of each op."""


_STATE = (*UPDATED, "moving_norms")
"""The classes of data that a checkpoint stores."""


@dataclass
class _Program:
    """A schedule whose ops are bound to tensors."""

    schedule: Schedule
    queues: Mapping[str, Sequence[Task]]
    """The tasks of each lane, in order."""
    tasks: Mapping[str, Task]
    """All tasks, by op id."""
    writing: frozenset[str]
    """The ids of the ops that write state."""
    runs: int = 0
    """How often all tasks have run."""


def lane_threads(device: torch.device, gpus: int = 1) -> dict[str, int]:
    """Returns the number of CPU threads that an op of each lane may use, by lane. Each of the
    `gpus` ranks of this host gets an equal part of the cores.

    Without CUDA, one core is left for copies. With CUDA, an eighth of the cores is left for the
    threads that enqueue work. The CPU optimizer is not slower without these cores, because DRAM
    limits its speed. If it used all cores, it would share some of them with the enqueueing threads,
    and an op ends only when its slowest thread ends.
    """
    cores = max(host.cores() // gpus, 1)
    busy = cores - cores // 8 if device.type == "cuda" else max(1, cores - 1)
    return {"compute": busy, "update": busy, "h2d": 1, "d2h": 1, "cpu": busy, "exchange": 1}


class StateUndefined(RunError):
    """An op has failed after updates had begun. Some layers may be updated, and others not."""

    def __init__(self) -> None:
        super().__init__(
            "the weights cannot be used, because an update of them has failed: some layers may be"
            " updated, and others not; resume from the last checkpoint"
        )


class Executor:
    """Executes the steps of a plan. All memory except activations is allocated once, at the start.

    Use it as a context manager, or call `close`. The weights are zero until `state.load` is called.
    One thread at a time can use it: it raises UserError if another one is still in one of its
    methods, or if it is closed. If an op fails when an update has been applied in part, all methods
    that use the state raise StateUndefined from then on.
    """

    def __init__(
        self,
        plan: Plan,
        config: PretrainedConfig,
        settings: AdamW,
        device: torch.device | str,
        *,
        schedule: Schedule | None = None,
        threads: dict[str, int] | None = None,
        on_allocate: OnAllocate = lambda *_: None,
        host_memory: HostMemory | None = None,
        seed: int = 0,
        ranks: Ranks | None = None,
        strict: bool = True,
    ) -> None:
        """Allocates the pools and binds the schedule.

        Args:
            plan: The plan to execute.
            config: The transformers configuration of the plan's model.
            settings: AdamW's hyperparameters.
            device: The device that computes. A CPU stands in for a GPU.
            schedule: The schedule that `preflight` returned. By default the executor calls
                `preflight` itself. Calibration and tests pass other schedules, which are not
                checked.
            threads: The number of threads that an op may use, for each lane of the schedule and for
                `cpu`. By default `lane_threads(device, plan.gpus_per_host)`.
            on_allocate: Called with the bytes allocated so far and the bytes of all pools.
            host_memory: The allocator of the host pools. Pass the same allocator to several
                executors to pin host memory only once. By default the executor makes its own.
            seed: The run's seed, for layers that draw random numbers (`Family.draws`) and for
                stochastic rounding.
            ranks: The ranks of a plan for several GPUs, from `joined`. None for one GPU.
            strict: Whether a step that allocates memory after the warm-up raises AssertionError, as
                tests and calibrations need. Otherwise `StepResult.warning` says so, once.

        Raises:
            UserError: The plan cannot be executed.
            DoesNotFit: The plan needs more memory than its limits allow or the machine has.
        """
        refuse_without_ranks(plan, ranks)
        device = usable_device(device)
        self.plan, self.settings, self.device, self.ranks = plan, settings, device, ranks
        self.schedule = schedule or preflight(plan, settings, device, ranks=ranks)
        self._flush = flush_update(plan)
        # a schedule that only times compute has no clip ops
        clips = any(op.kind == "clip" for op in self.schedule.ops)
        self._clipping = plan.workload.clipping if clips else "none"
        self._state = StepState()
        self._deferred: tuple[float, int] | None = None
        """Learning rate and number of the step whose update is deferred, or None."""
        self._undefined = False
        """Whether an op has written state, and not all ops of its program have ended. False if a
        later op failed, and all of a deferred update is applied."""
        self._changed = False
        """Whether the state may have a part of the update of a step that has not returned."""
        self._unwritten: set[str] = set()
        """The ids of the ops of the last program that write state and have not ended."""
        self._user = threading.RLock()
        """Held by the thread that executes a schedule."""
        self._closed = False
        self._programs: dict[str, _Program] = {}
        """Programs other than the step's, by name."""
        self._threads = threads or lane_threads(device, plan.gpus_per_host)
        self._memory = contextlib.ExitStack()
        """Frees the pools, once they are allocated."""
        # This may compile the C kernels for many seconds. No memory is registered yet.
        self._host_workers = optimizer.workers(self._threads["cpu"])
        try:
            self._arenas = Arenas(
                self.schedule,
                device,
                device_limit_bytes=plan.device_limit_bytes,
                host_limit_bytes=plan.host_limit_bytes,
                on_allocate=on_allocate,
                host_memory=host_memory,
            )
            self._memory.callback(self._arenas.close)
            self._allocation_guard = AllocationGuard(
                device, self._arenas.host_memory, raises=strict
            )
            keeps = any(buffer.data == "attention" for buffer in self.schedule.buffers)
            self.functional_layers = FunctionalLayers(
                plan.model,
                plan.workload,
                config,
                device,
                keeps=keeps,
                seed=seed,
                micro_batches=own_micro_batches(plan, self.rank),
                rebuild=bool(plan.knobs.rebuild_outputs),
            )
            self._binder = Binder(
                plan,
                self.schedule,
                self._arenas,
                self.functional_layers,
                settings,
                self._host_workers,
                self._state,
                seed,
                ranks,
            )
            first = {op.lane for op in self.schedule.ops if op.high_priority}
            self._streams = {
                name: (
                    torch.cuda.Stream(device, priority=-1 if name in first else 0)
                    if device.type == "cuda" and name in DEVICE_LANES
                    else None
                )
                for name in self.schedule.lanes
            }
            self._step = self._bind(self.schedule)
            self.state = ModelState(
                plan, self.schedule, self.memory, self.functional_layers.persistent, ranks
            )
            """Weights and moments after all steps so far. Reading them applies a deferred
            update."""
            self._lanes = LaneGroup(
                [
                    Lane(
                        name,
                        self._threads[name],
                        self._streams[name],
                        None if ranks is None else ranks.board,
                    )
                    for name in self._step.queues
                ],
                # A step begins with updates that the step before deferred. Compute waits for them.
                own="update",
            )
        except BaseException:
            self._free()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called. The weights are then no longer in memory."""
        return self._closed

    def close(self) -> None:
        """Ends the threads of the lanes and frees all memory."""
        if self._closed:
            return
        with self._used():
            self._closed = True
            try:
                self._lanes.close()
                self._synchronize()
            finally:
                self._free()

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """Raises UserError if the executor is closed, or if another thread is using it."""
        if self._closed or not self._user.acquire(blocking=False):
            raise UserError(
                "executor",
                found="closed" if self._closed else "in use by another thread",
                allowed="an open executor" if self._closed else "one thread at a time",
                fix="make another executor" if self._closed else "wait until its step has ended",
            )
        try:
            yield
        finally:
            self._user.release()

    def _free(self) -> None:
        self._host_workers.close()
        # tasks refer to tensors, which would keep the pools alive
        self._programs.clear()
        self._step = _Program(self.schedule, {}, {}, frozenset())
        self._state.saved.clear()
        self._state.host_scalars.clear()
        self._deferred = None
        self._memory.close()

    def _bind(self, schedule: Schedule) -> _Program:
        """Turns the ops of `schedule` into tasks. The step's schedule must have all lanes of
        `schedule`.
        """
        tasks: dict[str, Task] = {}
        writing: set[str] = set()
        homes = {buffer for (data, _), buffer in self.schedule.state.items() if data in _STATE}
        for op in schedule.ops:
            work = self._binder.bind(op)
            if not homes.isdisjoint(map(base_buffer, op.writes)):
                writing.add(op.id)
                work = self._writing_state(op.id, work)
            stream = self._streams[op.lane]
            mark = HostMark() if stream is None else StreamMark(stream)
            tasks[op.id] = Task(op.id, work, mark, [tasks[other].mark for other in op.after])
        return _Program(
            schedule,
            {name: [tasks[op.id] for op in ops] for name, ops in schedule.lanes.items()},
            tasks,
            frozenset(writing),
        )

    def _writing_state(self, op: str, work: Callable[[], object]) -> Callable[[], object]:
        """Returns `work`, the work of the op that writes state. It first marks the state as
        undefined.
        """

        def run() -> object:
            self._undefined = True
            result = work()
            self._unwritten.discard(op)
            return result

        return run

    def _bound(self, name: str, make: Callable[[], Schedule]) -> _Program:
        """Returns the program `name`. The first call makes its schedule and binds it."""
        if name not in self._programs:
            self._programs[name] = self._bind(make())
        return self._programs[name]

    def step(self, batches: Sequence[Batch], *, rate: float, number: int) -> StepResult:
        """Runs one optimizer step.

        Args:
            batches: The micro-batches of the step, `plan.micro_batches` in number, each [batch,
                sequence] as planned. With several GPUs, the micro-batches of this rank
                (`own_micro_batches`).
            rate: The learning rate.
            number: The number of this step, from 1. AdamW's bias correction depends on it.

        Raises:
            UserError: `batches` are not as planned, or memory ran out during an op.
            OpFailed: An op failed for another reason. The text names the op.
            RankLost: Another rank has ended or does not answer.
            StateUndefined: An earlier update has failed.
            AssertionError: The executor is `strict`, and steps allocate memory after the warm-up.
            FloatingPointError: A loss is not finite, or a value that clipping uses is not finite: a
                gradient norm or, with clipping by `update`, the RMS of a tensor's update. Nothing
                is updated if the loss or the norm of `global` clipping is not finite. With clipping
                by `layer`, `update` or `adagc`, layers whose own values are finite may be updated.
                Without clipping, only losses are checked.
        """
        if number < 1 or not 0 <= rate < math.inf:
            raise UserError(
                "step",
                found=f"number {number} and rate {rate}",
                allowed="a number >= 1, and a rate that is finite and >= 0",
                fix="count steps from 1, and look at the learning-rate schedule",
            )
        with self._used():
            self._refuse_undefined()
            # a checksum of all weights needs the parts of the other ranks
            sums = torch.are_deterministic_algorithms_enabled() and self.ranks is None
            # with deferred updates, the forward pass uses the weights of the end of the step
            checksum_before = self._checksum() if sums and not self._flush else None
            begin = time.perf_counter()
            self.check(batches)
            same_shapes = all(batch.documents is None for batch in batches)
            with self._allocation_guard.step(same_shapes=same_shapes):
                self._copy_in(batches, number)
                self._state.number = number
                # a plan that defers updates applies the previous step's update in this step
                self._state.update_at = self._deferred if self._flush else (rate, number)
                timeline = self._run(self._step)
                loss, norm = self._read_loss(), self._read_norm()
            seconds = time.perf_counter() - begin
            skipped = self._layers_not_updated()
            if skipped or not all(value is None or math.isfinite(value) for value in (loss, norm)):
                # A policy from a file may defer an update that is clipped by layer.
                self._changed = self._changed or bool(skipped)
                where = f", layers not updated: {', '.join(skipped)}" if skipped else ""
                raise FloatingPointError(
                    f"step {number}: loss {loss}, gradient norm {norm}{where}: not finite; lower"
                    " the learning rate or look at the data"
                )
            result = StepResult(
                loss,
                norm,
                self._read_clip_factor(),
                seconds,
                timeline,
                self._checksum() if sums and self._flush else checksum_before,
                self._allocation_guard.finding,
            )
            self._deferred = (rate, number) if self._flush else None
            self._changed = False
            return result

    def evaluate(self, batches: Sequence[Batch]) -> Evaluated:
        """Computes the loss of micro-batches without training on them. `batches` are as in `step`.

        A deferred update is applied first, so the weights include all steps so far. Apart from
        this, weights and moments do not change.

        The loss has the same bits as the loss of a step on the same batches (with compiled layers,
        only in deterministic mode). There are two exceptions. Layers that draw random numbers in
        training (`Family.draws`) draw none in an evaluation. And the load-balancing loss of a model
        with routers is not included, so the result is the language model's loss. It may be infinite
        or NaN.

        Raises:
            UserError: `batches` are not as planned, or memory ran out during an op.
            OpFailed: An op failed for another reason. The text names the op.
            RankLost: Another rank has ended or does not answer.
            StateUndefined: An earlier update has failed.
        """
        with self._used():
            self.flush_update()
            program = self._bound("evaluation", lambda: evaluation(self.plan))
            begin = time.perf_counter()
            self.check(batches)
            labelled = self._copy_in(batches, None)
            timeline = self._run(program)
            return Evaluated(self._read_loss(), labelled, time.perf_counter() - begin, timeline)

    def flush_update(self) -> None:
        """Applies the update that the last step deferred, if there is one. `state`, `memory`,
        `checksum` and `evaluate` call this.

        The next step computes the same bits, but the update no longer overlaps its forward pass.

        Raises StateUndefined if an earlier update has failed, or if this one leaves out layers.
        """
        with self._used():
            self._refuse_undefined()
            schedule = self._flush
            if schedule is None or self._deferred is None:
                return
            self._state.update_at = self._deferred
            self._run(self._bound("flush_update", lambda: schedule))
            # A policy from a file may defer an update that is clipped by layer.
            self._undefined = bool(self._layers_not_updated())
            self._refuse_undefined()

    @property
    def intact(self) -> bool:
        """Whether the state is that of the end of the last step that returned, so that a checkpoint
        of this step can be saved.

        False if a later step raised an error and may have applied its update, wholly or in part, or
        if a deferred update was applied in part.
        """
        return not (self._undefined or self._changed)

    def _refuse_undefined(self) -> None:
        """Raises StateUndefined if an update has been applied in part."""
        if self._undefined:
            raise StateUndefined

    def memory(self) -> Arenas:
        """Applies a deferred update and returns the pools. Their contents are valid until the next
        step. Code outside the executor reads state only through this method.
        """
        self.flush_update()
        return self._arenas

    @property
    def rank(self) -> int:
        """The rank of this process; 0 with one GPU."""
        return self.ranks.rank if self.ranks else 0

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The step's tasks by op id. Profiling and tests wrap their `run`."""
        return self._step.tasks

    @property
    def pool_bytes(self) -> dict[str, int]:
        """Allocated bytes of each pool."""
        return dict(self._arenas.pool_bytes)

    def allocated(self, place: str) -> int:
        """Returns the bytes of all pools in `place`, which is `device` or `host`."""
        return self._arenas.total(place)

    def checksum(self) -> int:
        """Returns the checksum (`checksum.py`) of all weights after all steps so far. With several
        GPUs, only the weights that this rank owns are included.
        """
        self.flush_update()
        return self._checksum()

    def _checksum(self) -> int:
        """Returns the checksum of the weights in memory, without a deferred update."""
        return checksum(self.plan, self.schedule, self._arenas)

    def check(self, batches: object) -> None:
        """Raises UserError unless `batches` are the micro-batches of a step as planned."""
        allowed, fix = "Batch(ids, labels)", "make them with megatrain.runtime.batch.Batch"
        if not isinstance(batches, Sequence):
            found, allowed = f"a {type(batches).__name__}", f"a list of {allowed}"
            raise UserError("data: micro-batches", found=found, allowed=allowed, fix=fix)
        for micro, batch in enumerate(batches, 1):
            if not isinstance(batch, Batch):
                where, found = f"data: micro-batch {micro}", f"a {type(batch).__name__}"
                raise UserError(where, found=found, allowed=allowed, fix=fix)
        work = self.plan.workload
        if len(batches) != self.plan.micro_batches:
            raise UserError(
                "data",
                found=f"{len(batches)} micro-batches",
                allowed=f"{self.plan.micro_batches}, as planned",
                fix="pass this many to each step, or make a plan with another --accumulation",
            )
        for micro, batch in enumerate(batches, 1):
            refuse_batch(
                batch,
                (work.batch, work.sequence),
                self.plan.model.vocabulary,
                f"data: micro-batch {micro}",
            )
            if batch.documents is not None and not work.documents:
                raise UserError(
                    "data",
                    found="rows of several documents",
                    allowed="rows of one document, as planned",
                    fix="make the plan without --plain-packing",
                )

    def _copy_in(self, batches: Sequence[Batch], step: int | None) -> int:
        """Copies the micro-batches to the buffers that ops read. Returns the number of labelled
        tokens of all ranks. `step` is the number of the step, or None in an evaluation.
        """
        work = self.plan.workload
        all_labels = [batch.trained_labels for batch in batches]
        labelled = sum(map(count_labelled, all_labels))
        if self.ranks is not None:
            labelled = self.ranks.total(labelled)
        self._state.scale = 1 / max(labelled, 1)
        for micro, (batch, labels) in enumerate(zip(batches, all_labels, strict=True)):
            rows = [batch.ids, labels]
            if work.documents:
                rows.append(
                    torch.zeros_like(batch.ids) if batch.documents is None else batch.documents
                )
            for target, row in zip(self._binder.tokens(micro), rows, strict=True):
                target.copy_(row)
            self.functional_layers.expect(micro, batch.documents, step)
        return labelled

    def _run(self, program: _Program) -> Timeline:
        """Runs all tasks of `program`, waits for the device, and returns the measured timeline."""
        self._unwritten = set(program.writing)
        self._synchronize()
        origin = Origin.now(self.device.type == "cuda")
        error: Exception | None = None
        try:
            new = program.runs < WARM_UP_STEPS
            watched = self.ranks and self.ranks.watched(self.device, new=new)
            with watched or contextlib.nullcontext():
                self._lanes.play(program.queues)
                self._synchronize()
            program.runs += 1
        except OpFailed as failure:
            self._settle()
            error = out_of_memory(failure, self._arenas)
            if error is None and self.ranks is not None and failure.lane == "exchange":
                error = self.ranks.lost(failure.op)
            if error is None:
                raise
        finally:
            self._state.saved.clear()  # backward takes all graphs, unless the step fails
        if error is not None:
            # The error is raised outside `except`. Otherwise `failure` would be its context, and
            # the traceback of `failure` would keep activations alive.
            raise error
        spans = (program.tasks[op.id].mark.span_ns(origin) for op in program.schedule.ops)
        timeline = Timeline.of("measured", program.schedule, spans)
        self._changed = self._changed or (program is self._step and self._flush is None)
        self._applied()
        return timeline

    def _applied(self) -> None:
        """Marks the state as defined: all ops that write state have ended."""
        self._deferred = None  # before the next line: an update must not be applied twice
        self._undefined = False

    def _settle(self) -> None:
        """Marks the state as defined if an op failed after all of a deferred update was applied,
        and as undefined if the device has failed.

        With several GPUs the state stays undefined, because waiting for a device that waits for
        another rank might not end.
        """
        if self.ranks is not None:
            return
        try:
            self._synchronize()
        except RuntimeError:
            self._undefined = True
            return
        if self._flush is not None and not self._unwritten:
            self._applied()

    def _synchronize(self) -> None:
        """Waits for all work on the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _read_loss(self) -> float:
        """Returns the sum of the micro-batches' losses, which are already divided by the number of
        labelled tokens.
        """
        keys = "{}" if self.ranks is None else "all.{}"
        losses = torch.stack(
            [
                self._values("losses", keys.format(micro))[0]
                for micro in range(self.plan.workload.accumulation)
            ]
        )
        return float(losses.double().sum())

    def _read_norm(self) -> float | None:
        """Returns the norm over all gradients, or None if the plan does not compute it."""
        if self._clipping == "global":
            return float(self._values("clips", "all", 2)[1])
        if self._clipping == "layer":
            sums = [self._values("norms", layer)[0] for layer in self.plan.model.stack]
            return float(optimizer.clip_coefficient(sums, self.settings.max_norm)[1])
        if self._clipping == "adagc":
            return math.sqrt(math.fsum(self._by_tensor("norms").tolist()))
        return None

    def _read_clip_factor(self) -> float | None:
        """Returns `StepResult.clip_factor`."""
        return float(self._by_tensor("clips").min()) if self._clipping == "adagc" else None

    def _by_tensor(self, data: DataClass) -> torch.Tensor:
        """Returns the values of all tensors of the model, [tensors] fp32. The buffers of `data`
        must hold one value for each tensor of a layer.
        """
        stack = self.plan.model.stack.values()
        return torch.cat([self._values(data, layer.name, len(layer.tensors)) for layer in stack])

    def _layers_not_updated(self) -> list[str]:
        """Returns the layers that were not updated because their own clipping factor is NaN. Empty
        unless the plan clips by `layer`, `update` or `adagc`.
        """
        stack, kind = self.plan.model.stack, self._clipping
        if kind not in BY_LAYER:
            return []
        counts = [len(layer.tensors) if kind in BY_TENSOR else 1 for layer in stack.values()]
        factors = torch.stack(
            [
                self._values("clips", layer, count).sum().to(self.device)
                for layer, count in zip(stack, counts, strict=True)
            ]
        )
        return [layer for layer, bad in zip(stack, factors.isnan().tolist(), strict=True) if bad]

    def _values(self, data: DataClass, key: str, count: int = 1) -> torch.Tensor:
        """Returns the first `count` fp32 values of the persistent buffer for `data` and `key`,
        which is a layer or a micro-batch.
        """
        return self._arenas.flat(self.schedule.state[data, key], torch.float32, count)
