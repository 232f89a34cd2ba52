"""Lanes: threads that run queues of tasks in order. With CUDA, the thread of a device lane enqueues
its tasks on the lane's own CUDA stream. One lane may run on the thread that runs the step.

A mark records the start and end of an op. There are four ways to wait for the end of an op:

* A host lane that waits for a host op blocks its thread.
* A host lane that waits for a stream op blocks its thread on the op's CUDA event.
* A device lane that waits for a stream op makes its stream wait for the op's CUDA event.
* A device lane that waits for a host op blocks its thread before it enqueues.

The same code runs with and without CUDA.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatrain.runtime.ranks.rank_board import Board
from megatrain.simulator.base.errors import RunError

# replaces `record_function` while no profiler runs: it takes 8 us and acquires the GIL twice
_NOT_PROFILED = contextlib.nullcontext()
DEVICE_LANES = ("compute", "update", "h2d", "d2h", "exchange")
"""Lanes that have a stream of their own with CUDA. Other lanes run on the host."""


class OpFailed(RunError):
    """An op raised an exception. The text names the op and its lane."""

    def __init__(self, op: str, lane: str, error: BaseException) -> None:
        super().__init__(
            f"{op} on lane {lane}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        )
        self.op, self.lane = op, lane


class Aborted(Exception):
    """Stops a lane at its next op because another lane failed or the user interrupted."""


class HostMark:
    """The start and end of an op that runs on a host thread."""

    def __init__(self) -> None:
        self.issued = threading.Event()
        """Set when the op has ended."""
        self.start_ns = self.end_ns = 0

    def begin(self) -> None:
        """Records the start of the op."""
        self.start_ns = time.perf_counter_ns()

    def end(self) -> None:
        """Records the end of the op and wakes the threads that wait for it."""
        self.end_ns = time.perf_counter_ns()
        self.issued.set()

    def block(self) -> None:
        """Blocks the calling thread until the op has ended."""
        self.issued.wait()

    def block_stream(self, stream: torch.cuda.Stream) -> None:
        """Makes later work of `stream` wait for the op. It blocks the calling thread, which must be
        the thread that enqueues on `stream`.
        """
        self.issued.wait()

    def span_ns(self, origin: Origin) -> tuple[int, int]:
        """Returns the start and end of the op in ns after `origin`."""
        return self.start_ns - origin.host_ns, self.end_ns - origin.host_ns


class StreamMark:
    """The start and end of an op that runs on a CUDA stream, as CUDA events."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.issued = threading.Event()
        """Set when the op is enqueued."""
        self._stream = stream
        self._start = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)

    def begin(self) -> None:
        """Records the start event on the stream."""
        self._start.record(self._stream)

    def end(self) -> None:
        """Records the end event on the stream and wakes the threads that wait for the op."""
        self._end.record(self._stream)
        self.issued.set()

    def block(self) -> None:
        """Blocks the calling thread until the op has ended on the device."""
        self.issued.wait()
        self._end.synchronize()

    def block_stream(self, stream: torch.cuda.Stream) -> None:
        """Makes later work of `stream` wait for the op. Blocks only until the op is enqueued."""
        self.issued.wait()
        stream.wait_event(self._end)

    def span_ns(self, origin: Origin) -> tuple[int, int]:
        """Returns the start and end of the op in ns after `origin`, which must have an event."""
        assert origin.event is not None
        return round(origin.event.elapsed_time(self._start) * 1e6), round(
            origin.event.elapsed_time(self._end) * 1e6
        )


@dataclass(frozen=True)
class Origin:
    """The start of a step on the host's clock and, with CUDA, on the device's clock."""

    host_ns: int
    """`time.perf_counter_ns` at the start."""
    event: torch.cuda.Event | None
    """CUDA event at the start; None without CUDA."""

    @classmethod
    def now(cls, cuda: bool) -> Origin:
        """Returns the origin of a step that starts now. With CUDA, the device must be idle.
        Otherwise the two clocks would be read more than about 10 us apart.
        """
        if not cuda:
            return cls(time.perf_counter_ns(), None)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.synchronize()
        return cls(time.perf_counter_ns(), event)


@dataclass
class Task:
    """An op that is bound to its tensors."""

    op: str
    """The id of the op."""
    run: Callable[[], object]
    """Does the op's work or, on a stream, enqueues it."""
    mark: HostMark | StreamMark
    """Records the start and end of the op."""
    waits: Sequence[HostMark | StreamMark] = field(default=())
    """Marks of the ops that must end first."""


