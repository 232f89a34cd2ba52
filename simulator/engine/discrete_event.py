"""Engine: simulates a schedule with one process per lane. Ops that run at the same time slow each
other.

It is a fluid model. The duration of an op is its work at full speed. While a set of ops is running,
`costs.rates` gives the speed of each in millionths of full speed. An op ends when its work is done,
however often its rate changes. Work is counted in millionths of nanoseconds, so every sum is exact.
An op ends at the first whole nanosecond by which its work is done. A lane is busy from the start to
the end of an op, not while it waits or dispatches.

The cost model, not the engine, decides which ops slow each other down. Bursts, and queues inside
the DMA engines, are not modelled.

These rules are implemented twice, and tests compare both to the nanosecond. `simulate` plays a
schedule in simpy. `play` and `makespan_ns` play it in one loop without simpy, in less than half of
the time. `makespan_ns` returns only the end of the last op.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

from megatrain.simulator.costs import CostModel
from megatrain.simulator.costs.contention import PARTS, Demand
from megatrain.simulator.schedule import LANES, Schedule
from megatrain.simulator.schedule.timeline import Timeline

if TYPE_CHECKING:
    import simpy

_NOT_YET = -1
_NEVER = 2**63


class DeadlockError(RuntimeError):
    """Raised if lanes wait for each other, or for an op that no lane runs.

    This happens only with a schedule that `Schedule.check` rejects.
    """


def simulate(schedule: Schedule, costs: CostModel) -> Timeline:
    """Returns the predicted timeline.

    Raises DeadlockError if lanes are blocked. The error names the first blocked op of each lane and
    the ops that it waits for.
    """
    import simpy  # takes 50 ms, and most commands do not need it

    environment = simpy.Environment()
    sizes = costs.sizes(schedule)
    times = [costs.duration_ns(op) for op in sizes.ops]
    demands = [costs.demand(op) for op in sizes.ops]
    flow = _Flow(environment, costs, demands)
    state = _State(
        schedule, [times[size] for size in sizes.which], [flow.codes[size] for size in sizes.which]
    )
    for lane, queue in enumerate(state.queues):
        if queue:
            environment.process(
                _run(environment, flow, state, lane, queue, costs.dispatch_ns.get(LANES[lane], 0))
            )
    if len(flow.known) == 1:
        environment.run()
    else:
        _run_shared(environment, flow)
    ends = state.ends[:-1]
    if _NOT_YET in ends:
        raise DeadlockError(_blocked(schedule, state))
    return Timeline.of("predicted", schedule, zip(state.starts, ends, strict=True))


def _queues(schedule: Schedule) -> list[list[int]]:
    """Returns for each lane the indices of its ops in program order."""
    queues: list[list[int]] = [[] for _ in LANES]
    for index, lane in enumerate(schedule.compiled.lanes):
        queues[lane].append(index)
    return queues


def _numbered(demands: Iterable[Demand | None]) -> tuple[list[Demand | None], list[int]]:
    """Returns the distinct demands, None first, and for each of `demands` its index among them."""
    codes: dict[Demand | None, int] = {None: 0}
    places = [codes.setdefault(demand, len(codes)) for demand in demands]
    return list(codes), places


class _State:
    """The schedule as lists in program order, and the progress of its simulation."""

    def __init__(self, schedule: Schedule, durations: list[int], codes: list[int]) -> None:
        self.durations, self.codes = durations, codes
        self.after = schedule.compiled.after
        self.queues = _queues(schedule)
        self.starts = [_NOT_YET] * len(durations)
        self.ends = [_NOT_YET] * (len(durations) + 1)
        """The last entry stands for ops that are not in the schedule (index -1)."""
        self.awaited: dict[int, simpy.Event] = {}
        """Index of an op -> the event that other lanes wait for."""


def _run(
    environment: simpy.Environment,
    flow: _Flow,
    state: _State,
    lane: int,
    queue: list[int],
    latency: int,
) -> Generator[simpy.Event, None, None]:
    """The simpy process of one lane. It runs each op in turn, after the op's dependencies.

    An op has an event only if another lane waits for it. `latency` is the dispatch time of an op in
    nanoseconds.
    """
    starts = state.starts
    ends = state.ends
    after = state.after
    durations = state.durations
    codes = state.codes
    awaited = state.awaited
    timeout = environment.timeout
    now = 0
    for index in queue:
        for other in after[index]:
            if ends[other] == _NOT_YET:
                event = awaited.get(other)
                if event is None:
                    event = awaited[other] = environment.event()
                yield event
                now = environment.now  # type: ignore[assignment]
        if latency:
            yield timeout(latency)
            now = environment.now  # type: ignore[assignment]
        starts[index] = now
        duration = durations[index]
        if duration:
            if codes[index]:
                flow.start(lane, codes[index], duration)
                yield flow.carriers[lane]
                flow.stop(lane)
            else:
                yield timeout(duration)
            now = environment.now  # type: ignore[assignment]
        ends[index] = now
        if index in awaited:
            awaited.pop(index).succeed()


def _run_shared(environment: simpy.Environment, flow: _Flow) -> None:
    """Runs the simulation to its end, with rates that change.

    Rates are computed once per instant, after all ops that end or start at that instant.
    """
    step, peek = environment.step, environment.peek
    while True:
        coming = peek()
        if flow.changed and coming > environment.now:
            flow.share()
        elif coming == math.inf:
            return
        else:
            step()


class _Flow:
    """The work in progress on every lane, and when it will be done at the current rates."""

    def __init__(
        self, environment: simpy.Environment, costs: CostModel, demands: list[Demand | None]
    ) -> None:
        self._environment, self._costs = environment, costs
        self.known, self.codes = _numbered(demands)
        """`known` has the distinct demands. `codes` has for each op size the index of its demand in
        `known`, which is 0 if it has no demand."""
        lanes = len(LANES)
        self.carriers: list[simpy.Event] = [environment.event() for _ in range(lanes)]
        """For each lane, the event that its process waits for while it is busy. The callbacks move
        to another event when the end of the op changes."""
        self.changed = False
        """Whether an op has started or ended since the rates were computed."""
        self._busy = [0] * lanes
        """For each lane, the code of the running op, or 0 if it is idle."""
        self._rate = [0] * lanes
        """For each lane, the current rate in millionths."""
        self._since = [0] * lanes
        """For each lane, the time of its last rate change."""
        self._work = [0] * lanes
        """For each lane, the work left at its last rate change, in millionths of nanoseconds."""
        self._factor = [len(self.known) ** lane for lane in range(lanes)]
        self._mix = 0
        """The codes of all lanes as one number: the sum over lanes of code x factor."""
        self._mixes: dict[int, list[tuple[int, int]]] = {}
        """Value of `_mix` -> (lane, rate) of each busy lane."""

    def start(self, lane: int, code: int, duration: int) -> None:
        """Starts `duration` nanoseconds of work on `lane`. The lane's carrier fires when the work
        is done.
        """
        self._busy[lane], self._work[lane], self._rate[lane] = code, duration * PARTS, 0
        self._mix += code * self._factor[lane]
        self.changed = True

    def stop(self, lane: int) -> None:
        """Marks `lane` as idle."""
        self._mix -= self._busy[lane] * self._factor[lane]
        self._busy[lane] = 0
        self.carriers[lane] = self._environment.event()
        self.changed = True

    def share(self) -> None:
        """Updates work and rates after busy lanes have changed, and reschedules the end of each op
        whose rate changed.
        """
        self.changed = False
        mix = self._mixes.get(self._mix)
        if mix is None:
            mix = self._mixes[self._mix] = self._rates()
        now = int(self._environment.now)
        for lane, rate in mix:
            old = self._rate[lane]
            if rate != old:
                work = self._work[lane] = (
                    self._work[lane] - old * (now - self._since[lane]) if old else self._work[lane]
                )
                self._rate[lane], self._since[lane] = rate, now
                timer, carrier = self._environment.timeout(-(-work // rate)), self.carriers[lane]
                timer.callbacks, carrier.callbacks = carrier.callbacks, []
                self.carriers[lane] = timer

    def _rates(self) -> list[tuple[int, int]]:
        """Returns (lane, rate) of each busy lane."""
        lanes = [lane for lane, code in enumerate(self._busy) if code]
        demands = [demand for lane in lanes if (demand := self.known[self._busy[lane]]) is not None]
        return list(zip(lanes, self._costs.rates(tuple(demands)), strict=True))


def play(schedule: Schedule, costs: CostModel) -> Timeline:
    """Returns the same timeline as `simulate` in less time. Raises DeadlockError if lanes are
    blocked.
    """
    return Timeline.of("predicted", schedule, zip(*_played(schedule, costs), strict=True))


def makespan_ns(schedule: Schedule, costs: CostModel) -> int:
    """Returns the end of the last op in nanoseconds. Raises DeadlockError if lanes are blocked."""
    return max(_played(schedule, costs)[1], default=0)


def _played(schedule: Schedule, costs: CostModel) -> tuple[list[int], list[int]]:
    """Returns the start and the end of each op in nanoseconds."""
    sizes, after = costs.sizes(schedule), schedule.compiled.after
    which, times = sizes.which, [costs.duration_ns(op) for op in sizes.ops]
    known, codes = _numbered(
        costs.demand(op) if time else None for op, time in zip(sizes.ops, times, strict=True)
    )
    queues = [iter(queue) for queue in _queues(schedule)]
    latency = [costs.dispatch_ns.get(lane, 0) for lane in LANES]
    starts = [_NOT_YET] * len(which)
    ends = [_NOT_YET] * (len(which) + 1)  # the last entry stands for ops not in the schedule
    awaited: dict[int, list[int]] = {}  # op -> lanes that wait for it
    # code of the running op of each lane -> (lane, rate) of each busy lane; a code is the index of
    # the op's demand in `known`
    mixes: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    # The following lists have one entry per lane.
    current = [next(queue, _NOT_YET) for queue in queues]  # the op that runs or is next
    due = [_NEVER] * len(LANES)  # when the op or its dispatch is done
    dispatching = [False] * len(LANES)
    # The code of the running op, the work left at its last rate change, its rate, and the time of
    # that change.
    busy, work, rates, since = ([0] * len(LANES) for _ in range(4))
    ready, now, changed = [lane for lane, op in enumerate(current) if op != _NOT_YET], 0, False
    while True:
        for lane in ready:
            index = current[lane]
            for other in after[index]:
                if ends[other] == _NOT_YET:
                    awaited.setdefault(other, []).append(lane)
                    break
            else:
                if latency[lane] and not dispatching[lane]:
                    dispatching[lane], due[lane] = True, now + latency[lane]
                    continue
                dispatching[lane], size, starts[index] = False, which[index], now
                if codes[size]:
                    busy[lane] = codes[size]
                    work[lane] = times[size] * PARTS
                    rates[lane] = 0
                    changed = True
                else:
                    due[lane] = now + times[size]
        coming = min(due)
        if coming > now:
            if changed:  # rates are computed once, after all ops that end or start now
                changed, mix = False, tuple(busy)
                shares = mixes.get(mix)
                if shares is None:
                    running = [lane for lane, code in enumerate(mix) if code]
                    shares = mixes[mix] = list(
                        zip(
                            running,
                            costs.rates(
                                tuple([demand for lane in running if (demand := known[mix[lane]])])
                            ),
                            strict=True,
                        )
                    )
                for lane, rate in shares:
                    if rate != rates[lane]:
                        work[lane] -= rates[lane] * (now - since[lane])
                        rates[lane], since[lane], due[lane] = rate, now, now - (-work[lane] // rate)
                coming = min(due)
            if coming == _NEVER:
                break
            now = coming
        lane = due.index(now)
        due[lane] = _NEVER
        if dispatching[lane]:
            ready = [lane]
            continue
        index = current[lane]
        ends[index] = now
        ready = awaited.pop(index, [])
        current[lane] = following = next(queues[lane], _NOT_YET)
        code = busy[lane]
        if following != _NOT_YET:
            size = which[following]
            if code and codes[size] == code and not latency[lane]:
                for other in after[following]:
                    if ends[other] == _NOT_YET:
                        break
                else:
                    # The next op has the same demand and starts at once, so that no rate changes.
                    work[lane], since[lane], starts[following] = times[size] * PARTS, now, now
                    due[lane] = now - (-work[lane] // rates[lane])
                    continue
            ready.append(lane)
        if code:
            busy[lane], changed = 0, True
    ends.pop()
    if _NOT_YET in ends:
        simulate(schedule, costs)  # raises the DeadlockError
        raise RuntimeError(
            "`play` ended with blocked lanes, and `simulate` played the same schedule to its end:"
            " the two implementations of the engine disagree"
        )
    return starts, ends


def _blocked(schedule: Schedule, state: _State) -> str:
    """Describes each lane that has not finished: its blocked op, and the ops that it waits for."""
    clauses = []
    for lane, queue in enumerate(state.queues):
        first = next((index for index in queue if state.ends[index] == _NOT_YET), None)
        if first is not None:
            op = schedule.ops[first]
            waits = [
                f"{name}{'' if other >= 0 else ' (which no lane runs)'}"
                for name, other in zip(op.after, state.after[first], strict=True)
                if state.ends[other] == _NOT_YET
            ]
            clauses.append(
                f"{LANES[lane]} is blocked at {op.id}, which waits for"
                f" {', '.join(waits) or 'nothing'}"
            )
    return "; ".join(clauses)
