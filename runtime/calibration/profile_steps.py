"""Runs steps of a plan with random weights and tokens. Measures the duration of each op, and the
device memory that is allocated outside of the pools.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from megatrain.runtime import machine
from megatrain.runtime.batch import Batch
from megatrain.runtime.calibration.compute_alone import compute_alone, fill
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.runtime.warm_up import WARM_UP_STEPS
from megatrain.simulator.policies import evaluation, lower
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.timeline import Timeline

_RATE = 1e-5
"""Learning rate. It is small to keep weights finite with random tokens."""


class StepProfile(NamedTuple):
    """Measurements of the steps after the warm-up."""

    schedule: Schedule
    """The schedule that was executed."""
    timelines: list[Timeline]
    """The timeline of each step."""
    seconds: list[float]
    """The wall time of each step in seconds."""
    evaluation: tuple[Op, list[int]] | None
    """The loss op of an evaluation and its durations in ns, or None if no evaluation was
    requested."""
    peaks: dict[str, int]
    """Kind of op -> the peak of the device memory outside of the pools, in bytes, while an op of
    this kind was enqueued. Empty without CUDA."""
    saved_bytes: int
    """Bytes of the activations of one decoder layer, or 0 without CUDA."""
    device_peak_bytes: int
    """The peak of the memory that PyTorch allocated on the device, in bytes, minus the memory that
    was allocated before. Without CUDA, the bytes of the device pools."""
    host_bytes: int
    """Bytes of the host pools."""


def profile_steps(
    plan: Plan,
    config: PretrainedConfig,
    device: torch.device,
    *,
    steps: int,
    seconds: float,
    schedule: Schedule | None = None,
    host_memory: HostMemory | None = None,
    evaluates: bool = False,
    watches: bool = True,
    compute_only: bool = False,
) -> StepProfile:
    """Runs steps of `plan` and returns their measurements.

    Args:
        plan: The plan to run.
        config: The transformers configuration of the plan's model.
        device: The device that computes.
        steps: The least number of steps after the warm-up.
        seconds: The least duration of these steps in seconds.
        schedule: Replaces the plan's own schedule.
        host_memory: Provides the executor's host pools.
        evaluates: Whether to run evaluations, for `StepProfile.evaluation`.
        watches: Whether to run one more step, for `peaks` and `saved_bytes`.
        compute_only: Whether to run only the compute ops of the plan. This replaces `schedule`.

    Raises:
        UserError: The plan does not fit, or memory ran out.
    """
    cuda = device.type == "cuda"
    machine.forget_device_memory(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    generator = torch.Generator().manual_seed(0)
    settings = AdamW()
    if compute_only:
        schedule = compute_alone(plan)
    schedule = preflight(plan, settings, device, schedule=schedule or lower(plan))
    with Executor(
        plan, config, settings, device, schedule=schedule, host_memory=host_memory
    ) as executor:
        weights = random_weights(0, device)
        if compute_only:
            fill(executor, weights)
        else:
            executor.state.load(weights)
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
        return StepProfile(
            executor.schedule,
            timelines,
            times,
            loss,
            peaks,
            growth.get("recompute", 0),
            highest,
            executor.allocated("host"),
        )


def _evaluated(executor: Executor, plan: Plan, generator: torch.Generator) -> tuple[Op, list[int]]:
    """Returns the loss op and its durations in ns in four evaluations, without the first."""
    op = next(op for op in evaluation(plan).ops if op.kind == "loss")
    timelines = [executor.evaluate(_batches(plan, generator)).timeline for _ in range(4)]
    return op, [
        span.duration_ns
        for timeline in timelines[1:]
        for span in timeline.spans
        if span.kind == "loss"
    ]


def _batches(plan: Plan, generator: torch.Generator) -> list[Batch]:
    """Returns the micro-batches of a step, with random tokens."""
    work = plan.workload
    # With documents, a row has one of a single token and one with the rest, because long documents
    # take the most time.
    documents = (
        (torch.arange(work.sequence) > 0).long().expand(work.batch, -1) if work.documents else None
    )
    drawn = [
        torch.randint(plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator)
        for _ in range(work.accumulation)
    ]
    return [Batch(ids, labels, documents) for ids, labels in drawn]


def _watch_memory(executor: Executor) -> tuple[dict[str, int], dict[str, int]]:
    """Makes the following steps measure device memory. Returns two dicts, which these steps fill.

    Both map the kind of an op to bytes: the first to the peak of the allocated memory during the
    op, the second to the growth of the allocated memory from its start to its end. PyTorch's
    allocator counts memory when work is enqueued, and a lane enqueues one op at a time.
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
                growth[kind] = max(
                    growth[kind], torch.cuda.memory_allocated(executor.device) - before
                )

            task.run = run
    return peaks, growth
