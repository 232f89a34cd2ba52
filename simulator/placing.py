"""Placing: which layers' weights, gradients and optimizer state stay on the device, and whose activations are stored, in the memory that there is.

A byte of residency saves so many bytes of copying a step: weights 3 (up for the update and again for backward, down once), gradients,
low plane and moments 2. A stored layer saves its recompute, for many more bytes; a kept attention the part of it that grows with the sequence, for
few. How much of each pays depends on which lane is short, so the search enumerates: stored layers in steps, the rest of the memory filled with
state in several orders (`filling.py`): class by class, layer by layer, and weights and gradients first, which lets the state of all others stream far
ahead of the layer that is due. What cannot hold its checkpoints, or not besides attention worth keeping, parks them on the host. The best plan is
refined, and then gives way to a neighbour as long as one is faster.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Iterator, Sequence

import msgspec

from megatrain.simulator import policies
from megatrain.simulator.assessment import Choice, RunnerUp, assess, varied
from megatrain.simulator.costs import CostModel
from megatrain.simulator.engine import makespan_ns
from megatrain.simulator.evaluator import another_ns
from megatrain.simulator.evaluator import makespan_ns as lower_bound_ns
from megatrain.simulator.filling import CLASSES, Filling, classes_of, host_updating, last, ranges, updated_like
from megatrain.simulator.least import Least
from megatrain.simulator.plan import Knobs, Placement, Plan
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.specs import DTYPE_BYTES

_STEPS = 8  # numbers of stored layers that are tried, evenly spread
_FINALISTS = 2
_PATIENCE = 8  # plans in a row, by their lower bounds, that are played and no better: what is left has higher bounds still
_CHUNKS = 8  # of the largest decoder layer, at most, in the copies of a plan
_LEAST_CHUNK, _USUAL_CHUNK = 16 * 2**20, 64 * 2**20
_STATE_SHARE = 1 / 16  # of the device's memory, at most, in chunks of state
_CLASSES_BYTES = 8  # of all classes, for each byte of weights in a chunk
_STATE_SLOTS = 4  # up, updated and down at one time, and one to spare: with 2 a 14B step on an H200 is predicted 2 % slower, for 0.9 GiB
_MANY_OPS = 3000  # beyond, larger copies are tried instead of smaller ones: those gain per cents, and each try would take 0.1 s
_LEAST_STEP = 1.0005  # a neighbour has to be faster by so much for its own neighbours to be tried
_MANY_COARSE_OPS = 1000  # of a plan with few large copies
_TIE = 1.001
_LEAN: tuple[dict[str, int], ...] = ({}, {"gradient_slots": 1, "state_slots": 2}, {"weight_slots": 1, "gradient_slots": 1, "state_slots": 1})
"""Ever less memory in slots, where more does not fit"""


class _Run:
    """A schedule of at most two micro-batches, `longer` times as long with all of them; it is played only where that is asked for."""

    def __init__(self, schedule: Schedule, costs: CostModel, longer: float) -> None:
        self.schedule, self._costs, self._longer = schedule, costs, longer
        self.bound_ns = lower_bound_ns(schedule, costs) * longer

    @functools.cached_property
    def step_ns(self) -> float:
        return makespan_ns(self.schedule, self._costs) * self._longer


class PlacementSearch:
    """The search among the placements and slots of one plan."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        layer = max(spec.elements for spec in plan.model.decoders) * DTYPE_BYTES[plan.workload.dtype]
        self.coarse = max(_USUAL_CHUNK, 2 ** ((layer // 2).bit_length()))
        room = 2 ** (int(_STATE_SHARE * plan.device_limit_bytes / (_STATE_SLOTS * _CLASSES_BYTES)).bit_length() - 1)
        usual = max(min(max(_USUAL_CHUNK, 2 ** ((layer // _CHUNKS).bit_length())), room), _LEAST_CHUNK)
        self.plan, self.costs = varied(plan, chunk_bytes=usual, state_slots=_STATE_SLOTS, weights_ahead=int(not policies.defers_update(plan))), costs
        self.filling, self.least = Filling(plan, costs), Least(plan, costs)
        self._runs: dict[Knobs, _Run] = {}
        self._times: dict[Knobs, float] = {}

    def best(self) -> Choice:
        """The fastest plan that fits, or the one that misses by least."""
        found = [choice for slots in self._whole_layers() if (choice := self._best_with(slots))]
        if found:
            return min(found, key=lambda choice: choice.step_seconds)
        return next(filter(None, map(self._best_with, _LEAN)), None) or self._nearest_miss()

    def _best_with(self, knobs: dict[str, int]) -> Choice | None:
        """The fastest plan with these slots and copies; None where none fits."""
        candidates = list(dict.fromkeys(self._candidates(varied(self.plan, **knobs))))
        if policies.defers_update(self.plan):  # what the host updates then is not in the way of the first forward pass, so such plans may be far ahead
            candidates += [other for other in dict.fromkeys(map(host_updating, candidates)) if other not in candidates and self.filling.account(other).fits]
        finals = [(self.time(plan), plan) for plan in self._ranked(candidates)]
        if not finals:
            return None
        (time, plan), *others = sorted(finals, key=lambda entry: entry[0])
        time, plan = self._climbed(*self._refined(time, plan))
        if not plan.placed("host_updated"):  # with as many layers stored as now, the host's update may pay
            faster, other = self._split(time, plan)
            time, plan = self._climbed(faster, other) if faster < time else (time, plan)
        if not others:
            return assess(plan, self.costs)
        slower, other = self._alike(*others[0], plan)
        if slower < time:
            slower, other, (time, plan) = time, plan, self._climbed(slower, other)
        choice = assess(plan, self.costs)
        runner_up = RunnerUp(policy=other.policy, knobs=other.knobs, step_seconds=choice.step_seconds * slower / time)
        return msgspec.structs.replace(choice, runner_up=runner_up)

    def _everything(self, plan: Plan, base: Placement) -> Iterator[Plan]:
        """All of the state on the device, and as many layers stored as fit besides, where that fits."""
        everything = msgspec.structs.replace(base, **dict.fromkeys(classes_of(plan), "all"))
        spare = self.filling.most_stored(plan, everything)
        if spare >= 0:
            for placement in self.filling.with_attention(plan, msgspec.structs.replace(everything, stored=last(plan.model.layers, spare))):
                candidate = varied(plan, placement=placement)
                yield from [candidate] if self.filling.account(candidate).fits else []

    def least_ns(self) -> float:
        """No plan that fits takes less: the compute lane's time with as many layers stored as fit while all of the state is on the host, attention kept of the
        others.
        """
        lean, layers = varied(self.plan, **_LEAN[-1], chunk_bytes=_LEAST_CHUNK), self.plan.model.layers
        most = max(self.filling.most_stored(lean, base) for base in (Placement(), Placement(parked="all")))
        kept = ranges([layer.name for layer in self.plan.model.decoders], set(self.filling.keeping))
        return self.least.compute_ns(varied(lean, placement=Placement(stored=last(layers, max(most, 0)), attention=kept)))

    def _whole_layers(self) -> list[dict[str, int]]:
        """Clipping by update goes through a layer's state once where the slots hold all of its chunks: one more, so that the next layer's come meanwhile."""
        if self.plan.workload.clipping != "update":
            return []
        layer = max(spec.elements for spec in self.plan.model.decoders) * DTYPE_BYTES[self.plan.workload.dtype]
        copies = (self.plan.knobs.chunk_bytes, 2 * self.plan.knobs.chunk_bytes)
        return [{"chunk_bytes": size, "state_slots": -(-layer // size) + 1} for size in copies]

    def _ranked(self, candidates: Sequence[Plan], least: float = math.inf) -> list[Plan]:
        """The fastest few of those that take no more than `least` ns, with few large copies, the fastest first. What `Least` says is a lower bound of the
        engine's time, and so is the evaluator's time. A plan is lowered, and then played, only when its bound is the lowest of all. The search ends when that
        bound is above the best few, or when several plans in a row were no better.
        """
        bounds: list[tuple[float, int, int]] = [(self.least.compute_ns(other), 0, index) for index, other in enumerate(candidates)]
        heapq.heapify(bounds)
        best: list[tuple[float, int]] = []
        in_vain = 0
        while bounds and bounds[0][0] <= (best[-1][0] if len(best) == _FINALISTS else least) and in_vain < _PATIENCE:
            bound, known, index = heapq.heappop(bounds)
            if not known:
                heapq.heappush(bounds, (max(bound, self.least.step_ns(varied(candidates[index], chunk_bytes=self.coarse))), 1, index))
                continue
            run = self._coarse(candidates[index])
            if known == 1:
                heapq.heappush(bounds, (max(bound, run.bound_ns), 2, index))
                continue
            better = sorted([*best, (run.step_ns, index)])[:_FINALISTS] if run.step_ns <= least else best
            in_vain = in_vain + 1 if better == best else 0
            best = better
        return [candidates[index] for _, index in best]

    def _coarse(self, candidate: Plan) -> _Run:
        """The candidate with few large copies, whether that fits or not, for a quick and fair ranking."""
        plan = varied(candidate, chunk_bytes=self.coarse, accumulation=2)
        if plan.knobs not in self._runs:
            schedule = policies.lower_anew(plan)
            self._runs[plan.knobs] = _Run(schedule, self.costs, self._longer(schedule))
        return self._runs[plan.knobs]

    def _climbed(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """Of `plan`, whose step takes `time` ns, and its neighbours the fastest, of that one's neighbours, and so on until none is faster; and its time."""
        tried = {plan}
        while True:
            before = time
            for others in (self.filling.neighbours, self.filling.with_other_inputs):
                nearby = [other for other in dict.fromkeys(others(plan)) if other not in tried]
                tried.update(nearby)
                found = self.faster(time, plan, nearby) or self._with_another_slot(time, plan)
                time, plan = found or (time, plan)
                if time * _LEAST_STEP <= before:
                    break
            else:
                return time, plan

    def _with_another_slot(self, time: float, plan: Plan) -> tuple[float, Plan] | None:
        """`plan` with one more slot for weights, where it is faster: how much that gains shows only with copies of the plan's own size."""
        other = self.filling.with_another_slot(plan)
        if other is None or self.least.step_ns(other) * _TIE >= time or self.time(other) * _TIE >= time:
            return None
        return self.time(other), other

    def faster(self, time: float, plan: Plan, others: Sequence[Plan]) -> tuple[float, Plan] | None:
        """The fastest of `others` and its time, where that is less than the `time` ns of `plan`; of plans of many ops only one is timed."""
        if not others:
            return None
        ranked = self._ranked(others, _TIE * self._coarse(plan).step_ns)[: 1 if self._has_many_ops(plan) else _FINALISTS]
        found = min(((self.time(other), index, other) for index, other in enumerate(ranked)), default=None)
        return (found[0], found[2]) if found and found[0] < time else None

    def _has_many_ops(self, plan: Plan) -> bool:
        return len(self._coarse(plan).schedule.ops) > _MANY_COARSE_OPS

    def time(self, plan: Plan) -> float:
        """Step of `plan` in ns; of more than two micro-batches by what the second takes."""
        if plan.knobs not in self._times:
            schedule = policies.lower(varied(plan, accumulation=2))
            self._times[plan.knobs] = makespan_ns(schedule, self.costs) * self._longer(schedule)
        return self._times[plan.knobs]

    def _longer(self, schedule: Schedule) -> float:
        """How many times as long as `schedule`, of at most two micro-batches, a step is: the update that a step begins with is done once, copies of weights
        for each of them, so a plan that is good for two need not be for many.
        """
        more = self.plan.workload.accumulation - 2
        return 1 + more * another_ns(schedule, self.costs) / max(lower_bound_ns(schedule, self.costs), 1) if more > 0 else 1.0

    def _candidates(self, plan: Plan) -> Iterator[Plan]:
        """Plans worth a try, all of which fit."""
        decoders, filling = plan.model.layers, self.filling
        for base in (Placement(), Placement(parked="all")):
            most = filling.most_stored(plan, base)
            if most < 0:
                continue
            yield from self._everything(plan, base)
            for stored in sorted({round(most * step / _STEPS) for step in range(_STEPS + 1)}):
                yield from filling.filled(plan, msgspec.structs.replace(base, stored=last(decoders, stored)))
            every = ranges([layer.name for layer in plan.model.decoders], set(filling.keeping))
            if filling.room(varied(plan, placement=msgspec.structs.replace(base, attention=every))) >= 0:
                return

    def _alike(self, time: float, plan: Plan, best: Plan) -> tuple[float, Plan]:
        """`plan`, whose step takes `time` ns, with the refinements of `best` where that fits and is faster; and its time."""
        alike = varied(updated_like(plan, best), chunk_bytes=best.knobs.chunk_bytes, weight_slots=best.knobs.weight_slots)
        if alike.knobs != plan.knobs and self.filling.account(alike).fits:
            return min((time, plan), (self.time(alike), alike), key=lambda entry: entry[0])
        return time, plan

    def _refined(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """`plan`, whose step takes `time` ns, with other copies where that is faster by more than a tie; and its time."""
        time, plan = self._split(time, plan)
        knobs = plan.knobs
        many = len(policies.lower(plan).ops) > _MANY_OPS
        chunk = 4 * knobs.chunk_bytes if many else max(knobs.chunk_bytes // 4, _LEAST_CHUNK)
        if many or self._coarse(plan).step_ns > _TIE * time:  # smaller copies are worth a try where these were faster than large ones
            changed = varied(plan, chunk_bytes=chunk)
            if changed.knobs != knobs and self.filling.account(changed).fits:
                found = self.time(changed)
                if found * _TIE < time:
                    plan, time = changed, found
        return time, plan

    def _split(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """With the host's cores updating all layers whose weights stream, every other one, or none, whichever is fastest; all, also with the state placed
        in the other orders, of which another one may be best then.
        """
        updated = varied(plan, placement=Placement(host_updated="all"))
        bases = [msgspec.structs.replace(plan.knobs.placement, **dict.fromkeys(CLASSES, ""), parked=parked) for parked in ("", "all")]
        others = dict.fromkeys(other for base in bases for other in self.filling.fills(updated, base))
        fitting = [other for other in others if other.placed("host_updated") and self.filling.account(other).fits]
        same = [other for other in (host_updating(plan), host_updating(plan, every=2)) if other.knobs != plan.knobs and self.filling.account(other).fits]
        for changed in self._ranked(list(dict.fromkeys([*same, *fitting]))):
            if self.least.step_ns(changed) * _TIE < time:
                found = self.time(changed)
                if found * _TIE < time:
                    plan, time = changed, found
        return time, plan

    def _nearest_miss(self) -> Choice:
        """The plan above its limits by the fewest bytes: everything on the host, or as much on the device as it holds."""
        lean = varied(self.plan, **_LEAN[-1])
        misses = []
        for base in (Placement(), Placement(parked="all")):
            plan = varied(lean, placement=base)
            misses += [plan, next(self.filling.fills(lean, base))]
        return assess(min(misses, key=lambda plan: self.filling.account(plan).excess_bytes), self.costs)
