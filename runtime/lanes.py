"""Lanes: one thread each, walking its queue of tasks in order; on CUDA the device lanes' threads enqueue on a stream of their own.

An op's end is a `Mark`. A host thread that waits for a host op blocks; a stream that waits for a stream op gets one CUDA event; a host
thread that waits for a stream op synchronises on its event; a stream's thread that waits for a host op blocks before it enqueues.
So the same walk runs with CUDA and without.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatrain.simulator.errors import RunError

_UNSEEN = contextlib.nullcontext()  # to name an op for a profiler that is not there costs 8 us (CPU build, two cores), and Python's lock twice
DEVICE_LANES = ("compute", "update", "h2d", "d2h")


class LaneError(RunError):
    """An op failed; the text names it and its lane."""

    def __init__(self, op: str, lane: str, error: BaseException) -> None:
        super().__init__(f"{op} on lane {lane}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        self.op, self.lane = op, lane


class Aborted(Exception):
    """Another lane failed, or the user interrupted: this lane stops at its next op."""


class HostMark:
    """The begin and end of an op that runs on a host thread."""

    def __init__(self) -> None:
        self.issued = threading.Event()
        self.start_ns = self.end_ns = 0

    def begin(self) -> None:
        self.start_ns = time.perf_counter_ns()

    def end(self) -> None:
        self.end_ns = time.perf_counter_ns()
        self.issued.set()

    def block(self) -> None:
        """Blocks the calling thread until the op has ended."""
        self.issued.wait()

    def block_stream(self, stream: torch.cuda.Stream) -> None:
        """Keeps later work of `stream` behind the op: its thread, which calls this, waits before it enqueues."""
        self.issued.wait()

    def span_ns(self, origin: Origin) -> tuple[int, int]:
        return self.start_ns - origin.host_ns, self.end_ns - origin.host_ns


class StreamMark:
    """The begin and end of an op that runs on a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.issued = threading.Event()
        self._stream = stream
        self._start, self._end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        self._start.record(self._stream)

    def end(self) -> None:
        self._end.record(self._stream)
        self.issued.set()

    def block(self) -> None:
        self.issued.wait()
        self._end.synchronize()

    def block_stream(self, stream: torch.cuda.Stream) -> None:
        self.issued.wait()
        stream.wait_event(self._end)

    def span_ns(self, origin: Origin) -> tuple[int, int]:
        assert origin.event is not None
        return round(origin.event.elapsed_time(self._start) * 1e6), round(origin.event.elapsed_time(self._end) * 1e6)


@dataclass(frozen=True)
class Origin:
    """The start of a step on the host's clock and, with CUDA, on the device's."""

    host_ns: int
    event: torch.cuda.Event | None

    @classmethod
    def now(cls, cuda: bool) -> Origin:
        """With CUDA the device must be idle: then both clocks are read within some 10 us of each other."""
        if not cuda:
            return cls(time.perf_counter_ns(), None)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return cls(time.perf_counter_ns(), event)


@dataclass
class Task:
    """An op, bound: what to run, and the marks to wait for."""

    op: str
    run: Callable[[], object]
    mark: HostMark | StreamMark
    waits: Sequence[HostMark | StreamMark] = field(default=())


class Lane:
    """One thread and its queue. `stream` is None on a host lane."""

    def __init__(self, name: str, tasks: Sequence[Task], threads: int, stream: torch.cuda.Stream | None) -> None:
        self.name, self.tasks, self._threads, self._stream = name, tasks, threads, stream
        self.queue = tasks
        """what is walked through: the lane's own tasks, or for once others"""
        self._go, self._done = threading.Semaphore(0), threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._serve, name=f"lane-{name}", daemon=True)
        self.failure: tuple[str, BaseException] | None = None
        self.abort = threading.Event()

    def start(self, abort: threading.Event) -> None:
        self.abort = abort
        self._thread.start()

    def play(self) -> None:
        """Begins one walk through `queue`."""
        self.failure = None
        self._done.clear()
        self._go.release()

    def finished(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds for the end of the walk (every op run or, with CUDA, enqueued); whether it has ended."""
        return self._done.wait(timeout)

    def close(self) -> None:
        self._stop = True
        self._go.release()
        self._thread.join()
        self.tasks = self.queue = ()

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
            torch.cuda.set_stream(self._stream)
        while True:
            self._go.acquire()
            if self._stop:
                return
            self._walk()
            self._done.set()

    def _walk(self) -> None:
        for task in self.queue:
            try:
                for mark in task.waits:
                    if self._stream is None:
                        mark.block()
                    else:
                        mark.block_stream(self._stream)
                if self.abort.is_set():
                    raise Aborted
                with torch.profiler.record_function(task.op) if torch.autograd.profiler._is_profiler_enabled else _UNSEEN:
                    task.mark.begin()
                    task.run()
                    task.mark.end()
            except BaseException as error:
                self.failure = (task.op, error)
                self.abort.set()
                return


class Crew:
    """All lanes of a schedule."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._abort = threading.Event()
        for lane in lanes:
            lane.start(self._abort)

    def play(self, queues: Mapping[str, Sequence[Task]] | None = None) -> None:
        """One walk through every lane's queue, or through `queues`, by lane, on the same threads and streams. Raises LaneError from the exception of an op
        that failed (of several, the first lane's); lets Ctrl-C through. No lane runs on behind it.
        """
        queues = {lane.name: lane.tasks for lane in self._lanes} if queues is None else queues
        marks = [task.mark for queue in queues.values() for task in queue]
        for mark in marks:
            mark.issued.clear()
        self._abort.clear()
        started: list[Lane] = []
        try:
            for lane in self._lanes:
                lane.queue = queues.get(lane.name, ())
                lane.play()
                started.append(lane)
            for lane in self._lanes:
                while not lane.finished(timeout=0.2):
                    if self._abort.is_set():
                        self._wake(marks)
        except BaseException:
            self._abort.set()
            self._wake(marks)
            for lane in started:
                lane.finished()
            raise
        failures = [(lane.name, *lane.failure) for lane in self._lanes if lane.failure and not isinstance(lane.failure[1], Aborted)]
        for lane in self._lanes:
            lane.failure = None  # its traceback holds the op's tensors
        if failures:
            name, op, error = failures[0]
            raise LaneError(op, name, error) from error

    def _wake(self, marks: Sequence[HostMark | StreamMark]) -> None:
        for mark in marks:
            mark.issued.set()

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()
