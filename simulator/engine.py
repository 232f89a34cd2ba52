"""Engine: the schedule played in simulated time, one process per lane, ops that run at the same time slowing each other.

An op's duration is work at full speed. While the ops B are busy each of them does `costs.rates(demands of B)` millionths of that, so an
op lasts until its work is done, however often the rate changes on the way: a fluid model. Work is counted in millionths of nanoseconds, so every
sum is exact; an op ends at the first whole nanosecond by which its work is done. A lane is busy from an op's start to its end, not while it
waits or dispatches. The engine knows no physics: what slows what is the cost model's. Not modelled: bursts, queues inside the DMA engines.

There are two players of these rules: `simulate`, in simpy, tells when every op starts and ends; `makespan_ns`, one loop without simpy, tells only the last end,
to the same nanosecond in less than half of the time, for those who compare many plans.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

import simpy
from simpy.core import Infinity

from megatrain.simulator.costs import CostModel
from megatrain.simulator.schedule import LANES, Schedule
from megatrain.simulator.sharing import PARTS, Demand
from megatrain.simulator.timeline import Span, Timeline

_NOT_YET = -1
_NEVER = 2**63


class DeadlockError(RuntimeError):
    """Lanes wait for each other, or for an op that no lane runs; possible only for a schedule that `Schedule.check` rejects."""


def simulate(schedule: Schedule, costs: CostModel) -> Timeline:
    """The predicted timeline. Raises DeadlockError naming the first blocked op of each lane and what it waits for."""
    starts, ends = _play(schedule, costs)
    spans = [Span(op=op.id, lane=op.lane, start_ns=start, end_ns=end) for op, start, end in zip(schedule.ops, starts, ends, strict=True)]
    return Timeline(name="predicted", digest=schedule.digest, spans=tuple(spans))


def _play(schedule: Schedule, costs: CostModel) -> tuple[list[int], list[int]]:
    """Starts and ends of all ops, in program order."""
    environment = simpy.Environment()
    sizes = costs.sizes(schedule)
    times, demands = [costs.duration_ns(op) for op in sizes.ops], [costs.demand(op) for op in sizes.ops]
    flow = _Flow(environment, costs, demands)
    game = _Game(schedule, [times[size] for size in sizes.which], [flow.codes[size] for size in sizes.which])
    for lane, queue in enumerate(game.queues):
        if queue:
            environment.process(_run(environment, flow, game, lane, queue, costs.dispatch_ns.get(LANES[lane], 0)))
    if len(flow.known) == 1:
        environment.run()
    else:
        _run_shared(environment, flow)
    ends = game.ends[:-1]
    if _NOT_YET in ends:
        raise DeadlockError(_blocked(schedule, game))
    return game.starts, ends


def _queues(schedule: Schedule) -> list[list[int]]:
    """By lane, its ops by place in program order."""
    queues: list[list[int]] = [[] for _ in LANES]
    for index, lane in enumerate(schedule.compiled.lanes):
        queues[lane].append(index)
    return queues


def _numbered(demands: Iterable[Demand | None]) -> tuple[list[Demand | None], list[int]]:
    """The different ones, None first, and the place among them of each."""
    codes: dict[Demand | None, int] = {None: 0}
    places = [codes.setdefault(demand, len(codes)) for demand in demands]
    return list(codes), places


class _Game:
    """The schedule as lists by place in program order, and how far it has been played."""

    def __init__(self, schedule: Schedule, durations: list[int], codes: list[int]) -> None:
        self.durations, self.codes = durations, codes
        self.after = schedule.compiled.after
        self.queues = _queues(schedule)
        self.starts = [_NOT_YET] * len(durations)
        self.ends = [_NOT_YET] * (len(durations) + 1)  # the last stands for ops that are not there
        self.awaited: dict[int, simpy.Event] = {}


def _run(environment: simpy.Environment, flow: _Flow, game: _Game, lane: int, queue: list[int], latency: int) -> Generator[simpy.Event, None, None]:
    """One lane: each op in turn, once what it waits for has ended. An op has an event only where somebody waits for it."""
    starts, ends, after, durations, codes, awaited, timeout = game.starts, game.ends, game.after, game.durations, game.codes, game.awaited, environment.timeout
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
    """Plays to the end. Rates change between instants: whatever ends and starts at one instant counts as one change."""
    step, peek = environment.step, environment.peek
    while True:
        coming = peek()
        if flow.changed and coming > environment.now:
            flow.share()
        elif coming == Infinity:
            return
        else:
            step()


class _Flow:
    """The work in progress on every lane, and when each will be done at the rates of this moment."""

    def __init__(self, environment: simpy.Environment, costs: CostModel, demands: list[Demand | None]) -> None:
        self._environment, self._costs = environment, costs
        self.known, self.codes = _numbered(demands)
        """by size, the number of its demand; 0 for none"""
        lanes = len(LANES)
        self.carriers: list[simpy.Event] = [environment.event() for _ in range(lanes)]
        """by lane, the event that its process waits for while it is busy: the callbacks move on when the end is planned anew"""
        self.changed = False
        self._busy = [0] * lanes  # code of the running op
        self._work, self._rate, self._since = [0] * lanes, [0] * lanes, [0] * lanes  # work left at the moment since when the rate holds
        self._factor = [len(self.known) ** lane for lane in range(lanes)]
        self._mix = 0  # number of the combination of codes
        self._mixes: dict[int, list[tuple[int, int]]] = {}  # combination -> (lane, rate)

    def start(self, lane: int, code: int, duration: int) -> None:
        """`lane` begins `duration` nanoseconds of work; its carrier is processed at the end."""
        self._busy[lane], self._work[lane], self._rate[lane] = code, duration * PARTS, 0
        self._mix += code * self._factor[lane]
        self.changed = True

    def stop(self, lane: int) -> None:
        self._mix -= self._busy[lane] * self._factor[lane]
        self._busy[lane] = 0
        self.carriers[lane] = self._environment.event()
        self.changed = True

    def share(self) -> None:
        """Brings work and rates up to date after a change of the busy lanes, and plans anew the end of each lane whose rate changed."""
        self.changed = False
        mix = self._mixes.get(self._mix)
        if mix is None:
            mix = self._mixes[self._mix] = self._rates()
        now = int(self._environment.now)
        for lane, rate in mix:
            old = self._rate[lane]
            if rate != old:
                work = self._work[lane] = self._work[lane] - old * (now - self._since[lane]) if old else self._work[lane]
                self._rate[lane], self._since[lane] = rate, now
                timer, carrier = self._environment.timeout(-(-work // rate)), self.carriers[lane]
                timer.callbacks, carrier.callbacks = carrier.callbacks, []
                self.carriers[lane] = timer

    def _rates(self) -> list[tuple[int, int]]:
        lanes = [lane for lane, code in enumerate(self._busy) if code]
        demands = [demand for lane in lanes if (demand := self.known[self._busy[lane]]) is not None]
        return list(zip(lanes, self._costs.rates(tuple(demands)), strict=True))


def makespan_ns(schedule: Schedule, costs: CostModel) -> int:
    """End of the last op of `simulate`. Raises DeadlockError like it."""
    sizes, after = costs.sizes(schedule), schedule.compiled.after
    which, times = sizes.which, [costs.duration_ns(op) for op in sizes.ops]
    known, codes = _numbered(costs.demand(op) if time else None for op, time in zip(sizes.ops, times, strict=True))
    queues, latency = [iter(queue) for queue in _queues(schedule)], [costs.dispatch_ns.get(lane, 0) for lane in LANES]
    ends = [_NOT_YET] * (len(which) + 1)  # the last stands for ops that are not there
    awaited: dict[int, list[int]] = {}  # op -> lanes that wait for it
    mixes: dict[tuple[int, ...], list[tuple[int, int]]] = {}  # codes of the running ops -> (lane, rate)
    turn = [next(queue, _NOT_YET) for queue in queues]  # by lane, the op that runs or is next; so too all that follow
    due, dispatching = [_NEVER] * len(LANES), [False] * len(LANES)  # when the op or its dispatch is done
    busy, work, rates, since = ([0] * len(LANES) for _ in range(4))  # code of the running op; its work left at the moment since when the rate holds
    ready, now, changed = [lane for lane, op in enumerate(turn) if op != _NOT_YET], 0, False
    while True:
        for lane in ready:
            index = turn[lane]
            for other in after[index]:
                if ends[other] == _NOT_YET:
                    awaited.setdefault(other, []).append(lane)
                    break
            else:
                if latency[lane] and not dispatching[lane]:
                    dispatching[lane], due[lane] = True, now + latency[lane]
                    continue
                dispatching[lane], size = False, which[index]
                if codes[size]:
                    busy[lane], work[lane], rates[lane], changed = codes[size], times[size] * PARTS, 0, True
                else:
                    due[lane] = now + times[size]
        coming = min(due)
        if coming > now:
            if changed:  # whatever ended and started at this instant counts as one change
                changed, mix = False, tuple(busy)
                if mix not in mixes:
                    running = [lane for lane, code in enumerate(mix) if code]
                    mixes[mix] = list(zip(running, costs.rates(tuple([demand for lane in running if (demand := known[mix[lane]])])), strict=True))
                for lane, rate in mixes[mix]:
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
        index = turn[lane]
        ends[index] = now
        ready = awaited.pop(index, [])
        turn[lane] = following = next(queues[lane], _NOT_YET)
        code = busy[lane]
        if following != _NOT_YET:
            size = which[following]
            if code and codes[size] == code and not after[following] and not latency[lane]:
                work[lane], since[lane] = times[size] * PARTS, now  # the next copy of a run: no rate changes
                due[lane] = now - (-work[lane] // rates[lane])
                continue
            ready.append(lane)
        if code:
            busy[lane], changed = 0, True
    ends.pop()
    if _NOT_YET in ends:
        simulate(schedule, costs)  # raises, and says who waits for what
    return max(ends, default=0)


def _blocked(schedule: Schedule, game: _Game) -> str:
    """One clause per lane that has not finished."""
    clauses = []
    for lane, queue in enumerate(game.queues):
        first = next((index for index in queue if game.ends[index] == _NOT_YET), None)
        if first is not None:
            op = schedule.ops[first]
            waits = [
                f"{name}{'' if other >= 0 else ' (which no lane runs)'}"
                for name, other in zip(op.after, game.after[first], strict=True)
                if game.ends[other] == _NOT_YET
            ]
            clauses.append(f"{LANES[lane]} is blocked at {op.id}, which waits for {', '.join(waits) or 'nothing'}")
    return "; ".join(clauses)
