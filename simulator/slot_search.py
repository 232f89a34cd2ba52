"""Slot search: the knobs of a policy whose data has fixed places: checkpoint interval, slots, slabs, bytes of a copy.

It goes in three rounds, each on the smallest program that tells its candidates apart:

1. checkpoint interval x weight slots: the whole model, a layer a copy, the evaluator; what cannot fit is left out,
2. gradient slots x slabs, then the bytes of a copy: a few layers, for each of the best pairs of round 1; the evaluator, then the engine,
3. the whole plans that are left: the engine, with contention. Within 0.1 % of the fastest, the one of fewest bytes wins.
"""

from __future__ import annotations

import itertools
import math

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.assessment import Choice, assess, frugality, plan_account, varied
from megatrain.simulator.costs import CostModel
from megatrain.simulator.engine import makespan_ns as shared_makespan_ns
from megatrain.simulator.errors import UserError
from megatrain.simulator.evaluator import makespan_ns
from megatrain.simulator.plan import Plan

WEIGHT_SLOTS = (1, 2, 3, 4, 8)
GRADIENT_SLOTS = (1, 2, 3)
GRADIENT_SLABS = (0, 1, 2, 4)
CHUNK_BYTES = (16 * 2**20, 64 * 2**20, 256 * 2**20)
ONE_COPY = 2**40
_SHORT = 6  # decoder layers of round 2, at least
_TIE = 1.001
_PAIRS = 2  # of round 1 that go into round 2


