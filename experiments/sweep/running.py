"""Runs a sweep: simulates plans in several processes, or executes them one after the other. Each
row is stored as soon as it is known.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import msgspec

from megatrain.experiments.sweep.simulated import Simulator, likeness, structure
from megatrain.experiments.sweep.store import Store, SweepRow
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.base.plugins import digest, unchanging
from megatrain.simulator.costs import outside_file
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.schedule.plan import Plan

_TASK = 40
"""Least number of plans that a process receives at a time, about 0.3 s of work."""
_OBJECTS = 200_000
"""New objects after which the garbage collector runs. A schedule has tens of thousands of objects,
and all of them stay alive."""


class SweepEntry(NamedTuple):
    """A plan and its key in the store."""

    plan: Plan
    """The plan."""
    key: str
    """Its key."""
    planned: bool = False
    """Whether the planner chooses the knobs. Then the knobs of `plan` are ignored."""


OnRows = Callable[[list[SweepRow]], None]
"""A function that is called with new rows."""


def simulate(
    entries: Sequence[SweepEntry],
    hardware: HardwareSpec,
    store: Store,
    on_rows: OnRows,
    *,
    jobs: int,
) -> None:
    """Stores a row for each of `entries`, simulated by `jobs` processes, and calls `on_rows` with
    new rows.

    Raises UserError if a process has loaded another content of a policy, an optimizer or a cost
    model than this one, whose content is in the keys.
    """
    tasks = list(_tasks(entries))
    if jobs == 1 or len(tasks) < 2:
        work = Simulator(hardware)
        for task in tasks:
            _keep(_rows(work, task), store, on_rows)
        return
    # A fork would copy the locks that the progress bar's thread holds.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        min(jobs, len(tasks)),
        context,
        _begin,
        (hardware, entries[0].plan, _outside(entries, hardware)),
    ) as pool:
        try:
            for done in as_completed(
                [pool.submit(_work, [_message(entry) for entry in task]) for task in tasks]
            ):
                _keep(done.result(), store, on_rows)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _keep(rows: list[SweepRow], store: Store, on_rows: OnRows) -> None:
    store.add(rows)
    on_rows(rows)


def _tasks(entries: Iterable[SweepEntry]) -> Iterator[list[SweepEntry]]:
    """Yields lists of entries. Plans of one structure are in one list. A list is long enough that
    the cost of a message to another process does not matter. An entry whose knobs the planner
    chooses has a list of its own, because planning takes about a second.
    """
    entries = list(entries)
    yield from ([entry] for entry in entries if entry.planned)
    task: list[SweepEntry] = []
    for _, alike in itertools.groupby(
        sorted(
            (entry for entry in entries if not entry.planned),
            key=lambda entry: likeness(entry.plan),
        ),
        key=lambda entry: structure(entry.plan),
    ):
        task += alike
        if len(task) >= _TASK:
            yield task
            task = []
    if task:
        yield task


def _rows(work: Simulator, task: Iterable[SweepEntry]) -> list[SweepRow]:
    return [_row(work, entry) for entry in task]


def _row(work: Simulator, entry: SweepEntry) -> SweepRow:
    return (work.planned_row if entry.planned else work.row)(entry.plan, entry.key)


# ---- in the worker processes

_Message = tuple[str, bool, tuple[object, ...]]
_FIELDS = ("policy", "knobs", "workload", "device_limit_bytes", "host_limit_bytes")
_Outside = dict[tuple[str, str], str]
_started_with: list[tuple[Simulator, Plan, _Outside]] = []  # the arguments of this worker process


def _message(entry: SweepEntry) -> _Message:
    """Returns an entry without the fields that all entries share, such as the model, which is large
    and is sent only once.
    """
    values = tuple(getattr(entry.plan, field) for field in _FIELDS)
    return entry.key, entry.planned, values


def _outside(entries: Iterable[SweepEntry], hardware: HardwareSpec) -> _Outside:
    """Returns (what it defines, path) of each file outside the package that decides a row -> the
    digest of its source.
    """
    costs = outside_file(hardware)
    files = {("cost model", str(costs))} if costs else set[tuple[str, str]]()
    for entry in entries:
        work = entry.plan.workload
        files |= {("policy", entry.plan.policy), ("optimizer", work.optimizer)}
    return {(what, name): digest(what, name) for what, name in files if name.endswith(".py")}


def _begin(hardware: HardwareSpec, plan: Plan, outside: _Outside) -> None:
    """Prepares a worker process. `plan` has the fields that all entries share, and `outside` the
    digests of the files that decide the keys.
    """
    unchanging().__enter__()  # for the life of the process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process itself
    gc.freeze()
    gc.set_threshold(_OBJECTS)
    _started_with.append((Simulator(hardware), plan, outside))


def _work(task: list[_Message]) -> list[SweepRow]:
    work, plan, outside = _started_with[0]
    rows = _rows(
        work,
        [
            SweepEntry(
                msgspec.structs.replace(plan, **dict(zip(_FIELDS, values, strict=True))),
                key,
                planned,
            )
            for key, planned, values in task
        ],
    )
    for (what, path), before in outside.items():
        if digest(what, path) != before:
            raise UserError(
                f"{what} {path}",
                found="an edit while the sweep began",
                allowed="one content in a sweep",
                fix="start the sweep again, which continues it",
            )
    return rows


# ---- executed


def execute(
    entries: Sequence[SweepEntry],
    hardware: HardwareSpec,
    store: Store,
    on_rows: OnRows,
    *,
    before: Callable[[SweepRow], None],
    steps: int,
    device: str,
) -> None:
    """Runs each plan for `steps` optimizer steps on random tokens, each in its own process, stores
    its row, and calls `on_rows` with it. If a policy refuses the plan, or if the plan does not fit,
    it is only simulated, and its row has the reason. `before` is called with the predicted row of
    each plan before the plan runs.
    """
    from megatrain.experiments.sweep.executed import executed

    work = Simulator(hardware)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        for entry in entries:
            row = _row(work, entry)
            before(row)
            if row.timed:
                plan = msgspec.structs.replace(entry.plan, knobs=row.knobs)
                row = executed(row, plan, work.cost_model_of(plan), path, steps, device)
            _keep([row], store, on_rows)
