"""Executor: walks a schedule and does what each op says; the only place that enqueues work. It decides no order.

When it is built, each op becomes a task: a closure over the tensors that its buffers are, and the marks of the ops it comes after.
A step then is one walk of the lanes (`lanes.py`) through their tasks.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from transformers import PretrainedConfig

from megatrain.runtime import optimizer
from megatrain.runtime.batch import IGNORED, Batch, refuse_batch
from megatrain.runtime.binding import Binder, StepState
from megatrain.runtime.checksum import checksum
from megatrain.runtime.files.model_files import ModelState
from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.lanes import DEVICE_LANES, Crew, HostMark, Lane, LaneError, Origin, StreamMark, Task
from megatrain.runtime.layers.attention import refuse_attention
from megatrain.runtime.layers.documents import trained_labels
from megatrain.runtime.layers.templates import Templates
from megatrain.runtime.memory.arenas import Arenas, OnAllocate
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.memory.out_of_memory import out_of_memory
from megatrain.runtime.memory.steadiness import Steadiness
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import evaluation, executable, flush_update
from megatrain.simulator.schedule import DataClass, Schedule
from megatrain.simulator.timeline import Span, Timeline


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, finished."""

    loss: float
    """mean over all labelled tokens of all micro-batches"""
    gradient_norm: float | None
    """before clipping, the norm over all gradients; with clipping by `layer` too, of whose sums it is the root; None with `update` and `none`"""
    seconds: float
    """wall time, everything included"""
    timeline: Timeline
    checksum: int | None
    """in deterministic mode, of the weights that this step's forward pass saw (`checksum.py`): the same number whatever the plan, since a plan that
    updates at the end of a step and one that leaves it to the next agree on these weights, not on those that lie there when a step returns"""


@dataclass(frozen=True)
class Evaluated:
    """As many micro-batches as a step has, forward only."""

    loss: float
    """mean over all labelled tokens of all micro-batches; 0 where there is none"""
    labelled: int
    """how many tokens that are"""
    seconds: float
    timeline: Timeline


class _Program(NamedTuple):
    """A schedule, bound."""

    schedule: Schedule
    queues: Mapping[str, Sequence[Task]]
    """by lane"""
    marks: Mapping[str, HostMark | StreamMark]
    """by op"""


def lane_threads(device: torch.device) -> dict[str, int]:
    """Threads inside an op, per lane. Without CUDA a core is left to the copies; with it an eighth of many cores to the threads that enqueue: the host's
    optimizer is bound by DRAM before it is by the last cores, and an op waits for whichever of its threads has lost one.
    """
    cores = len(os.sched_getaffinity(0))
    busy = cores - cores // 8 if device.type == "cuda" else max(1, cores - 1)
    return {"compute": busy, "update": busy, "h2d": 1, "d2h": 1, "cpu": busy}


