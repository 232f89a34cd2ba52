"""Running: every plan of a sweep that is not in the store yet, simulated on all cores or executed one after the other; rows are stored as they come."""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatrain.experiments.sweep.simulated import Simulator, likeness, structure
from megatrain.experiments.sweep.store import Row, Store
from megatrain.simulator.hardware import HardwareSpec
from megatrain.simulator.plan import Plan

_TASK = 40  # plans that a process gets at a time, at least: some 0.3 s
_OBJECTS = 200_000  # new objects before the collector looks at the young ones: a schedule has tens of thousands, all of which live


class Entry(NamedTuple):
    """A plan and its key in the store."""

    plan: Plan
    key: str


OnRows = Callable[[list[Row]], None]


def simulate(entries: Sequence[Entry], hardware: HardwareSpec, store: Store, on_rows: OnRows, *, jobs: int) -> None:
    """Stores a row for each of `entries`, simulated by `jobs` processes; `on_rows` hears of them."""
    tasks = list(_tasks(entries))
    if jobs == 1 or len(tasks) < 2:
        work = Simulator(hardware)
        for task in tasks:
            _keep(_rows(work, task), store, on_rows)
        return
    context = multiprocessing.get_context("spawn")  # a fork would take the progress bar's thread's locks with it
    with ProcessPoolExecutor(min(jobs, len(tasks)), context, _begin, (hardware, entries[0].plan)) as pool:
        try:
            for done in as_completed([pool.submit(_work, [_told(entry) for entry in task]) for task in tasks]):
                _keep(done.result(), store, on_rows)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _keep(rows: list[Row], store: Store, on_rows: OnRows) -> None:
    store.add(rows)
    on_rows(rows)


def _tasks(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    """Plans of one structure together, and enough of them to be worth a message."""
    task: list[Entry] = []
    for _, alike in itertools.groupby(sorted(entries, key=lambda entry: likeness(entry.plan)), key=lambda entry: structure(entry.plan)):
        task += alike
        if len(task) >= _TASK:
            yield task
            task = []
    if task:
        yield task


def _rows(work: Simulator, task: Iterable[Entry]) -> list[Row]:
    return [work.row(entry.plan, entry.key) for entry in task]


# ---- in the other processes

_Told = tuple[str, tuple[object, ...]]
_FIELDS = ("policy", "knobs", "workload", "device_limit_bytes", "host_limit_bytes")
_here: list[tuple[Simulator, Plan]] = []  # of a process that simulates: what it was begun with


def _told(entry: Entry) -> _Told:
    """What of an entry differs from others: the model, which is large, goes once."""
    return entry.key, tuple(getattr(entry.plan, field) for field in _FIELDS)


def _begin(hardware: HardwareSpec, plan: Plan) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command itself ends this process
    gc.freeze()
    gc.set_threshold(_OBJECTS)
    _here.append((Simulator(hardware), plan))


def _work(task: list[_Told]) -> list[Row]:
    work, plan = _here[0]
    return _rows(work, [Entry(msgspec.structs.replace(plan, **dict(zip(_FIELDS, values, strict=True))), key) for key, values in task])


# ---- executed


def execute(entries: Sequence[Entry], hardware: HardwareSpec, store: Store, on_rows: OnRows, *, steps: int, device: str) -> None:
    """Runs each plan for `steps` optimizer steps on random tokens, in a process of its own. What cannot be or does not fit is simulated, which says why."""
    from megatrain.experiments.sweep.executed import executed

    work = Simulator(hardware)
    with tempfile.TemporaryDirectory() as folder:
        for entry in entries:
            row = work.row(entry.plan, entry.key)
            _keep([executed(row, entry.plan, Path(folder) / "plan.toml", steps, device) if row.timed else row], store, on_rows)


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