def intervals(layers: int) -> tuple[int, ...]:
    """Checkpoint intervals worth a try: powers of two up to half of the model, and the square root of its depth.

    >>> intervals(48)
    (1, 2, 4, 7, 8, 16)
    """
    powers = [2**power for power in range(5) if 2**power <= max(layers // 2, 1)]
    return tuple(sorted({*powers, max(math.isqrt(layers - 1) + 1, 1)} if layers > 2 else powers))


class SlotSearch:
    """The search among one policy's knobs."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self.plan, self.costs = plan, costs
        self.knobs = policy_library.find(plan.policy).knobs
        self.tiny = varied(plan, layers=2, accumulation=2, chunk_bytes=ONE_COPY)
        self.weight_slots = self._allowed("weight_slots", WEIGHT_SLOTS)
        self.least = {"weight_slots": self.weight_slots[0]}
        self.gradient_slots = self._allowed("gradient_slots", GRADIENT_SLOTS)
        self.slabs = self._allowed("gradient_slabs", GRADIENT_SLABS)
        self.chunks = self._allowed("chunk_bytes", CHUNK_BYTES)
        self.paths = self._path_bytes()
        self.sizes: dict[tuple[int, int], tuple[int, int]] = {}  # (interval, weight slots) -> bytes on (device, host), with the first path

    def _allowed(self, knob: str, values: tuple[int, ...]) -> tuple[int, ...]:
        """The values of `knob` that the policy takes; one of them, the default if it can be, where they make no difference. Raises UserError where
        it takes none.
        """
        if knob not in self.knobs:
            return (getattr(self.plan.knobs, knob),)
        programs: dict[int, str] = {}
        for value in values:
            try:
                programs[value] = policy_library.lower(varied(self.tiny, **{**getattr(self, "least", {}), knob: value})).digest
            except UserError as error:
                refused = error
        if not programs:
            raise refused
        default = getattr(self.plan.knobs, knob)
        if len(set(programs.values())) == 1:
            return (default if default in programs else next(iter(programs)),)
        return tuple(programs)

    def _path_bytes(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(gradient slots, slabs) -> bytes on (device, host) more than the first. Slots of a pool cost the same in every model depth."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for slots, slabs in itertools.product(self.gradient_slots, self.slabs):
            plan = varied(self.tiny, **self.least, gradient_slots=slots, gradient_slabs=slabs)
            verdict = plan_account(plan, policy_library.outline(plan), self.costs)
            found[slots, slabs] = (verdict.device_peak_bytes, verdict.host_peak_bytes)
        device, host = next(iter(found.values()))
        return {path: (sizes[0] - device, sizes[1] - host) for path, sizes in found.items()}

    def _excess(self, pair: tuple[int, int], path: tuple[int, int]) -> int:
        """Bytes above the limits."""
        device, host = (size + more for size, more in zip(self.sizes[pair], self.paths[path], strict=True))
        return max(device - self.plan.device_limit_bytes, 0) + max(host - self.plan.host_limit_bytes, 0)

    def best(self) -> Choice:
        """The fastest plan that fits, or the one that misses by least."""
        finals: list[Choice] = []
        for interval, slots in self._first_round():
            choice = assess(varied(self.plan, **self._second_round(interval, slots)), self.costs)
            finals += [choice] if choice.feasible else []
            if len(finals) == _PAIRS:
                break
        if not finals:
            return self._nearest_miss()
        fastest = min(choice.step_seconds for choice in finals)
        return min((choice for choice in finals if choice.step_seconds <= fastest * _TIE), key=frugality)

    def _first_round(self) -> list[tuple[int, int]]:
        """(interval, weight slots) that can fit, fastest first."""
        times: dict[tuple[int, int], int] = {}
        refused: UserError | None = None
        deepest = dict(zip(("gradient_slots", "gradient_slabs"), list(self.paths)[-1], strict=True))
        lengths = intervals(self.plan.model.layers) if "checkpoint_interval" in self.knobs else (self.plan.knobs.checkpoint_interval,)
        for interval, slots in itertools.product(lengths, self.weight_slots):
            plan = varied(self.plan, accumulation=2, chunk_bytes=ONE_COPY, checkpoint_interval=interval, weight_slots=slots, **deepest)
            try:
                verdict = plan_account(plan, policy_library.outline(plan), self.costs)
                more = self.paths[deepest["gradient_slots"], deepest["gradient_slabs"]]
                self.sizes[interval, slots] = (verdict.device_peak_bytes - more[0], verdict.host_peak_bytes - more[1])
                if any(self._excess((interval, slots), path) == 0 for path in self.paths):
                    times[interval, slots] = makespan_ns(policy_library.lower(plan), self.costs)
            except UserError as error:  # the policy does not take this pair
                self.sizes.pop((interval, slots), None)
                refused = error
        if refused and not self.sizes:
            raise refused
        return sorted(times, key=lambda pair: (times[pair], self.sizes[pair], pair))

    def _second_round(self, interval: int, slots: int) -> dict[str, int]:
        """The best way of the gradients and bytes of a copy for this pair."""
        short = varied(self.plan, layers=max(_SHORT, interval + 2), accumulation=2, checkpoint_interval=interval, weight_slots=slots)
        knobs: list[tuple[int, int, dict[str, int]]] = []
        for path, more in self.paths.items():
            if self._excess((interval, slots), path) == 0:
                setting = {"gradient_slots": path[0], "gradient_slabs": path[1]}
                time = makespan_ns(policy_library.lower(varied(short, chunk_bytes=ONE_COPY, **setting)), self.costs)
                knobs.append((time, sum(more), setting))
        fastest = min(time for time, _, _ in knobs)
        frugal = [entry for entry in knobs if entry[0] <= fastest * _TIE]
        kept = [min(frugal, key=lambda entry: entry[1]), min(knobs, key=lambda entry: entry[:2])]
        tried: list[tuple[int, int, int, dict[str, int]]] = []
        for (_, total, setting), chunk in itertools.product(kept, self.chunks):
            time = shared_makespan_ns(policy_library.lower(varied(short, chunk_bytes=chunk, **setting)), self.costs)
            tried.append((time, total, -chunk, {**setting, "chunk_bytes": chunk}))
        fastest = min(entry[0] for entry in tried)
        chosen = min((entry for entry in tried if entry[0] <= fastest * _TIE), key=lambda entry: entry[1:3])
        return {**chosen[3], "checkpoint_interval": interval, "weight_slots": slots}

    def _nearest_miss(self) -> Choice:
        """The plan above its limits by the fewest bytes, and what would help."""
        pair, path = min(itertools.product(self.sizes, self.paths), key=lambda candidate: (self._excess(*candidate), candidate))
        knobs = {"checkpoint_interval": pair[0], "weight_slots": pair[1], "gradient_slots": path[0], "gradient_slabs": path[1]}
        choice = assess(varied(self.plan, **knobs), self.costs)
        advice = self._smaller_batch(choice)
        return msgspec.structs.replace(choice, account=msgspec.structs.replace(choice.account, advice=advice)) if advice else choice

    def _smaller_batch(self, choice: Choice) -> str:
        """The largest half, quarter, ... of the batch with which this plan fits; empty where none does."""
        batch = choice.plan.workload.batch // 2
        while batch and choice.account.host_peak_bytes <= self.plan.host_limit_bytes:
            work = msgspec.structs.replace(self.plan.workload, batch=batch, accumulation=min(2, self.plan.workload.accumulation))
            plan = msgspec.structs.replace(choice.plan, workload=work, knobs=msgspec.structs.replace(choice.plan.knobs, chunk_bytes=ONE_COPY))
            if plan_account(plan, policy_library.outline(plan), self.costs).fits:
                return f"batch = {batch} would fit (with accumulation for the same tokens a step)"
            batch //= 2
        return ""
