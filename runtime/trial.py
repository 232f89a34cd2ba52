"""Trial: a plan's steps on random weights and tokens, watched: how long each op took, and what was allocated beside the pools."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from megatrain.runtime import machine
from megatrain.runtime.batch import Batch
from megatrain.runtime.executor import Executor
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies import evaluation, lower
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.timeline import Timeline

_RATE = 1e-5  # small, so that random tokens leave numbers finite


class Trial(NamedTuple):
    """What was seen of the steady steps."""

    schedule: Schedule
    timelines: list[Timeline]
    seconds: list[float]
    """of each step by the clock, everything included"""
    evaluation: tuple[Op, list[int]] | None
    """the loss's op, and its durations in ns, where it was asked for"""
    peaks: dict[str, int]
    """op kind -> the most that was allocated on the device while one ran, besides the pools; empty without CUDA"""
    saved_bytes: int
    """of one decoder layer's activations; 0 without CUDA, as the next"""
    device_peak_bytes: int
    """the most that PyTorch's allocator held, but for what it held before; without CUDA the pools that stand for the device"""
    host_bytes: int
    """of the host's pools"""


def run_trial(
    plan: Plan, config: PretrainedConfig, device: torch.device, *, steps: int, seconds: float, schedule: Schedule | None = None,
    host_memory: HostMemory | None = None, evaluates: bool = False, watches: bool = True,
) -> Trial:  # fmt: skip
    """At least so many steps, and for so many seconds, of `plan`, or of another `schedule` for it, after the warm-up.

    `watches`: one more step, for `peaks` and `saved_bytes`. `evaluates`: and an evaluation. Raises UserError where it does not fit, or where memory ran out.
    """
    cuda = device.type == "cuda"
    machine.forget_device_memory(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    generator = torch.Generator().manual_seed(0)
    with Executor(plan, config, AdamW(), device, schedule=schedule or lower(plan), host_memory=host_memory) as executor:
        executor.state.load(random_weights(0, device))
        timelines: list[Timeline] = []
        times: list[float] = []
        number, steady_since = 0, 0.0
        while number < WARM_UP_STEPS + steps or time.monotonic() - steady_since < seconds:
            number += 1
            result = executor.step(_batches(plan, generator), rate=_RATE, number=number)
            if number == WARM_UP_STEPS:
                steady_since = time.monotonic()
            elif number > WARM_UP_STEPS:
                timelines.append(result.timeline)
                times.append(result.seconds)
        pools = executor.allocated("device")
        highest = torch.cuda.max_memory_allocated(device) - before if cuda else pools
        peaks: dict[str, int] = {}
        growth: dict[str, int] = {}
        if cuda and watches:
            peaks, growth = _watch_memory(executor)
            executor.step(_batches(plan, generator), rate=_RATE, number=number + 1)
            peaks = {kind: peak - before - pools for kind, peak in peaks.items()}
        loss = _evaluated(executor, plan, generator) if evaluates else None
        return Trial(executor.schedule, timelines, times, loss, peaks, growth.get("recompute", 0), highest, executor.allocated("host"))


def _evaluated(executor: Executor, plan: Plan, generator: torch.Generator) -> tuple[Op, list[int]]:
    """The loss of four evaluations, of which the first does not count."""
    op = next(op for op in evaluation(plan).ops if op.kind == "loss")
    timelines = [executor.evaluate(_batches(plan, generator)).timeline for _ in range(4)]
    return op, [span.duration_ns for timeline in timelines[1:] for span in timeline.spans if span.kind == "loss"]


def _batches(plan: Plan, generator: torch.Generator) -> list[Batch]:
    work = plan.workload
    # several, and one of them as long as can be: what attention takes at most
    documents = (torch.arange(work.sequence) > 0).long().expand(work.batch, -1) if work.documents else None
    drawn = [torch.randint(plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator) for _ in range(work.accumulation)]
    return [Batch(ids, labels, documents) for ids, labels in drawn]


def _watch_memory(executor: Executor) -> tuple[dict[str, int], dict[str, int]]:
    """From the next step on: by op kind, the most that was allocated on the device during one, and by how much one left it grown.

    PyTorch's allocator counts when work is enqueued, which the lane's thread does op by op.
    """
    peaks: dict[str, int] = defaultdict(int)
    growth: dict[str, int] = defaultdict(int)
    for op in executor.schedule.ops:
        if op.lane in ("compute", "update"):
            task = executor.tasks[op.id]

            def run(work: Callable[[], object] = task.run, kind: str = op.kind) -> None:
                before = torch.cuda.memory_allocated(executor.device)
                torch.cuda.reset_peak_memory_stats(executor.device)
                work()
                peaks[kind] = max(peaks[kind], torch.cuda.max_memory_allocated(executor.device))
                growth[kind] = max(growth[kind], torch.cuda.memory_allocated(executor.device) - before)

            task.run = run
    return peaks, growth
