"""The result of a timed system, and functions that the timed systems share. A step is timed until
all of its work is finished.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch

from megatrain.simulator.model.workload import Workload

RATE = 1e-5
"""Learning rate of every step, without warm-up."""
MAX_NORM = 1.0
"""Largest gradient norm, if the workload clips."""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step."""

    seconds: float
    """Wall time of the step. The device is idle before and after it."""
    loss: float
    """Mean loss of the step."""
    gradient_norm: float | None = None
    """Gradient norm before clipping, or None if the system does not clip."""
    parts: dict[str, float] = {}
    """Part, such as `forward` -> its seconds. The device is idle between parts. Empty if the parts
    overlap.
    """


class MeasuredSteps(msgspec.Struct, frozen=True, kw_only=True):
    """One system in its own process."""

    system: str
    """The system's name."""
    failure: str = ""
    """Why there are no steps. Empty if the system ran."""
    notes: str = ""
    """Version and settings of the system."""
    steps: tuple[Reading, ...] = ()
    """All steps, including the warm-up."""
    ops: int | None = None
    """Number of ops in the schedule, if the system has one."""
    device_peak_bytes: int | None = None
    """Peak of PyTorch's allocator. Without CUDA, the size of the pool that represents the device.
    """
    host_peak_bytes: int | None = None
    """Peak of the process's resident memory."""
    machine: dict[str, Any] = {}
    """The machine, from `runtime.machine.describe`."""


Step = Callable[[int], Reading]
"""Runs step `number`, counted from 1."""
WorkStep = Callable[[int, Workload], Reading]
"""Runs step `number`, counted from 1, with the batch and sequence of a workload."""


def repeat(step: Step, steps: int, name: str) -> tuple[Reading, ...]:
    """Runs `steps` steps and returns them. Prints each step on standard error when it is done,
    after `name`.
    """
    readings = []
    for number in range(1, steps + 1):
        readings.append(reading := step(number))
        norm = (
            "" if reading.gradient_norm is None else f", gradient norm {reading.gradient_norm:.3f}"
        )
        parts = "".join(f", {part} {seconds:.3f} s" for part, seconds in reading.parts.items())
        print(
            f"{name} step {number}: {reading.seconds:.3f} s{parts}, loss {reading.loss:.4f}{norm}",
            file=sys.stderr,
            flush=True,
        )
    return tuple(readings)


def random_tokens(vocabulary: int, workload: Workload, number: int) -> list[torch.Tensor]:
    """Returns, for each micro-batch of step `number`, input ids and labels as int64 [2, batch,
    sequence] in host memory.
    """
    generator = torch.Generator().manual_seed(number)
    return [
        torch.randint(vocabulary, (2, workload.batch, workload.sequence), generator=generator)
        for _ in range(workload.accumulation)
    ]


class Parts:
    """Measures seconds by name, with the device idle before and after each part."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Adds the time of the `with` block to the part `name`."""
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def in_group() -> None:
    """Sets the environment variables of `torch.distributed` for a group of one process, with a free
    port. Does nothing in a process that torchrun started.
    """
    if "WORLD_SIZE" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
