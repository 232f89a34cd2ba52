"""Chunk updates: what the host's optimizer takes for a part of a layer, one part after the other, as a step has them.

In a step the next part is there when one is done. In a plan of which one op runs at a time, the threads fell asleep between any two: parts of 2^24 parameters
took 3.7 ms there and 3.1 in steps (H200 machine, 16 cores).
"""

from __future__ import annotations

import itertools
import time

import torch

from megatrain.runtime import optimizer
from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.memory.arenas import Arenas
from megatrain.simulator.schedule import Buffer, Schedule

_SIZES = (2**14, 2**22, 2**24, 2**25)  # parameters: one block of the kernel, and what plans copy at a time
_MOST = 2**26  # parameters: 1.2 GiB, four times what a processor keeps in its cache
_LEAST = 5  # updates of one size
_BYTES = {"weights": 2, "low": 2, "moments": 8, "gradients": 2, "sums": 4}  # a parameter, of bf16 weights


class ChunkUpdates:
    """Optimizer state of `count` parameters on the host, at most 2^26, and threads to update it."""

    def __init__(self, count: int, threads: int, device: torch.device) -> None:
        self._count = count = min(count, _MOST)
        buffers = tuple(Buffer(id=f"host.{name}:0", bytes=width * count, persistent=True) for name, width in _BYTES.items())
        self._arenas = Arenas(Schedule(policy="rates", buffers=buffers, ops=()), device, device_limit_bytes=2**62, host_limit_bytes=2**62)
        self._workers = optimizer.workers(threads)
        flat = self._arenas.flat
        self._weights, self._gradient = (flat(f"host.{name}:0", torch.bfloat16, count) for name in ("weights", "gradients"))
        self._low, self._sum = flat("host.low:0", torch.int16, count), flat("host.sums:0", torch.float32, count)
        self._moments = self._arenas.tensor("host.moments:0", torch.float32, (2, count))
        for tensor in (self._weights, self._gradient, self._sum):
            tensor.uniform_(-0.02, 0.02)

    def measure(self, seconds: float) -> dict[tuple[str, str | int], list[int]]:
        """(cost table's key, parameters) -> ns of each update, of every size that goes into the state twice, with a gradient in bf16 and in fp32."""
        found: dict[tuple[str, str | int], list[int]] = {}
        sizes = [size for size in _SIZES if 2 * size <= self._count]
        for size, (kind, gradient) in itertools.product(sizes, (("cpu_update", self._gradient), ("cpu_update:wide", self._sum))):
            durations = found.setdefault((kind, size), [])
            ends = time.perf_counter() + seconds / (2 * len(sizes))
            for start in itertools.cycle(range(0, self._count - size + 1, size)):
                durations.append(self._update(slice(start, start + size), gradient))
                if len(durations) >= _LEAST and time.perf_counter() > ends:
                    break
        return found

    def _update(self, part: slice, gradient: torch.Tensor) -> int:
        begin = time.perf_counter_ns()
        optimizer.update(
            self._weights[part], self._low[part], self._moments[:, part], gradient[part], settings=AdamW(), rate=1e-5, number=1, clip=torch.ones(()),
            workers=self._workers,
        )  # fmt: skip
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        self._workers.close()
        self._arenas.close()
