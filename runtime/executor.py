"""Executor: walks a schedule and does what each op says; the only place that enqueues work. It decides no order.

When it is built, each op becomes a task: a closure over the tensors that its buffers are, and the marks of the ops it comes after.
A step then is one walk of the lanes (`lanes.py`) through their tasks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from transformers import PretrainedConfig

from megatrain.runtime import optimizer
from megatrain.runtime.arenas import Arenas
from megatrain.runtime.batch import IGNORED, Batch
from megatrain.runtime.binding import Binder, StepState
from megatrain.runtime.documents import trained_labels
from megatrain.runtime.lanes import DEVICE_LANES, Crew, HostMark, Lane, Origin, StreamMark, Task
from megatrain.runtime.optimizer import AdamW
from megatrain.runtime.templates import Templates
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import drain, executable
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.timeline import Span, Timeline


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, finished."""

    loss: float
    """mean over all labelled tokens of all micro-batches"""
    gradient_norm: float | None
    """before clipping; None where the workload does not clip"""
    seconds: float
    """wall time, everything included"""
    timeline: Timeline


def lane_threads(device: torch.device) -> dict[str, int]:
    """Threads inside an op, per lane. Without CUDA a core is left to the copies; with it the host optimizer gets all."""
    cores = len(os.sched_getaffinity(0))
    busy = cores if device.type == "cuda" else max(1, cores - 1)
    return {"compute": busy, "update": busy, "h2d": 1, "d2h": 1, "cpu": busy}


class Executor:
    """Executes a schedule, step after step, on memory that it allocates once."""

    def __init__(
        self, plan: Plan, config: PretrainedConfig, settings: AdamW, device: torch.device, *,
        schedule: Schedule | None = None, threads: dict[str, int] | None = None,
    ) -> None:  # fmt: skip
        """`schedule` replaces the plan's own, unverified: for calibration and tests. Raises UserError where the plan does not fit."""
        self.plan, self.settings, self.device = plan, settings, device
        self.schedule = schedule or executable(plan)
        self.arenas = Arenas(self.schedule, device, device_limit_bytes=plan.device_limit_bytes, host_limit_bytes=plan.host_limit_bytes)
        self._drain = drain(plan)
        self._state = StepState()
        self._owed: tuple[float, int] | None = None
        self._marks: dict[str, HostMark | StreamMark] = {}
        self.tasks: dict[str, Task] = {}
        """by op id; to watch them"""
        self._threads = threads or lane_threads(device)
        self._host_workers = optimizer.workers(self._threads["cpu"])
        try:
            self.templates = Templates(plan.model, plan.workload, config, device)
            self._binder = Binder(plan, self.schedule, self.arenas, self.templates, settings, self._host_workers, self._state)
            self._crew = Crew(self._lanes(self.schedule, self.tasks, self._marks))
        except BaseException:
            self._free()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the lanes' threads and frees all memory: tasks hold tensors, so they go too."""
        self._crew.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._free()

    def _free(self) -> None:
        self._host_workers.close()
        self.tasks.clear()
        self._state.saved.clear()
        self.arenas.close()

    def _lanes(self, schedule: Schedule, tasks: dict[str, Task], marks: dict[str, HostMark | StreamMark]) -> list[Lane]:
        """Of `schedule`, with its ops' tasks and marks put into the dictionaries."""
        streams: dict[str, torch.cuda.Stream | None] = {}
        for name in schedule.lanes:
            streams[name] = torch.cuda.Stream(self.device) if self.device.type == "cuda" and name in DEVICE_LANES else None
        for op in schedule.ops:
            stream = streams[op.lane]
            marks[op.id] = mark = HostMark() if stream is None else StreamMark(stream)
            tasks[op.id] = Task(op.id, self._binder.bind(op), mark, [marks[other] for other in op.after])
        return [Lane(name, [tasks[op.id] for op in ops], self._threads[name], streams[name]) for name, ops in schedule.lanes.items()]

    # ---- one step ----

    def step(self, batches: Sequence[Batch], *, rate: float, number: int) -> StepResult:
        """One optimizer step over `accumulation` micro-batches at learning rate `rate`; `number` counts steps from 1.

        Raises LaneError with the op's name where one fails, and FloatingPointError where loss or norm is not finite.
        """
        work = self.plan.workload
        assert len(batches) == work.accumulation, f"{len(batches)} micro-batches, the plan has {work.accumulation}"
        begin = time.perf_counter()
        labels = [trained_labels(batch) for batch in batches]
        labelled = sum(int((each != IGNORED).sum()) for each in labels)
        self._state.scale = 1 / max(labelled, 1)
        self._state.update_at, self._owed = (self._owed, None) if self._drain else ((rate, number), None)
        for micro, (batch, each) in enumerate(zip(batches, labels, strict=True)):
            assert work.documents or batch.documents is None, "the plan's workload has no documents"
            rows = [batch.ids, each] + ([torch.zeros_like(batch.ids) if batch.documents is None else batch.documents] if work.documents else [])
            self._binder.tokens(micro).copy_(torch.stack(rows))
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.synchronize(self.device)
        origin = Origin.now(cuda)
        self._crew.play()
        if cuda:
            torch.cuda.synchronize(self.device)
        losses = torch.stack([self._scalar("device.losses", str(micro)) for micro in range(work.accumulation)])
        loss, norm = float(losses.double().sum()), self._read_norm()
        seconds = time.perf_counter() - begin
        if not all(value is None or (value == value and abs(value) != float("inf")) for value in (loss, norm)):
            raise FloatingPointError(f"step {number}: loss {loss}, gradient norm {norm}: not finite; lower the learning rate or look at the data")
        self._owed = (rate, number) if self._drain else None
        spans = []
        for op in self.schedule.ops:
            start, end = self._marks[op.id].span_ns(origin)
            spans.append(Span(op=op.id, lane=op.lane, start_ns=start, end_ns=end))
        return StepResult(loss, norm, seconds, Timeline(name="measured", digest=self.schedule.digest, spans=tuple(spans)))

    def drain(self) -> None:
        """Applies the update that the last step owes, if any: before saving, evaluating and stopping."""
        if self._drain is None or self._owed is None:
            return
        self._state.update_at, self._owed = self._owed, None
        crew = Crew(self._lanes(self._drain, {}, {}))
        try:
            crew.play()
        finally:
            crew.close()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _read_norm(self) -> float | None:
        for place in ("host", "device") if self.plan.workload.clipping == "global" else ():
            if f"{place}.norm:clip" in self.schedule.buffer:
                return float(self.arenas.flat(f"{place}.norm:clip", torch.float32, 2)[1])
        return None

    def _scalar(self, pool: str, key: str) -> torch.Tensor:
        return self.arenas.flat(f"{pool}:{key}", torch.float32, 1)[0]
