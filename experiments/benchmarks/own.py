"""Times our runtime and its ceiling. `ours` executes a plan on random tokens. `ceiling` executes
only the plan's compute ops, without transfers and updates.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch

from megatrain.experiments.benchmarks.steps import (
    MAX_NORM,
    RATE,
    MeasuredSteps,
    Reading,
    random_tokens,
    repeat,
)
from megatrain.experiments.cli.training.allocation_bar import allocation_bar
from megatrain.runtime.batch import Batch
from megatrain.runtime.calibration.compute_alone import compute_alone, fill
from megatrain.runtime.execution.executor import Executor
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.files.model_files import random_weights
from megatrain.runtime.host import free_host_bytes, host_bytes
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.runtime.machine import device_bytes, forget_device_memory
from megatrain.runtime.memory.fitting import little_memory_note, refuse_what_does_not_fit
from megatrain.runtime.memory.process_memory import host_peak_bytes
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.hardware.machine import is_calibrated
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule.plan import Plan


def measure(
    system: str, plan: Plan, steps: int, device: torch.device, timeline: Path | None = None
) -> MeasuredSteps:
    """Returns the steps of `ours` or its `ceiling`, from random weights. Writes the timeline of the
    last step to `timeline`. Raises UserError if the plan cannot be executed, or if it needs more
    memory than its limits allow or than this machine has. Warns on standard error if it needs more
    than is free.
    """
    on_cpu = device.type != "cuda"
    settings, ceiling = AdamW(max_norm=MAX_NORM), system == "ceiling"
    schedule = preflight(plan, settings, device)
    if ceiling:
        schedule = compute_alone(plan)
    refuse_what_does_not_fit(
        # The prediction is that of the whole schedule.
        msgspec.structs.replace(plan, prediction=None) if ceiling else plan,
        schedule,
        # A virtual machine with a GPU may report less memory than it can grow to.
        host_bytes=host_bytes() if on_cpu and not is_calibrated(Path(plan.hardware)) else None,
        device_bytes=device_bytes(device),
        on_cpu=on_cpu,
    )
    if note := little_memory_note(schedule, free_host_bytes(), on_cpu=on_cpu):
        print(note, file=sys.stderr, flush=True)
    forget_device_memory(device)
    with ExitStack() as stack:
        with allocation_bar() as on_allocate:
            executor = stack.enter_context(
                Executor(
                    plan,
                    config_of(plan.model),
                    settings,
                    device,
                    schedule=schedule,
                    on_allocate=on_allocate,
                )
            )
        weights = random_weights(0, device)
        if ceiling:
            fill(executor, weights)
        else:
            executor.state.load(weights)

        documents = _documents(plan.workload)

        def step(number: int) -> Reading:
            batches = [
                Batch(ids, labels, documents)
                for ids, labels in random_tokens(plan.model.vocabulary, plan.workload, number)
            ]
            result = executor.step(batches, rate=RATE, number=number)
            if timeline is not None and number == steps:
                result.timeline.save(timeline)
            return Reading(
                seconds=result.seconds, loss=result.loss, gradient_norm=result.gradient_norm
            )

        # A policy of somebody else is not ours.
        readings = repeat(step, steps, system if ceiling else Path(plan.policy).name)
        peak = (
            torch.cuda.max_memory_allocated(device)
            if device.type == "cuda"
            else executor.allocated("device")
        )
        notes = (
            "compute ops alone"
            if ceiling
            else f"policy {plan.policy}, {'compiled' if plan.workload.compiled else 'eager'} layers"
        )
        return MeasuredSteps(
            system=system,
            notes=notes,
            steps=readings,
            ops=len(schedule.ops),
            device_peak_bytes=peak,
            host_peak_bytes=host_peak_bytes(),
        )


def _documents(work: Workload) -> torch.Tensor | None:
    """Returns the document numbers of a micro-batch, [batch, sequence] int64, or None if its rows
    have no documents. Each document has the length of the prediction, or that of the row.
    """
    if not work.documents:
        return None
    numbers = torch.arange(work.sequence) // (work.document_length or work.sequence)
    return numbers.expand(work.batch, -1)
