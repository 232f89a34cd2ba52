"""Chunk updates: what the host's optimizer takes for a part of a layer, one part after the other, as a step has them; also what keeps the cores busy where
it is measured how much they slow the link, and the link them.

In a step the next part is there when one is done. In a plan of which one op runs at a time, the threads fell asleep between any two: parts of 2^24 parameters took
3.7 ms by the line between the sizes timed there, and 2.9 to 3.4 in steps with an idle link (H200 machines, 16 cores: experiments/results/h200-prove).
"""

from __future__ import annotations

import contextlib
import itertools
import time

import torch

from megatrain.runtime import optimizer
from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.repeats import Work
from megatrain.simulator.schedule import Buffer, Schedule

_SIZES = (2**14, 2**22, 2**24, 2**25)  # parameters: one block of the kernel, and what plans copy at a time
_MOST = 2**26  # parameters: 1.2 GB, four times what a processor keeps in its cache
_LEAST = 5  # updates of one size
_ANY = 2**62  # bytes: the caller's limit is in the number of parameters
BYTES = 18
"""of a parameter, at most"""


class ChunkUpdates:
    """Optimizer state of `count` parameters on the host, at most 2^26, weights in `dtype`, and threads to update it."""

    def __init__(self, count: int, dtype: torch.dtype, threads: int) -> None:
        self._count, self._threads = min(count, _MOST), threads
        widths = {"weights": dtype.itemsize, "low": 2, "moments": 8, "gradients": dtype.itemsize, "sums": 4}
        if dtype == torch.float32:
            del widths["low"], widths["sums"]
        buffers = tuple(
            Buffer(id=f"host.{name}:0", bytes=width * self._count, data="workspace", dtype="mixed", persistent=True) for name, width in widths.items()
        )
        schedule = Schedule(policy="rates", buffers=buffers, ops=())
        self._arenas = Arenas(schedule, torch.device("cpu"), device_limit_bytes=_ANY, host_limit_bytes=_ANY)
        self._held = contextlib.ExitStack()
        self._held.callback(self._arenas.close)
        try:
            self._workers = optimizer.workers(threads)
            self._held.callback(self._workers.close)
            self._weights, self._moments = self._flat("weights", dtype), self._arenas.tensor("host.moments:0", torch.float32, (2, self._count))
            self._low = self._flat("low", torch.int16) if "low" in widths else None
            self._gradients = {"cpu_update": self._flat("gradients", dtype)}
            if "sums" in widths:
                self._gradients["cpu_update:wide"] = self._flat("sums", torch.float32)
            self._settings, self._clip = AdamW(), torch.ones(())
            for tensor in (self._weights, *self._gradients.values()):
                tensor.uniform_(-0.02, 0.02)
        except BaseException:
            self._held.close()
            raise

    def _flat(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._arenas.flat(f"host.{name}:0", dtype, self._count)

    def measure(self, seconds: float) -> dict[tuple[str, str | int], list[int]]:
        """(cost table's key, parameters) -> ns of each update: of every size of which the state holds two, with gradients in the weights' dtype and in fp32."""
        found: dict[tuple[str, str | int], list[int]] = {}
        sizes, own_threads = [size for size in _SIZES if 2 * size <= self._count], torch.get_num_threads()
        torch.set_num_threads(self._threads)  # for where there is no kernel
        for size, (kind, gradient) in itertools.product(sizes, self._gradients.items()):
            durations = found.setdefault((kind, size), [])
            ends = time.perf_counter() + seconds / (len(self._gradients) * len(sizes))
            for start in itertools.cycle(range(0, self._count - size + 1, size)):
                durations.append(self._update(slice(start, start + size), gradient))
                if len(durations) >= _LEAST and time.perf_counter() > ends:
                    break
        torch.set_num_threads(own_threads)
        return found

    def in_turn(self) -> Work:
        """Updates one half of the state, then the other: what is updated over and over may partly stay in the processor's cache, out of which others drive
        it. An H200's cores kept 0.47 of their speed beside both directions of the link by 0.5 GB in one place, and 0.6 to 0.8 in steps
        (experiments/results/h200-prove: `half stays`).
        """
        half = max(self._count // 2, 1)
        starts = itertools.cycle((0, self._count - half))

        def update() -> None:
            start = next(starts)
            self._update(slice(start, start + half), self._gradients["cpu_update"])

        return update

    def _update(self, part: slice, gradient: torch.Tensor) -> int:
        begin = time.perf_counter_ns()
        optimizer.update(
            self._weights[part], None if self._low is None else self._low[part], self._moments[:, part], gradient[part], settings=self._settings, rate=1e-5,
            number=1, clip=self._clip, workers=self._workers,
        )  # fmt: skip
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        """Ends the threads and frees the memory."""
        self._held.close()
