"""Times AdamW on the CPU for chunks of a layer, without pauses in between, as in a step.

With pauses, the threads would sleep between two chunks, and updates would take longer than in a
step (`docs/lab_notes.md`). Calibration also uses these updates as the load of the CPU when it
measures how much the CPU and the link slow each other.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence

import torch

from megatrain.runtime.calibration.timing import Work
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.runtime.optimizer import blockwise
from megatrain.runtime.optimizer.blockwise import records
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.model.state_format import BLOCK, EXACT, FORMATS, PLANE_BYTES
from megatrain.simulator.schedule import Buffer, Schedule

_SIZES = (2**14, 2**22, 2**24, 2**25)
"""Numbers of parameters to time: one block of the C kernel, and chunks of the usual sizes."""
_MOST = 2**26
"""The maximum number of parameters: 1.2 GB, which is four times the cache of a processor."""
_LEAST = 5
"""The least number of updates of each size."""
_UNLIMITED = 2**62
"""A memory limit in bytes that has no effect. The caller limits the number of parameters."""
BYTES = 18
"""The maximum host memory per parameter, in bytes."""


class ChunkUpdates:
    """Optimizer state in host memory, and threads that update it."""

    def __init__(self, count: int, dtype: torch.dtype, threads: int, state: str = EXACT) -> None:
        """Allocates the state and starts the threads.

        Args:
            count: the number of parameters, of which at most 2^26 are allocated.
            dtype: the dtype of weights and gradients, bf16 or fp32.
            threads: the number of threads.
            state: the name of the state format.
        """
        planes, self._coded = FORMATS[state], FORMATS[state].moments == "block8"
        self._unit = BLOCK if self._coded else 1
        self._count, self._threads = min(count, _MOST) // self._unit * self._unit, threads
        widths = {
            "weights": dtype.itemsize,
            "master_low": PLANE_BYTES[planes.low] if planes.low else 0,
            "moments": 2 * PLANE_BYTES[planes.moments],
            "gradients": dtype.itemsize,
            "sums": 4,
        }
        if dtype == torch.float32:
            del widths["sums"]
            widths["master_low"] = 0
        buffers = tuple(
            Buffer(
                id=f"host.{name}:0", bytes=int(width * self._count), data="workspace", dtype="mixed"
            )
            for name, width in widths.items()
            if width
        )
        schedule = Schedule(policy="rates", buffers=buffers, ops=())
        self._arenas = Arenas(
            schedule,
            torch.device("cpu"),
            device_limit_bytes=_UNLIMITED,
            host_limit_bytes=_UNLIMITED,
        )
        self._cleanup = contextlib.ExitStack()
        self._cleanup.callback(self._arenas.close)
        try:
            self._workers = optimizer.workers(threads)
            self._cleanup.callback(self._workers.close)
            length = records(self._count) if self._coded else self._count
            self._weights, self._moments = (
                self._flat("weights", dtype),
                self._arenas.tensor(
                    "host.moments:0", torch.uint8 if self._coded else torch.float32, (2, length)
                ),
            )
            low = torch.int8 if planes.low == "int8" else torch.int16
            self._low = self._flat("master_low", low) if widths["master_low"] else None
            kind = "cpu_update" if state == EXACT else f"cpu_update:{state}"
            self._gradients = {kind: self._flat("gradients", dtype)}
            if "sums" in widths:
                self._gradients[f"{kind}:wide"] = self._flat("sums", torch.float32)
            self._settings, self._clip = AdamW(), torch.ones(())
            for tensor in (self._weights, *self._gradients.values()):
                tensor.uniform_(-0.02, 0.02)
        except BaseException:
            self._cleanup.close()
            raise

    def _flat(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self._arenas.flat(f"host.{name}:0", dtype, self._count)

    def measure(self, seconds: float) -> dict[tuple[str, str | int], list[int]]:
        """Times updates for about `seconds`. Returns (kind in the cost table, number of
        parameters) -> durations in ns.

        Updates with gradients in the dtype of the weights and, if this is not fp32, in fp32 are
        timed. A size is timed if the state has at least two chunks of it.
        """
        return self._timed(self._sizes, list(self._gradients), seconds)

    def window(self, seconds: float) -> dict[tuple[str, str | int], list[int]]:
        """Times updates as `measure` does, but only those of the largest size with gradients in the
        dtype of the weights.
        """
        return self._timed(self._sizes[-1:], list(self._gradients)[:1], seconds)

    @property
    def _sizes(self) -> list[int]:
        """The sizes to time, in ascending order."""
        return [size for size in _SIZES if 2 * size <= self._count]

    def _timed(
        self, sizes: Sequence[int], kinds: Sequence[str], seconds: float
    ) -> dict[tuple[str, str | int], list[int]]:
        """Returns (kind, size) -> durations in ns, measured within about `seconds` in all."""
        samples: dict[tuple[str, str | int], list[int]] = {}
        own_threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)  # for updates in PyTorch, if there are no C kernels
        for size, kind in itertools.product(sizes, kinds):
            durations = samples.setdefault((kind, size), [])
            ends = time.perf_counter() + seconds / (len(kinds) * len(sizes))
            for start in itertools.cycle(range(0, self._count - size + 1, size)):
                durations.append(self._update(slice(start, start + size), self._gradients[kind]))
                if len(durations) >= _LEAST and time.perf_counter() > ends:
                    break
        torch.set_num_threads(own_threads)
        return samples

    def in_turn(self) -> Work:
        """Returns a function that updates the two halves of the state in turn.

        If it updated only one part, the part could stay in the processor's cache, unlike the state
        in a step. Copies would then evict it, and slow the updates more than in a step
        (`docs/lab_notes.md`).
        """
        half = max(self._count // 2 // self._unit, 1) * self._unit
        starts = itertools.cycle((0, self._count - half))

        def update() -> None:
            start = next(starts)
            self._update(slice(start, start + half), next(iter(self._gradients.values())))

        return update

    def _update(self, part: slice, gradient: torch.Tensor) -> int:
        """Updates `part` of the state and returns the duration in ns."""
        begin = time.perf_counter_ns()
        (blockwise if self._coded else optimizer).update(
            self._weights[part],
            None if self._low is None else self._low[part],
            self._moments[:, slice(*map(records, (part.start, part.stop)))]
            if self._coded
            else self._moments[:, part],
            gradient[part],
            settings=self._settings,
            rate=1e-5,
            number=1,
            clip=self._clip,
            workers=self._workers,
        )
        return time.perf_counter_ns() - begin

    def close(self) -> None:
        """Ends the threads and frees the memory."""
        self._cleanup.close()
