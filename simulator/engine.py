"""Engine: the schedule played in simulated time, one process per lane, busy lanes slowing each other.

An op's duration is work at full rate. While the lanes in B are busy, lane l does work at

    rate(l) = product of contention[l][other] over the others in B

so an op lasts until its work is done, however often the rate changes on the way: a fluid model. Rates are whole thousandths and work
is counted in their product, so every sum is exact; an op ends at the first whole nanosecond by which its work is done. A lane is busy
from an op's start to its end, not while it waits or dispatches. Not modelled: bursts, queues inside the DMA engines, clock changes.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping

import simpy

from megatrain.simulator.costs import CostModel
from megatrain.simulator.schedule import LANES, Op, Schedule
from megatrain.simulator.timeline import Span, Timeline

_PARTS = 1000
_FULL: int = _PARTS ** (len(LANES) - 1)  # a rate is at most the product of one factor per other lane


class DeadlockError(RuntimeError):
    """Lanes wait for each other, or for an op that no lane runs; possible only for a schedule that `Schedule.check` rejects."""


def simulate(schedule: Schedule, costs: CostModel) -> Timeline:
    """The predicted timeline. Raises DeadlockError naming the first blocked op of each lane and what it waits for."""
    environment = simpy.Environment()
    flow = _Flow(environment, costs.contention)
    done = {op.id: environment.event() for op in schedule.ops}
    started: dict[str, int] = {}
    for lane, queue in schedule.lanes.items():
        environment.process(_run(environment, flow, lane, queue, costs, done, started))
    environment.run()
    if len(flow.ended) < len(schedule.ops):
        raise DeadlockError(_blocked(schedule, flow.ended))
    spans = tuple(Span(op=op.id, lane=op.lane, start_ns=started[op.id], end_ns=flow.ended[op.id]) for op in schedule.ops)
    return Timeline(name="predicted", digest=schedule.digest, spans=spans)


def _run(
    environment: simpy.Environment, flow: _Flow, lane: str, queue: tuple[Op, ...], costs: CostModel, done: dict[str, simpy.Event], started: dict[str, int]
) -> Generator[simpy.Event, None, None]:
    """One lane: each op in turn, once what it waits for has ended."""
    latency = costs.dispatch_ns.get(lane, 0)
    never = environment.event()
    for op in queue:
        for other in op.after:
            event = done.get(other, never)
            if not event.processed:
                yield event
        if latency:
            yield environment.timeout(latency)
        started[op.id] = int(environment.now)
        flow.start(lane, op.id, costs.duration_ns(op), done[op.id])
        yield done[op.id]


class _Task:
    """The op that a busy lane runs."""

    def __init__(self, op: str, work: int, done: simpy.Event, now: int) -> None:
        self.op, self.work, self.done, self.since = op, work, done, now
        self.rate = 0  # work a nanosecond
        self.turn = 0  # counts plans of its end; a timer of an earlier plan is void


class _Flow:
    """The work in progress on every lane, and when each will be done at the rates of this moment."""

    def __init__(self, environment: simpy.Environment, contention: Mapping[str, Mapping[str, float]]) -> None:
        self._environment = environment
        parts = {lane: {other: round(rate * _PARTS) for other, rate in others.items()} for lane, others in contention.items()}
        self._parts = {lane: {other: part for other, part in others.items() if part != _PARTS} for lane, others in parts.items()}
        self._busy: dict[str, _Task] = {}
        self.ended: dict[str, int] = {}

    def start(self, lane: str, op: str, duration: int, done: simpy.Event) -> None:
        """`lane` begins `duration` nanoseconds of work; `done` succeeds at its end."""
        self._busy[lane] = _Task(op, duration * _FULL, done, int(self._environment.now))
        self._share()

    def _share(self) -> None:
        """Brings work and rates up to date after a change of the busy lanes, and plans anew the end of each lane whose rate changed."""
        now = int(self._environment.now)
        for lane, task in self._busy.items():
            rate = self._rate(lane)
            if rate == task.rate:
                continue
            task.work = max(task.work - task.rate * (now - task.since), 0)
            task.rate, task.since, task.turn = rate, now, task.turn + 1
            timer = self._environment.timeout(-(-task.work // rate))
            timer.callbacks.append(functools.partial(self._finish, lane, task, task.turn))

    def _rate(self, lane: str) -> int:
        rate, parts = _FULL, self._parts.get(lane)
        if parts:
            for other in self._busy:
                rate = rate // _PARTS * parts.get(other, _PARTS)
        return rate

    def _finish(self, lane: str, task: _Task, turn: int, timer: simpy.Event) -> None:
        if turn != task.turn:
            return
        del self._busy[lane]
        self.ended[task.op] = int(self._environment.now)
        task.done.succeed()
        self._share()


def _blocked(schedule: Schedule, ended: Mapping[str, int]) -> str:
    """One clause per lane that has not finished."""
    clauses = []
    for lane, queue in schedule.lanes.items():
        op = next((op for op in queue if op.id not in ended), None)
        if op is not None:
            waits = [f"{other}{'' if other in schedule.by_id else ' (which no lane runs)'}" for other in op.after if other not in ended]
            clauses.append(f"{lane} is blocked at {op.id}, which waits for {', '.join(waits) or 'nothing'}")
    return "; ".join(clauses)
