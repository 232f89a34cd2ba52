"""Placing: which layers' weights, gradients and optimizer state stay on the device, and whose activations are stored, in the memory that there is.

A byte of residency saves so many bytes of copying a step: weights 3 (up for the update and again for backward, down once), gradients,
low plane and moments 2. A stored layer saves its recompute, for many more bytes; a kept attention the part of it that grows with the sequence, for
few. How much of each pays depends on which lane is short, so the search enumerates: stored layers in steps, the rest of the memory filled with
state in several orders: class by class, layer by layer, and weights and gradients first, which lets the state of all others stream far ahead of
the layer that is due. Layers are taken from the front: their update is due first, while later ones have the forward pass to stream in. Stored
activations from the back: they are needed again first. Attention is kept of none of the others or of as many as fit, where it is a tenth of their
recompute. What cannot hold its checkpoints, or not besides attention worth keeping, parks them on the host.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator

import msgspec

from megatrain.simulator import policies
from megatrain.simulator.assessment import Choice, RunnerUp, assess, plan_account, varied
from megatrain.simulator.costs import CostModel
from megatrain.simulator.engine import makespan_ns
from megatrain.simulator.evaluator import another_ns
from megatrain.simulator.evaluator import makespan_ns as lower_bound_ns
from megatrain.simulator.memory import Account
from megatrain.simulator.plan import Placement, Plan
from megatrain.simulator.policies._layerwise import contributions, cost_keys, gradient_bytes
from megatrain.simulator.schedule import Op, Schedule
from megatrain.simulator.specs import DTYPE_BYTES

CLASSES = ("weights", "gradients", "low", "moments")
_STEPS = 8  # numbers of stored layers that are tried, evenly spread
_FINALISTS = 2
_CHUNKS = 8  # of the largest decoder layer, at most, in the copies of a plan
_LEAST_CHUNK, _USUAL_CHUNK = 16 * 2**20, 64 * 2**20
_STATE_SHARE = 1 / 16  # of the device's memory, at most, in chunks of state
_CLASSES_BYTES = 8  # of all classes, for each byte of weights in a chunk
_STATE_SLOTS = 4  # up, updated and down at one time, and one to spare: with 2 a 14B step on an H200 is predicted 2 % slower, for 0.9 GiB
_MANY_OPS = 3000  # beyond, larger copies are tried instead of smaller ones: those gain per cents, and each try would take 0.1 s
_TIE = 1.001
_LEAST_ATTENTION = 0.1  # of a recompute's time: below, what keeping it saves is no three per cent of a step
_LEAN: tuple[dict[str, int], ...] = ({}, {"gradient_slots": 1, "state_slots": 2}, {"weight_slots": 1, "gradient_slots": 1, "state_slots": 1})
"""Ever less memory in slots, where more does not fit"""


def ranges(layers: list[str], chosen: set[str]) -> str:
    """`chosen` as a placement writes it, in the order of `layers`.

    >>> ranges(["e", "0", "1", "2", "h"], {"e", "0", "1"}), ranges(["0", "1"], {"0", "1"})
    ('e,0-1', 'all')
    """
    if chosen >= set(layers):
        return "all"
    parts: list[str] = []
    for numbered, run in itertools.groupby((layer for layer in layers if layer in chosen), key=str.isdigit):
        if not numbered:
            parts += run
            continue
        numbers = [int(layer) for layer in run]
        for _, group in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
            first, *others = (number for _, number in group)
            parts.append(f"{first}-{others[-1]}" if others else str(first))
    return ",".join(parts)


def last(decoders: int, count: int) -> str:
    """The last `count` decoder layers."""
    layers = [str(index) for index in range(decoders)]
    return ranges(layers, set(layers[decoders - count :]))


def _host_updating(plan: Plan, every: int = 1) -> Plan:
    """`plan`, the host's cores updating the first, and every so many further, of the layers whose weights stream."""
    layers, resident = list(plan.model.stack), plan.placed("weights")
    streamed = [layer for layer in layers if layer not in resident]
    return varied(plan, placement=msgspec.structs.replace(plan.knobs.placement, host_updated=ranges(layers, set(streamed[::every]))))


