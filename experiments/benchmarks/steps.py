"""What every system that is timed gives back: its steps, all work of each finished, and the most memory that its process took."""

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

from megatrain.simulator.workload import Workload

RATE = 1e-5
"""learning rate, warm from the first step on"""
MAX_NORM = 1.0
"""of the gradient, where the workload clips"""


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step."""

    seconds: float
    """wall time, from an idle device to an idle device"""
    loss: float
    gradient_norm: float | None = None
    """before clipping; None where the system does not clip"""
    parts: dict[str, float] = {}
    """seconds of forward, backward, ..., the device idle between them; empty where they overlap"""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One system in its own process."""

    system: str
    failure: str = ""
    """why there is nothing to read; empty for one that ran"""
    notes: str = ""
    steps: tuple[Reading, ...] = ()
    """warm-up included"""
    ops: int | None = None
    """of the schedule, where the system has one"""
    device_peak_bytes: int | None = None
    """the most that PyTorch's allocator held; without CUDA the pool that stands for the device"""
    host_peak_bytes: int | None = None
    """the most that was resident in the process"""
    machine: dict[str, Any] = {}


Step = Callable[[int], Reading]
"""runs step `number`, from 1"""


def repeat(step: Step, steps: int, system: str) -> tuple[Reading, ...]:
    """So many steps, each told on standard error when it is done."""
    readings = []
    for number in range(1, steps + 1):
        readings.append(reading := step(number))
        norm = "" if reading.gradient_norm is None else f", gradient norm {reading.gradient_norm:.3f}"
        parts = "".join(f", {name} {seconds:.3f} s" for name, seconds in reading.parts.items())
        print(f"{system} step {number}: {reading.seconds:.3f} s{parts}, loss {reading.loss:.4f}{norm}", file=sys.stderr, flush=True)
    return tuple(readings)


def random_tokens(vocabulary: int, workload: Workload, number: int) -> list[torch.Tensor]:
    """Of step `number`, for each micro-batch: ids and labels, [2, batch, sequence] int64 in host memory."""
    generator = torch.Generator().manual_seed(number)
    return [torch.randint(vocabulary, (2, workload.batch, workload.sequence), generator=generator) for _ in range(workload.accumulation)]


class Parts:
    """Seconds by name, each taken with the device idle before and after."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def alone_in_group() -> None:
    """Says to `torch.distributed` that this process is all there is, on a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