class Lane:
    """Runs a queue of tasks, on a thread of its own or on the calling thread."""

    def __init__(
        self, name: str, threads: int, stream: torch.cuda.Stream | None, board: Board | None = None
    ) -> None:
        """`threads` is the number of threads that PyTorch may use in an op. `stream` is None for a
        host lane. The lane shows its current op on `board`, which is None without other ranks.
        """
        self.name, self._threads, self._stream, self._board = name, threads, stream, board
        self.queue: Sequence[Task] = ()
        """The tasks to run, for example the tasks of a step or of an evaluation."""
        self._go, self._done = threading.Semaphore(0), threading.Event()
        self._ends = False
        self._thread = threading.Thread(target=self._serve, name=f"lane-{name}", daemon=True)
        self.failure: tuple[str, BaseException] | None = None
        """The id of the op that failed in the last run, and its exception."""
        self.abort = threading.Event()
        """Set when a lane has failed. The lane then stops at its next op."""
        self.stop: Callable[[], object] = self.abort.set
        """Stops all lanes. Called when an op of this lane fails."""

    def play(self) -> None:
        """Makes the thread run `queue` once, without waiting for the end. The first call starts the
        thread.
        """
        if not self._thread.is_alive():
            self._thread.start()
        self._done.clear()
        self._go.release()

    def finish(self) -> None:
        """Waits until the thread has run all tasks of `queue` or, on a stream, has enqueued
        them.
        """
        self._done.wait()

    def run(self) -> None:
        """Runs `queue` once on the calling thread. An exception that is no `Exception`, such as
        KeyboardInterrupt, passes through.
        """
        threads = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        stream = (
            contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        )
        try:
            with stream:
                self._run_queue()
        finally:
            torch.set_num_threads(threads)
        if self.failure and not isinstance(self.failure[1], Exception):
            raise self.failure[1]

    def close(self) -> None:
        """Ends the thread, if it was started, and drops the tasks and the failure."""
        if self._thread.is_alive():
            self._ends = True
            self._go.release()
            self._thread.join()
        self.queue, self.failure = (), None

    def _serve(self) -> None:
        torch.set_num_threads(self._threads)
        if self._stream is not None:
            torch.cuda.set_device(self._stream.device)
            torch.cuda.set_stream(self._stream)
        while True:
            self._go.acquire()
            if self._ends:
                return
            self._run_queue()
            self._done.set()

    def _run_queue(self) -> None:
        self.failure = None
        for task in self.queue:
            try:
                for mark in task.waits:
                    if self._stream is None:
                        mark.block()
                    else:
                        mark.block_stream(self._stream)
                if self.abort.is_set():
                    raise Aborted
                with (
                    torch.profiler.record_function(task.op)
                    if torch.autograd.profiler._is_profiler_enabled
                    else _NOT_PROFILED
                ):
                    if self._board is not None:
                        self._board.begin(self.name, task.op)
                    task.mark.begin()
                    task.run()
                    task.mark.end()
                    if self._board is not None:
                        self._board.end(self.name)
            except BaseException as error:
                self.failure = (task.op, error)
                self.stop()
                return


class LaneGroup:
    """The lanes of a schedule. They run together.

    One lane runs on the thread that calls `play`, and the others on threads of their own. The other
    threads sleep between steps, and waking one took 4 ms on a virtual machine. The calling thread
    is already awake, so its lane starts at once.
    """

    def __init__(self, lanes: Sequence[Lane], own: str = "") -> None:
        """`own` is the name of the lane that the calling thread runs. If there is no lane of this
        name, all lanes have threads of their own.
        """
        self._lanes = lanes
        self._own = next((lane for lane in lanes if lane.name == own), None)
        self._abort = threading.Event()
        self._marks: list[HostMark | StreamMark] = []
        for lane in lanes:
            lane.abort, lane.stop = self._abort, self._stop

    def play(self, queues: Mapping[str, Sequence[Task]]) -> None:
        """Runs the tasks in `queues`, by lane, once. Lanes keep their threads and streams.

        Raises OpFailed from the exception of the op that failed. If several ops failed, it is the
        op of the first lane. KeyboardInterrupt passes through. In both cases all lanes have stopped
        before this method raises.
        """
        self._marks = [task.mark for queue in queues.values() for task in queue]
        for mark in self._marks:
            mark.issued.clear()
        self._abort.clear()
        started: list[Lane] = []
        try:
            for lane in self._lanes:
                lane.queue = queues.get(lane.name, ())
                if lane is not self._own:
                    lane.play()
                    started.append(lane)
            if self._own is not None:
                self._own.run()
            for lane in started:
                lane.finish()
        except BaseException:
            self._stop()
            for lane in started:
                lane.finish()
            raise
        failures = [
            (lane.name, *lane.failure)
            for lane in self._lanes
            if lane.failure and not isinstance(lane.failure[1], Aborted)
        ]
        for lane in self._lanes:
            lane.failure = None  # its traceback would keep the op's tensors alive
        if failures:
            name, op, error = failures[0]
            raise OpFailed(op, name, error) from error

    def _stop(self) -> None:
        """Stops all lanes at their next op. Wakes threads that wait for a mark."""
        self._abort.set()
        for mark in self._marks:
            mark.issued.set()

    def close(self) -> None:
        """Ends all threads."""
        for lane in self._lanes:
            lane.close()