class Executor:
    """Executes a schedule, step after step, on memory that it allocates once."""

    def __init__(
        self, plan: Plan, config: PretrainedConfig, settings: AdamW, device: torch.device, *,
        schedule: Schedule | None = None, threads: dict[str, int] | None = None, on_allocate: OnAllocate = lambda *_: None,
        host_memory: HostMemory | None = None,
    ) -> None:  # fmt: skip
        """`schedule` replaces the plan's own, unverified: for calibration and tests. `on_allocate` hears of bytes allocated, and of all there will be.
        `host_memory`: kept from one executor to the next, for who runs many.

        Raises UserError where the plan does not fit.
        """
        self.plan, self.settings, self.device = plan, settings, device
        self.schedule = schedule or executable(plan)
        refuse_attention(plan, device)
        self._flush = flush_update(plan)
        clips = any(op.kind == "clip" for op in self.schedule.ops)  # not where compute alone is timed, as a ceiling
        self._clipping = plan.workload.clipping if clips else "none"
        self._state = StepState()
        self._owed: tuple[float, int] | None = None
        self._other: dict[str, _Program] = {}
        self.tasks: dict[str, Task] = {}
        """by op id; to watch them"""
        self._threads = threads or lane_threads(device)
        self._host_workers = optimizer.workers(self._threads["cpu"])
        limits = {"device_limit_bytes": plan.device_limit_bytes, "host_limit_bytes": plan.host_limit_bytes}
        self._arenas = Arenas(self.schedule, device, **limits, on_allocate=on_allocate, host_memory=host_memory)
        self._steadiness = Steadiness(device, self._arenas.host_memory)
        try:
            keeps = any(buffer.data == "attention" for buffer in self.schedule.buffers)
            self.templates = Templates(plan.model, plan.workload, config, device, keeps=keeps)
            self._binder = Binder(plan, self.schedule, self._arenas, self.templates, settings, self._host_workers, self._state)
            self._streams = {name: torch.cuda.Stream(device) if device.type == "cuda" and name in DEVICE_LANES else None for name in self.schedule.lanes}
            self._step = self._program(self.schedule)
            self.tasks.update({task.op: task for queue in self._step.queues.values() for task in queue})
            self.state = ModelState(plan, self.schedule, self.memory, self.templates.persistent)
            """weights and moments after every step so far; reading them applies the update that the last step owes"""
            self._crew = Crew([Lane(name, queue, self._threads[name], self._streams[name]) for name, queue in self._step.queues.items()])
        except BaseException:
            self._free()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the lanes' threads and frees all memory: tasks hold tensors, so they go too."""
        try:
            self._crew.close()
            self._synchronize()
        finally:
            self._free()

    def _free(self) -> None:
        self._host_workers.close()
        self.tasks.clear()
        self._other.clear()
        self._step = _Program(self.schedule, {}, {})
        self._state.saved.clear()
        self._state.mirrors.clear()
        self._owed = None
        self._arenas.close()

    def _program(self, schedule: Schedule) -> _Program:
        """Binds `schedule`, whose lanes are among the step's."""
        tasks: dict[str, Task] = {}
        for op in schedule.ops:
            stream = self._streams[op.lane]
            mark = HostMark() if stream is None else StreamMark(stream)
            tasks[op.id] = Task(op.id, self._binder.bind(op), mark, [tasks[other].mark for other in op.after])
        return _Program(schedule, {name: [tasks[op.id] for op in ops] for name, ops in schedule.lanes.items()}, {op: task.mark for op, task in tasks.items()})

    def _beside(self, name: str, make: Callable[[], Schedule]) -> _Program:
        """A program that is not the step's, bound when it is first played."""
        if name not in self._other:
            self._other[name] = self._program(make())
        return self._other[name]

    # ---- one step ----

    def step(self, batches: Sequence[Batch], *, rate: float, number: int) -> StepResult:
        """One optimizer step over `accumulation` micro-batches at learning rate `rate`; `number` counts steps from 1.

        Raises LaneError with the op's name where one fails, UserError where it was for want of memory, and FloatingPointError where a loss, or what
        the workload clips by, is not finite: a norm, or with clipping by `update` the RMS of a tensor. A loss that is not finite has stopped every
        update of the step, and the state is what it was. So has a norm with `global`; with `layer` and `update` it has stopped its layer's only, and
        others may be updated. Without clipping only losses are looked at.
        """
        deterministic = torch.are_deterministic_algorithms_enabled()
        seen = self._checksum() if deterministic and not self._flush else None
        begin = time.perf_counter()
        with self._steadiness.step(alike=all(batch.documents is None for batch in batches)):
            self._take(batches)
            self._state.update_at, self._owed = (self._owed, None) if self._flush else ((rate, number), None)
            timeline = self._play(self._step)
            loss, norm = self._read_loss(), self._read_norm()
        seconds = time.perf_counter() - begin
        left = self._left_as_they_were()
        if left or not all(value is None or math.isfinite(value) for value in (loss, norm)):
            where = f", layers not updated: {', '.join(left)}" if left else ""
            raise FloatingPointError(f"step {number}: loss {loss}, gradient norm {norm}{where}: not finite; lower the learning rate or look at the data")
        self._owed = (rate, number) if self._flush else None
        return StepResult(loss, norm, seconds, timeline, self._checksum() if deterministic and self._flush else seen)

    def evaluate(self, batches: Sequence[Batch]) -> Evaluated:
        """The loss of `accumulation` micro-batches, forward only, by the weights that every step so far makes: an owed update is applied first.

        Weights and moments stay as they are. The loss is that of a step on these batches, bit for bit (compiled: in deterministic mode), but for the
        routers' balancing loss where the model has one: here it is left out, as the language model's loss is what is compared. It may be infinite or NaN.
        Raises LaneError with the op's name where one fails, UserError where it was for want of memory.
        """
        self.flush_update()
        program = self._beside("evaluation", lambda: evaluation(self.plan))
        begin = time.perf_counter()
        labelled = self._take(batches)
        timeline = self._play(program)
        return Evaluated(self._read_loss(), labelled, time.perf_counter() - begin, timeline)

    def flush_update(self) -> None:
        """Applies the update that the last step owes, if any. `state`, `memory`, `checksum` and `evaluate` do so themselves.

        The next step then finds its update applied already. It computes the same bits, but that update no longer overlaps its forward pass.
        """
        owed = self._flush
        if owed is None or self._owed is None:
            return
        self._state.update_at, self._owed = self._owed, None
        self._play(self._beside("flush_update", lambda: owed))

    def memory(self) -> Arenas:
        """The pools, with the update that the last step owes applied. The only way in from outside: what it gives is right until the next step."""
        self.flush_update()
        return self._arenas

    @property
    def pool_bytes(self) -> dict[str, int]:
        """Allocated bytes by pool."""
        return dict(self._arenas.pool_bytes)

    def allocated(self, place: str) -> int:
        """Bytes of all pools on `device` or `host`."""
        return self._arenas.total(place)

    def checksum(self) -> int:
        """The checksum of all weights after every step so far (`checksum.py`)."""
        self.flush_update()
        return self._checksum()

    def _checksum(self) -> int:
        """Of the weights as they lie now, without the update that the last step may owe."""
        return checksum(self.plan, self.schedule, self._arenas)

    def _take(self, batches: Sequence[Batch]) -> int:
        """Copies the micro-batches to where ops read them; returns how many tokens have a label. Raises UserError where they are not as planned."""
        work = self.plan.workload
        if len(batches) != work.accumulation:
            fix = "give each step as many, or make a plan with another --accumulation"
            raise UserError("data", found=f"{len(batches)} micro-batches", allowed=f"{work.accumulation}, as planned", fix=fix)
        for micro, batch in enumerate(batches, 1):
            refuse_batch(batch, (work.batch, work.sequence), self.plan.model.vocabulary, f"data: micro-batch {micro}")
        labels = [trained_labels(batch) for batch in batches]
        labelled = sum(int((each != IGNORED).sum()) for each in labels)
        self._state.scale = 1 / max(labelled, 1)
        for micro, (batch, each) in enumerate(zip(batches, labels, strict=True)):
            if batch.documents is not None and not work.documents:
                raise UserError("data", found="rows of several documents", allowed="rows of one, as planned", fix="make the plan without --plain-packing")
            rows = [batch.ids, each] + ([torch.zeros_like(batch.ids) if batch.documents is None else batch.documents] if work.documents else [])
            self._binder.tokens(micro).copy_(torch.stack(rows))
            self.templates.expect(micro, batch.documents)
        return labelled

    def _play(self, program: _Program) -> Timeline:
        """One walk, finished on the device too."""
        self._synchronize()
        origin = Origin.now(self.device.type == "cuda")
        refusal = None
        try:
            self._crew.play(program.queues)
            self._synchronize()
        except LaneError as failure:
            refusal = out_of_memory(failure, self._arenas)
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal  # out here: it must not keep the failure, whose traceback holds activations
        spans = []
        for op in program.schedule.ops:
            start, end = program.marks[op.id].span_ns(origin)
            spans.append(Span(op=op.id, lane=op.lane, start_ns=start, end_ns=end))
        return Timeline(name="measured", digest=program.schedule.digest, spans=tuple(spans))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _read_loss(self) -> float:
        losses = torch.stack([self._values("losses", str(micro))[0] for micro in range(self.plan.workload.accumulation)])
        return float(losses.double().sum())

    def _read_norm(self) -> float | None:
        kind = self._clipping
        if kind == "global":
            return float(self._values("clips", "all", 2)[1])
        if kind == "layer":
            sums = [self._values("norms", layer)[0] for layer in self.plan.model.stack]
            return float(optimizer.clip_coefficient(sums, self.settings.max_norm)[1])
        return None

    def _left_as_they_were(self) -> list[str]:
        """Layers that what they are clipped by, each for itself, kept from being updated."""
        stack, kind = self.plan.model.stack, self._clipping
        if kind not in ("layer", "update"):
            return []
        counts = [len(layer.tensors) if kind == "update" else 1 for layer in stack.values()]
        factors = torch.stack([self._values("clips", layer, count).sum().to(self.device) for layer, count in zip(stack, counts, strict=True)])
        return [layer for layer, bad in zip(stack, factors.isnan().tolist(), strict=True) if bad]

    def _values(self, data: DataClass, key: str, count: int = 1) -> torch.Tensor:
        """The first `count` fp32 values of the persistent buffer that holds `data` of the layer or micro-batch `key`."""
        return self._arenas.flat(self.schedule.state[data, key], torch.float32, count)
