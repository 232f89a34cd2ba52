"""Executor: walks a schedule and does what each op says; the only place that enqueues work. It decides no order.

When it is built, each op becomes a task: a closure over the tensors that its buffers are, and the marks of the ops it comes after.
A step then is one walk of the lanes (`lanes.py`) through their tasks.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from transformers import PretrainedConfig

from megatrain.runtime import optimizer
from megatrain.runtime.arenas import TORCH_DTYPE, Arenas
from megatrain.runtime.lanes import DEVICE_LANES, Crew, HostMark, Lane, Origin, StreamMark, Task
from megatrain.runtime.optimizer import AdamW
from megatrain.runtime.templates import IGNORED, Saved, Templates, layer_tensors
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import verified
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.specs import EMBEDDING
from megatrain.simulator.timeline import Span, Timeline

Run = Callable[[], object]
Batch = tuple[torch.Tensor, torch.Tensor]
"""token ids and labels, each [batch, sequence] int64; label IGNORED has no loss"""


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
        self.schedule = schedule or verified(plan)
        self.dtype = TORCH_DTYPE[plan.workload.dtype]
        self.arenas = Arenas(self.schedule, device, device_limit_bytes=plan.device_limit_bytes, host_limit_bytes=plan.host_limit_bytes)
        self._saved: dict[str, Saved] = {}
        self._scale = self._rate = 0.0
        self._number = 0
        self._marks: dict[str, HostMark | StreamMark] = {}
        self.tasks: dict[str, Task] = {}
        """by op id; to watch them"""
        threads = threads or lane_threads(device)
        self._host_workers = optimizer.workers(threads["cpu"])
        try:
            self.templates = Templates(plan.model, plan.workload, config, device)
            self._crew = Crew(self._lanes(threads))
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
        self._saved.clear()
        self.arenas.close()

    def _lanes(self, threads: dict[str, int]) -> list[Lane]:
        lanes, tasks = [], self.tasks
        streams: dict[str, torch.cuda.Stream | None] = {}
        for name in self.schedule.lanes:
            streams[name] = torch.cuda.Stream(self.device) if self.device.type == "cuda" and name in DEVICE_LANES else None
        for op in self.schedule.ops:
            stream = streams[op.lane]
            self._marks[op.id] = mark = HostMark() if stream is None else StreamMark(stream)
            tasks[op.id] = Task(op.id, self._bind(op), mark, [self._marks[other] for other in op.after])
        for name, ops in self.schedule.lanes.items():
            lanes.append(Lane(name, [tasks[op.id] for op in ops], threads[name], streams[name]))
        return lanes

    # ---- one step ----

    def step(self, batches: Sequence[Batch], *, rate: float, number: int) -> StepResult:
        """One optimizer step over `accumulation` micro-batches at learning rate `rate`; `number` counts steps from 1.

        Raises LaneError with the op's name where one fails, and FloatingPointError where loss or norm is not finite.
        """
        work = self.plan.workload
        assert len(batches) == work.accumulation, f"{len(batches)} micro-batches, the plan has {work.accumulation}"
        begin = time.perf_counter()
        labelled = sum(int((labels != IGNORED).sum()) for _, labels in batches)
        self._scale, self._rate, self._number = 1 / max(labelled, 1), rate, number
        for micro, (ids, labels) in enumerate(batches):
            self._tokens(micro).copy_(torch.stack([ids, labels]))
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
        spans = []
        for op in self.schedule.ops:
            start, end = self._marks[op.id].span_ns(origin)
            spans.append(Span(op=op.id, lane=op.lane, start_ns=start, end_ns=end))
        return StepResult(loss, norm, seconds, Timeline(name="measured", digest=self.schedule.digest, spans=tuple(spans)))

    def _read_norm(self) -> float | None:
        for place in ("host", "device"):
            if f"{place}.norm:clip" in self.schedule.buffer:
                return float(self.arenas.flat(f"{place}.norm:clip", torch.float32, 2)[1])
        return None

    def _tokens(self, micro: int) -> torch.Tensor:
        """[2, batch, sequence] int64: ids and labels of a micro-batch, on the device."""
        work = self.plan.workload
        return self.arenas.tensor(f"device.tokens:{micro}", torch.int64, (2, work.batch, work.sequence))

    def _scalar(self, pool: str, key: str) -> torch.Tensor:
        return self.arenas.flat(f"{pool}:{key}", torch.float32, 1)[0]

    # ---- ops: each binder returns what its op does ----

    def _bind(self, op: Op) -> Run:
        run: Run = getattr(self, f"_{op.kind}")(op)
        return run

    def _hidden(self, buffer: str) -> torch.Tensor:
        work = self.plan.workload
        return self.arenas.tensor(buffer, self.dtype, (work.batch, work.sequence, self.plan.model.hidden))

    def _weights(self, layer: str, buffer: str) -> dict[str, torch.Tensor]:
        return layer_tensors(self.arenas, self.plan.model.stack[layer], buffer, self.dtype)

    def _copy(self, op: Op) -> Run:
        (source,), (target,) = op.reads, op.writes
        read, write = (self.arenas.flat(buffer, torch.uint8, op.bytes, op.offset) for buffer in (source, target))
        return lambda: write.copy_(read, non_blocking=True)

    _load_weights = _save_gradients = _copy

    def _embed(self, op: Op) -> Run:
        weights, tokens = op.reads
        table, output = self._weights(EMBEDDING, weights)["embed_tokens.weight"], self._hidden(op.writes[0])
        ids = self._tokens(int(tokens.partition(":")[2]))[0]
        return lambda: output.copy_(self.templates.embed(table, ids))

    def _forward(self, op: Op) -> Run:
        slot, source = op.reads
        weights, x, output = self._weights(op.layer, slot), self._hidden(source), self._hidden(op.writes[0])

        def run() -> None:
            with torch.no_grad():
                output.copy_(self.templates.decoder(weights, x))

        return run

    def _recompute(self, op: Op) -> Run:
        slot, source = op.reads
        saved, *outputs = op.writes
        layer, output = self.plan.model.stack[op.layer], self._hidden(outputs[0]) if outputs else None

        def run() -> None:
            self._saved[saved] = made = self.templates.recompute(self.arenas, layer, slot, self._hidden(source))
            if output is not None:
                output.copy_(made.output.detach())

        return run

    def _backward(self, op: Op) -> Run:
        slot, saved, _, gradient = op.reads[:4]
        target, below = op.writes
        upper, lower_gradient = self._hidden(gradient), self._hidden(below)
        put = self._gradient_sink(op.layer, op, target)

        def run() -> None:
            dx, *gradients = self.templates.backward(self._saved.pop(saved), slot, upper)
            lower_gradient.copy_(dx)
            put(gradients)

        return run

    def _head(self, op: Op) -> Run:
        slot, source, tokens = op.reads[:3]
        target, below, loss = op.writes
        head = self.plan.model.head
        names = [tensor.name for tensor in self.plan.model.stack[head].tensors]
        projection = "embed_tokens.weight" if head == EMBEDDING else "lm_head.weight"
        labels = self._tokens(int(tokens.partition(":")[2]))[1]
        x, dx, total = self._hidden(source), self._hidden(below), self.arenas.flat(loss, torch.float32, 1)
        put = self._gradient_sink(head, op, target)

        def run() -> None:
            tensors = self._weights(head, slot)
            value, norm_gradient, projection_gradient = self.templates.head(
                {"norm": tensors["norm.weight"], "projection": tensors[projection]}, x, labels, self._scale, dx
            )
            total[0] = value
            put([{"norm.weight": norm_gradient, projection: projection_gradient}[name] for name in names])

        return run

    def _embed_backward(self, op: Op) -> Run:
        tokens, gradient = op.reads[:2]
        ids, dx = self._tokens(int(tokens.partition(":")[2]))[0], self._hidden(gradient)
        others: list[torch.Tensor | None] = [None] * (len(self.plan.model.stack[EMBEDDING].tensors) - 1)
        put = self._gradient_sink(EMBEDDING, op, op.writes[0])
        return lambda: put([self.templates.embed_backward(dx, ids), *others])

    def _gradient_sink(self, layer: str, op: Op, buffer: str) -> Callable[[Sequence[torch.Tensor | None]], None]:
        """Where the layer's gradients go, in the order of its tensors: rounded to the compute dtype, then written or, if `op` reads `buffer`, added."""
        spec, adding = self.plan.model.stack[layer], buffer in op.reads
        held = self.schedule.buffer[buffer]
        dtype = torch.float32 if held.persistent and held.bytes == 4 * spec.elements else self.dtype
        targets = list(layer_tensors(self.arenas, spec, buffer, dtype).values())
        padded = any(tensor.padded != tensor.elements for tensor in spec.tensors)
        flat = self.arenas.flat(buffer, dtype, spec.elements)

        def put(gradients: Sequence[torch.Tensor | None]) -> None:
            if not adding and (padded or None in gradients):
                flat.zero_()
            for target, gradient in zip(targets, gradients, strict=True):
                if gradient is not None:
                    optimizer.accumulate(target, gradient.to(self.dtype), first=not adding)

        return put

    def _accumulate_gradients(self, op: Op) -> Run:
        slab, target = op.reads[0], op.writes[0]
        read, write = self.arenas.flat(slab, self.dtype, op.parameters), self._gradient(op.layer, target)
        first = target not in op.reads
        workers = self._host_workers if op.lane == "cpu" else None
        return lambda: optimizer.accumulate(write, read, first=first, workers=workers)

    def _gradient(self, layer: str, buffer: str) -> torch.Tensor:
        """The layer's step gradient [elements], fp32 where several are summed."""
        elements = self.plan.model.stack[layer].elements
        wide = self.schedule.buffer[buffer].bytes == 4 * elements
        return self.arenas.flat(buffer, torch.float32 if wide else self.dtype, elements)

    def _workers(self, op: Op) -> optimizer.Workers:
        return self._host_workers if op.lane == "cpu" else optimizer.ALONE

    def _norm(self, op: Op) -> Run:
        gradient, total = self._gradient(op.layer, op.reads[0]), self.arenas.flat(op.writes[0], torch.float32, 1)
        workers = self._workers(op)
        return lambda: total.copy_(optimizer.sum_of_squares(gradient, workers))

    def _clip(self, op: Op) -> Run:
        sums = [self.arenas.flat(buffer, torch.float32, 1)[0] for buffer in op.reads]
        result = self.arenas.flat(op.writes[0], torch.float32, 2)
        return lambda: result.copy_(torch.stack(optimizer.clip_coefficient(sums, self.settings.max_norm)))

    def _update(self, op: Op) -> Run:
        elements = op.parameters
        weights = self.arenas.flat(op.writes[0], self.dtype, elements)
        low = self.arenas.flat(op.writes[1], torch.int16, elements) if len(op.writes) == 3 else None
        moments = self.arenas.tensor(op.writes[-1], torch.float32, (2, elements))
        gradient = self._gradient(op.layer, op.reads[0])
        clip = self.arenas.flat(op.reads[1], torch.float32, 1)[0] if len(op.reads) > 1 else None
        workers = self._workers(op)
        return lambda: optimizer.update(
            weights, low, moments, gradient, settings=self.settings, rate=self._rate, number=self._number, clip=clip, workers=workers
        )

    _cpu_update = _update