class PlacementSearch:
    """The search among the placements and slots of one plan."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        layer = max(spec.elements for spec in plan.model.decoders) * DTYPE_BYTES[plan.workload.dtype]
        self.coarse = max(_USUAL_CHUNK, 2 ** ((layer // 2).bit_length()))
        room = 2 ** (int(_STATE_SHARE * plan.device_limit_bytes / (_STATE_SLOTS * _CLASSES_BYTES)).bit_length() - 1)
        usual = max(min(max(_USUAL_CHUNK, 2 ** ((layer // _CHUNKS).bit_length())), room), _LEAST_CHUNK)
        self.owes = policies.owes(plan)
        self.plan, self.costs = varied(plan, chunk_bytes=usual, state_slots=_STATE_SLOTS, weights_ahead=int(not self.owes)), costs
        self.keeping = [layer.name for layer in plan.model.decoders if self._keeping_pays(layer.name)]

    def _keeping_pays(self, layer: str) -> bool:
        """The decoder layer's attention takes much of its recompute. CUDA's kernels of which it can be kept take no fp32."""
        if self.plan.workload.dtype != "bf16" or not self.plan.model.keeps_attention(layer):
            return False
        kept, full = (
            self.costs.duration_ns(Op(id=f"R{layer}.m0", lane="compute", **cost_keys(self.plan, "recompute", layer, kept=kept))) for kept in (True, False)
        )
        return kept <= (1 - _LEAST_ATTENTION) * full

    def best(self) -> Choice:
        """The fastest plan that fits, or the one that misses by least."""
        found = [choice for slots in self._whole_layers() if (choice := self._best_with(slots))]
        if found:
            return min(found, key=lambda choice: choice.step_seconds)
        return next(filter(None, map(self._best_with, _LEAN)), None) or self._nearest_miss()

    def _best_with(self, knobs: dict[str, int]) -> Choice | None:
        """The fastest plan with these slots and copies; None where none fits."""
        finals = [(self._time(plan), plan) for plan in self._ranked(list(dict.fromkeys(self._candidates(varied(self.plan, **knobs)))))]
        if not finals:
            return None
        (time, plan), *others = sorted(finals, key=lambda entry: entry[0])
        time, plan = self._refined(time, plan)
        choice = assess(plan, self.costs)
        return msgspec.structs.replace(choice, runner_up=self._runner_up(*others[0], choice, time)) if others else choice

    def _whole_layers(self) -> list[dict[str, int]]:
        """Clipping by update goes through a layer's state once where the slots hold all of its chunks: one more, so that the next layer's come meanwhile."""
        if self.plan.workload.clipping != "update":
            return []
        layer = max(spec.elements for spec in self.plan.model.decoders) * DTYPE_BYTES[self.plan.workload.dtype]
        copies = (self.plan.knobs.chunk_bytes, 2 * self.plan.knobs.chunk_bytes)
        return [{"chunk_bytes": size, "state_slots": -(-layer // size) + 1} for size in copies]

    def _ranked(self, candidates: list[Plan]) -> list[Plan]:
        """The fastest few, with few large copies. The evaluator's time is a lower bound of the engine's: who is slower by that than the engine finds the
        last of the best so far need not be played.
        """
        schedules = [policies.lower_anew(varied(self._quick(candidate), accumulation=2)) for candidate in candidates]
        longer = [self._longer(schedule) for schedule in schedules]
        bounds = [lower_bound_ns(schedule, self.costs) * more for schedule, more in zip(schedules, longer, strict=True)]
        best: list[tuple[float, int]] = []
        for index in sorted(range(len(candidates)), key=lambda index: (bounds[index], index)):
            if len(best) == _FINALISTS and bounds[index] > best[-1][0]:
                break
            best = sorted([*best, (makespan_ns(schedules[index], self.costs) * longer[index], index)])[:_FINALISTS]
        return [candidates[index] for _, index in best]

    def _quick(self, candidate: Plan) -> Plan:
        """The candidate with few large copies, whether that fits or not, for a quick and fair ranking."""
        return varied(candidate, chunk_bytes=self.coarse)

    def account(self, plan: Plan) -> Account:
        """The memory of `plan`."""
        return plan_account(plan, policies.outline(plan), self.costs)

    def _time(self, plan: Plan) -> float:
        """Step of `plan` in ns; of more than two micro-batches by what the second takes."""
        schedule = policies.lower(varied(plan, accumulation=2))
        return makespan_ns(schedule, self.costs) * self._longer(schedule)

    def _longer(self, schedule: Schedule) -> float:
        """How many times as long as `schedule`, of at most two micro-batches, a step is: the update that a step begins with is done once, copies of weights
        for each of them, so a plan that is good for two need not be for many.
        """
        more = self.plan.workload.accumulation - 2
        return 1 + more * another_ns(schedule, self.costs) / max(lower_bound_ns(schedule, self.costs), 1) if more > 0 else 1.0

    def _candidates(self, plan: Plan) -> Iterator[Plan]:
        """Plans worth a try, all of which fit."""
        decoders = plan.model.layers
        for base in (Placement(), Placement(parked="all")):
            most = self.most_stored(plan, base)
            if most < 0:
                continue
            everything = msgspec.structs.replace(base, **dict.fromkeys(CLASSES, "all"))
            spare = self.most_stored(plan, everything)
            if spare >= 0:
                for placement in self._with_attention(plan, msgspec.structs.replace(everything, stored=last(decoders, spare))):
                    yield from self._fitting(plan, placement)
            for stored in sorted({round(most * step / _STEPS) for step in range(_STEPS + 1)}):
                for kept in self._with_attention(plan, msgspec.structs.replace(base, stored=last(decoders, stored))):
                    fills = list(self._fills(plan, kept))
                    for fill in [fill for index, fill in enumerate(fills) if fill not in fills[:index]]:
                        yield from self._fitting(plan, fill)
            every = ranges([layer.name for layer in plan.model.decoders], set(self.keeping))
            if self.room(varied(plan, placement=msgspec.structs.replace(base, attention=every))) >= 0:
                return

    def most_stored(self, plan: Plan, placement: Placement) -> int:
        """How many of the last decoder layers can be stored besides `placement`; -1 where not even that fits. Each one more takes at least as much."""

        def lacking(count: int) -> int:
            return -self.room(varied(plan, placement=msgspec.structs.replace(placement, stored=last(plan.model.layers, count))))

        return bisect.bisect_right(range(plan.model.layers + 1), 0, key=lacking) - 1

    def _with_attention(self, plan: Plan, placement: Placement) -> Iterator[Placement]:
        """The placement, and where that pays, the same with the attention kept of as many of the layers that it recomputes as fit."""
        yield placement
        held = varied(plan, placement=placement)
        stored, work = held.placed("stored"), plan.workload
        layers = [layer for layer in self.keeping if layer not in stored]
        if layers:
            one = max(plan.model.kept_attention(layer, work.tokens, work.dtype).bytes for layer in layers)
            count = min(self.room(held) // (one + 256), len(layers))
            if count > 0:
                names = [layer.name for layer in plan.model.decoders]
                yield msgspec.structs.replace(placement, attention=ranges(names, set(layers[len(layers) - count :])))

    def room(self, plan: Plan) -> int:
        """Device bytes that are left."""
        account = self.account(plan)
        return account.device_limit_bytes - account.device_peak_bytes

    def _fitting(self, plan: Plan, placement: Placement) -> list[Plan]:
        candidate = varied(plan, placement=placement)
        return [candidate] if self.account(candidate).fits else []

    def _orders(self) -> list[list[tuple[str, str]]]:
        """(class, layer) pairs in the orders in which memory is given to them."""
        layers = list(self.plan.model.stack)
        ahead, state = CLASSES[:2], CLASSES[2:]
        orders = [
            [(name, layer) for name in CLASSES for layer in layers],
            [(name, layer) for layer in layers for name in CLASSES],
            [(name, layer) for name in ahead for layer in layers] + [(name, layer) for layer in layers for name in state],
        ]
        if not self.owes:  # the embedding's update is last, and nothing hides it: its moments first, the most of its state
            orders.append([(name, layer) for layer in layers for name in reversed(CLASSES)])
        return orders

    def _fills(self, plan: Plan, placement: Placement) -> Iterator[Placement]:
        """`placement` with as much on the device as fits, in each order. Twice: what stays needs no slots, and leaves room for more."""
        layers, width = plan.model.stack, DTYPE_BYTES[plan.workload.dtype]
        empty, sizes = self.room(varied(plan, placement=placement)), dict[tuple[str, str], int]()
        for layer, spec in layers.items():
            per_parameter = {"weights": width, "low": 4 - width, "moments": 8, "gradients": gradient_bytes(plan, layer)}
            if not self.owes and contributions(plan, layer) == 1:
                del per_parameter["gradients"]  # it stays on the device anyway
            sizes |= {(name, layer): -(-count * spec.elements // 256) * 256 for name, count in per_parameter.items()}
        for order in self._orders():
            chosen: dict[str, set[str]] = {name: set() for name in CLASSES}
            filled = placement
            for _ in range(2):
                room = empty if filled is placement else self.room(varied(plan, placement=filled))
                for name, layer in order:
                    size = sizes.get((name, layer), room + 1)
                    if size <= room and layer not in chosen[name]:
                        room -= size
                        chosen[name].add(layer)
                filled = msgspec.structs.replace(placement, **{name: ranges(list(layers), held) for name, held in chosen.items()})
            yield filled

    def _runner_up(self, slower: float, plan: Plan, choice: Choice, time: float) -> RunnerUp:
        """`plan`, whose step takes `slower` ns where the choice's takes `time`; with the choice's refinements where that fits and is faster."""
        best = choice.plan.knobs
        alike = varied(self._updated_like(plan, choice.plan), chunk_bytes=best.chunk_bytes, weight_slots=best.weight_slots)
        if alike.knobs != plan.knobs and self.account(alike).fits:
            slower, plan = min((slower, plan), (self._time(alike), alike), key=lambda entry: entry[0])
        return RunnerUp(policy=plan.policy, knobs=plan.knobs, step_seconds=choice.step_seconds * slower / time)

    def _updated_like(self, plan: Plan, other: Plan) -> Plan:
        """`plan`, the host's cores updating of its streamed layers as many as of the other's: all, every other one, or none."""
        updated, streamed = other.placed("host_updated"), set(other.model.stack) - other.placed("weights")
        if not updated:
            return varied(plan, placement=msgspec.structs.replace(plan.knobs.placement, host_updated=""))
        return _host_updating(plan, every=1 if updated >= streamed else 2)

    def filled(self, base: Placement, like: Plan) -> Iterator[Plan]:
        """Plans of `base` with as much of the state on the device as fits, in each order, updated by the host as `like` is; all of which fit."""
        for placement in self._with_attention(self.plan, base):
            for fill in self._fills(self.plan, placement):
                plan = self._updated_like(varied(self.plan, placement=fill), like)
                if self.account(plan).fits:
                    yield plan

    def _refined(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """`plan`, whose step takes `time` ns, with other slots and copies where that is faster by more than a tie; and its time."""
        time, plan = self._split(time, plan)
        knobs = plan.knobs
        many = len(policies.lower(plan).ops) > _MANY_OPS
        chunk = 4 * knobs.chunk_bytes if many else max(knobs.chunk_bytes // 4, _LEAST_CHUNK)
        changes = [{"chunk_bytes": chunk}, {"weight_slots": knobs.weight_slots + 1}]
        for change in changes:
            changed = varied(plan, **change)
            if policies.outline(changed).buffers != policies.outline(plan).buffers and self.account(changed).fits:
                found = self._time(changed)
                if found * _TIE < time:
                    plan, time = changed, found
        return time, plan

    def _split(self, time: float, plan: Plan) -> tuple[float, Plan]:
        """With the host's cores updating all layers whose weights stream, every other one, or none, whichever is fastest; all, also with the state placed
        in the other orders, of which another one may be best then.
        """
        bases = [msgspec.structs.replace(plan.knobs.placement, **dict.fromkeys(CLASSES, ""), parked=parked) for parked in ("", "all")]
        others = (_host_updating(varied(plan, placement=fill)) for base in bases for fill in self._fills(plan, base))
        fitting = [other for other in dict.fromkeys(others) if other.placed("host_updated") and self.account(other).fits]
        for changed in [_host_updating(plan), _host_updating(plan, every=2), *self._ranked(fitting)[:1]]:
            if changed.knobs != plan.knobs and self.account(changed).fits:
                found = self._time(changed)
                if found * _TIE < time:
                    plan, time = changed, found
        return time, plan

    def _nearest_miss(self) -> Choice:
        """The plan above its limits by the fewest bytes: everything on the host, or as much on the device as it holds."""
        lean = varied(self.plan, **_LEAN[-1])
        misses = []
        for base in (Placement(), Placement(parked="all")):
            plan = varied(lean, placement=base)
            misses += [plan, varied(lean, placement=next(self._fills(lean, base)))]
        return assess(min(misses, key=lambda plan: self.account(plan).excess_bytes), self.costs)
