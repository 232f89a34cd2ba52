"""Jobs: each computes one answer in its own process. Answers are kept. A job is ended when no page
waits for it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import signal
import threading
import traceback
from collections import OrderedDict
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

from megatrain.experiments.web.question import Question
from megatrain.simulator.base.errors import RunError, UserError

MOST_SECONDS = 120
"""The largest processor time of one job, in seconds."""
_MOST_KEPT, _MOST_RUNNING, _MOST_TABS = 256, 4, 64


class Superseded(Exception):
    """The page has asked another question in the meantime."""


class Jobs:
    """The jobs of a server.

    A job answers one question. When a page asks another question, it no longer waits for the first
    one. A job for which no page waits is ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, Question], _Job] = OrderedDict()
        self._turns: OrderedDict[str, int] = OrderedDict()
        self._wanted: dict[tuple[str, str], tuple[str, Question]] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["megatrain.experiments.web.answer"])
        forkserver.ensure_running()  # imports now, so the first answer does not wait for it

    def answer(self, kind: str, part: str, question: Question, tab: str, turn: int) -> Any:
        """Returns one part of a job's answer.

        Args:
            kind: the kind of job, a key of `answer.KINDS`.
            part: the name of one of its parts.
            question: the question.
            tab: an id of the page that asks.
            turn: a number that grows with each change of the page.

        Answers are kept, but failures are not.

        Raises Superseded if the page has asked another question in the meantime, UserError if the
        question is wrong, and RunError if the job was ended before it had an answer.
        """
        key = (kind, question)
        with self._lock:
            self._note(tab, turn)
            self._wanted[tab, kind] = key
            job = self._kept.get(key)
            if job is None:
                job = self._kept[key] = _Job(self._context, kind, question)
            self._kept.move_to_end(key)
            self._end_unwanted()
        try:
            return job.part(part)
        except (UserError, RunError):
            with self._lock:
                if self._kept.get(key) is job:  # the question may have been asked again
                    del self._kept[key]
            raise

    def close(self) -> None:
        """Ends all jobs."""
        with self._lock:
            for job in self._kept.values():
                job.end()
            self._kept.clear()

    def _note(self, tab: str, turn: int) -> None:
        """Records that a page is at `turn`. Raises Superseded if it is at a later one already."""
        if turn < self._turns.get(tab, turn):
            raise Superseded
        self._turns[tab] = turn
        self._turns.move_to_end(tab)
        while len(self._turns) > _MOST_TABS:
            gone, _ = self._turns.popitem(last=False)
            self._wanted = {key: job for key, job in self._wanted.items() if key[0] != gone}

    def _end_unwanted(self) -> None:
        """Ends jobs for which no page waits, ends the oldest jobs if too many run, and forgets the
        oldest answers if too many are kept.
        """
        wanted = set(self._wanted.values())
        running = [key for key, job in self._kept.items() if job.running]
        ended = [key for key in running if key not in wanted]
        running = [key for key in running if key in wanted]
        ended += running[: max(len(running) - _MOST_RUNNING, 0)]
        for key in ended:
            self._kept.pop(key).end()
        while len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)[1].end()


class _Job:
    """One question and the process that answers it."""

    def __init__(self, context: Any, kind: str, question: Question) -> None:
        self._changed = threading.Condition()
        self._parts: dict[str, dict[str, Any]] = {}
        self._error: Exception | None = None
        self.running = True
        receiving, sending = context.Pipe(duplex=False)
        self._process = context.Process(target=_work, args=(sending, kind, question), daemon=True)
        self._process.start()
        sending.close()
        threading.Thread(target=self._receive, args=(receiving,), daemon=True).start()

    def part(self, name: str) -> dict[str, Any]:
        """Waits until a part is computed and returns it. Raises the job's error if it failed."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._parts or not self.running)
            if name in self._parts:
                return self._parts[name]
            raise self._error or RunError("the answer took too long; ask `megatrain check` for it")

    def end(self) -> None:
        """Ends the process if it still runs."""
        with self._changed:
            if self.running:
                self._error = Superseded()
        self._process.terminate()

    def _receive(self, pipe: Connection) -> None:
        """Receives the parts until the process ends."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                name, value = pipe.recv()
                with self._changed:
                    if name:
                        self._parts[name] = value
                    else:
                        self._error = value
                    self._changed.notify_all()
        with self._changed:
            self.running = False
            self._changed.notify_all()
        self._process.join()


def _work(pipe: Connection, kind: str, question: Question) -> None:
    """Sends each part with its name through `pipe`, or an error with an empty name."""
    from megatrain.experiments.web.answer import KINDS

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the server ends its jobs
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, MOST_SECONDS))
    try:
        for part in KINDS[kind](question):
            pipe.send(part)
    except (UserError, RunError) as error:
        pipe.send(("", error))
    except Exception:
        traceback.print_exc()
        pipe.send(("", RunError("the program has a mistake; the terminal shows where")))
