"""Searches the knobs of a policy that does not place state: checkpoint interval, weight slots,
gradient slots, gradient staging, and bytes of a copy. Then it fills the memory that is left with
the fields of the placement that the policy obeys.

The search has five rounds. Each uses the smallest schedule that can distinguish its candidates:

1. Try every pair of a checkpoint interval and a number of weight slots. Each is lowered for the
   whole model, with one copy per layer. The evaluator predicts its step time without contention.
   Pairs that cannot fit in memory are left out.
2. For each pair, the fastest first, take a model of a few layers. Choose the number of gradient
   slots and staging buffers with the evaluator, then the bytes of a copy with the engine.
3. Simulate the complete plans with the engine, with contention, until two that fit are found. The
   fastest wins. If both are within 0.1 %, the one that needs fewer bytes wins.
4. Give the winner the next larger number of weight slots as long as that is faster by more than
   0.1 %. Copies that vary in time, because of contention, need more slots than round 1 shows.
5. For each field of the placement that the policy obeys, in the order of `FILLED`, name as many
   layers as fit. Keep the plan if it is faster by more than 0.1 %. The other plan of round 3 is
   filled, too.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import math

import msgspec

from megatrain.simulator import policies as policy_library
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.costs import CostModel
from megatrain.simulator.engine.discrete_event import makespan_ns
from megatrain.simulator.engine.evaluator import uncontended_makespan_ns
from megatrain.simulator.planner.assessment import (
    Choice,
    assess,
    memory_taken,
    plan_account,
    schedule_to_time,
    with_knobs,
)
from megatrain.simulator.planner.filling import ranges
from megatrain.simulator.schedule.plan import Plan

WEIGHT_SLOTS = (1, 2, 3, 4, 8)
"""The numbers of weight slots that a search tries."""
GRADIENT_SLOTS = (1, 2, 3)
"""The numbers of gradient slots that a search tries."""
GRADIENT_STAGING = (0, 1, 2, 4)
"""The numbers of staging buffers that a search tries."""
CHUNK_BYTES = (16 * 2**20, 64 * 2**20, 256 * 2**20)
"""The bytes of a copy that a search tries."""
FILLED = ("saved_activations", "saved_attention", "weights", "gradients", "master_low", "moments")
"""The fields of the placement that a search fills."""
ONE_COPY = 2**40
"""Bytes of a copy that are enough to copy every layer in one piece."""
_SHORT = 6  # the fewest decoder layers of the model of round 2
_TIE = 1.001  # plans whose times differ by less than this factor count as equally fast
_PAIRS = 2  # how many plans that fit round 3 compares


def intervals(layers: int) -> tuple[int, ...]:
    """Returns the checkpoint intervals to try for a model of `layers` decoder layers.

    They are the powers of two up to 16 and half of the layers, and the square root of `layers`.

    >>> intervals(48)
    (1, 2, 4, 7, 8, 16)
    """
    powers = [2**power for power in range(5) if 2**power <= max(layers // 2, 1)]
    return tuple(sorted({*powers, max(math.isqrt(layers - 1) + 1, 1)} if layers > 2 else powers))


class SlotSearch:
    """Searches the knobs of one policy for one model, workload and machine.

    Raises UserError if the policy accepts none of the values of a knob.
    """

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self.plan, self.costs = plan, costs
        policy = policy_library.find(plan.policy)
        self.knobs, self.placements = policy.knobs, policy.placements
        self.tiny = self._shortest()
        self.weight_slots = self._allowed("weight_slots", WEIGHT_SLOTS)
        self.least = {"weight_slots": self.weight_slots[0]}
        self.gradient_slots = self._allowed("gradient_slots", GRADIENT_SLOTS)
        self.gradient_staging = self._allowed("gradient_staging", GRADIENT_STAGING)
        self.chunks = self._allowed("chunk_bytes", CHUNK_BYTES)
        self.paths = self._path_bytes()
        self.sizes: dict[tuple[int, int], tuple[int, int]] = {}
        """(interval, weight slots) -> bytes on (device, host), with the first of `paths`."""

    def _shortest(self) -> Plan:
        """Returns the plan with two decoder layers, or with the fewest with which the policy works.

        If it works with none, for example because it refuses these knobs, all layers are kept. So
        only errors of the user's own model are reported.
        """
        plans = [
            with_knobs(self.plan, layers=layers, groups=2, chunk_bytes=ONE_COPY)
            for layers in (2, 3, 4, _SHORT, self.plan.model.layers)
        ]
        for plan in plans:
            with contextlib.suppress(UserError):  # also for any other error of the policy
                policy_library.lower_uncached(plan)
                return plan
        return plans[-1]

    def _allowed(self, knob: str, values: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the values of `knob` that the policy accepts and that make a difference.

        If all accepted values lead to the same schedule, only one value is returned, preferably the
        default. Raises UserError if the policy accepts no value.
        """
        if knob not in self.knobs:
            return (getattr(self.plan.knobs, knob),)
        programs: dict[int, str] = {}
        for value in values:
            try:
                programs[value] = policy_library.lower_uncached(
                    with_knobs(self.tiny, **{**getattr(self, "least", {}), knob: value})
                ).digest
            except UserError as error:
                refused = error
        if not programs:
            raise refused
        default = getattr(self.plan.knobs, knob)
        if len(set(programs.values())) == 1:
            return (default if default in programs else next(iter(programs)),)
        return tuple(programs)

    def _path_bytes(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Returns the bytes on (device, host) for each pair of gradient slots and staging buffers,
        relative to the first pair.

        They are computed for a model of few layers, because the size of a slot does not depend on
        the number of layers.
        """
        peaks: dict[tuple[int, int], tuple[int, int]] = {}
        for slots, staging in itertools.product(self.gradient_slots, self.gradient_staging):
            plan = with_knobs(
                self.tiny, **self.least, gradient_slots=slots, gradient_staging=staging
            )
            memory = plan_account(plan, policy_library.outline(plan), self.costs)
            peaks[slots, staging] = (memory.device_peak_bytes, memory.host_peak_bytes)
        device, host = next(iter(peaks.values()))
        return {path: (sizes[0] - device, sizes[1] - host) for path, sizes in peaks.items()}

    def _excess(self, pair: tuple[int, int], path: tuple[int, int]) -> int:
        """Returns by how many bytes a plan exceeds its limits, added up for device and host.

        `pair` is its checkpoint interval and number of weight slots. `path` is its number of
        gradient slots and of staging buffers.
        """
        device, host = (
            size + more for size, more in zip(self.sizes[pair], self.paths[path], strict=True)
        )
        return max(device - self.plan.device_limit_bytes, 0) + max(
            host - self.plan.host_limit_bytes, 0
        )

    def best(self) -> Choice:
        """Returns the fastest plan that fits. If none fits, returns the plan that exceeds its
        limits by the fewest bytes.
        """
        finals: dict[tuple[int, int], Choice] = {}
        pairs = self._first_round()
        for pair in pairs:
            choice = self._complete(*pair)
            if choice.feasible:
                finals[pair] = choice
            if len(finals) == _PAIRS:
                break
        if not finals:
            return self._missed()
        fastest = min(choice.step_seconds for choice in finals.values())
        best = min(
            (choice for choice in finals.values() if choice.step_seconds <= fastest * _TIE),
            key=memory_taken,
        )
        interval = best.plan.knobs.checkpoint_interval
        for slots in self.weight_slots:
            pair = (interval, slots)
            # A pair that the first round left out does not fit.
            if slots > best.plan.knobs.weight_slots and pair in pairs:
                choice = finals.get(pair) or self._complete(*pair)
                if not choice.feasible or choice.step_seconds * _TIE >= best.step_seconds:
                    break
                best = choice
        found = self.filled(best)
        for other in finals.values():
            if other is not best:
                choice = self.filled(other)
                if choice.step_seconds * _TIE < found.step_seconds:
                    found = choice
        return found

    def filled(self, best: Choice) -> Choice:
        """Returns `best`, or a faster plan with more data of layers in the memory that is left.

        A plan that does not fit is returned unchanged.
        """
        if not best.feasible:
            return best
        for name in (name for name in FILLED if name in self.placements):
            if (plan := self._most_placed(best.plan, name)) is not None:
                choice = assess(plan, self.costs)
                if choice.feasible and choice.step_seconds * _TIE < best.step_seconds:
                    best = choice
        return best

    def _most_placed(self, plan: Plan, name: str) -> Plan | None:
        """Returns `plan` with as many layers as fit in the field `name` of its placement, or None
        if no layer fits or if the policy refuses it.

        Saved data belongs to the last decoder layers, which the backward pass needs first. State
        belongs to the first layers, whose updates are due first.
        """
        saves = name.startswith("saved")
        layers = [layer.name for layer in plan.model.decoders] if saves else list(plan.model.stack)

        def placed(count: int) -> Plan:
            chosen = layers[len(layers) - count :] if saves else layers[:count]
            placement = msgspec.structs.replace(
                plan.knobs.placement, **{name: ranges(layers, {*chosen})}
            )
            return with_knobs(plan, placement=placement)

        def too_much(count: int) -> bool:
            each = placed(count)
            return not plan_account(each, policy_library.outline(each), self.costs).fits

        try:
            count = bisect.bisect_left(range(1, len(layers) + 1), True, key=too_much)
        except UserError:
            return None
        return placed(count) if count else None

    def _complete(self, interval: int, slots: int) -> Choice:
        """Returns the complete plan with the best other knobs for these two, and its prediction."""
        return assess(with_knobs(self.plan, **self._second_round(interval, slots)), self.costs)

    def _first_round(self) -> list[tuple[int, int]]:
        """Returns the pairs of checkpoint interval and weight slots that can fit, fastest first.

        They are timed with the most gradient slots and staging buffers. A pair is kept if it fits
        with any number of these. Raises UserError if the policy accepts no pair.
        """
        times: dict[tuple[int, int], int] = {}
        refused: UserError | None = None
        most = dict(zip(("gradient_slots", "gradient_staging"), list(self.paths)[-1], strict=True))
        lengths = (
            intervals(self.plan.model.layers)
            if "checkpoint_interval" in self.knobs
            else (self.plan.knobs.checkpoint_interval,)
        )
        for interval, slots in itertools.product(lengths, self.weight_slots):
            plan = with_knobs(
                self.plan,
                groups=2,
                chunk_bytes=ONE_COPY,
                checkpoint_interval=interval,
                weight_slots=slots,
                **most,
            )
            try:
                memory = plan_account(plan, policy_library.outline(plan), self.costs)
                more = self.paths[most["gradient_slots"], most["gradient_staging"]]
                self.sizes[interval, slots] = (
                    memory.device_peak_bytes - more[0],
                    memory.host_peak_bytes - more[1],
                )
                if any(self._excess((interval, slots), path) == 0 for path in self.paths):
                    times[interval, slots] = uncontended_makespan_ns(
                        schedule_to_time(plan, self.costs), self.costs
                    )
            except UserError as error:  # the policy does not accept this pair
                self.sizes.pop((interval, slots), None)
                refused = error
        if refused and not self.sizes:
            raise refused
        return sorted(times, key=lambda pair: (times[pair], self.sizes[pair], pair))

    def _second_round(self, interval: int, slots: int) -> dict[str, int]:
        """Returns `interval` and `slots` with the best gradient slots, staging buffers and bytes of
        a copy for them, as values of knobs.
        """
        short = with_knobs(
            self.plan,
            layers=max(_SHORT, interval + 2, self.tiny.model.layers),
            groups=2,
            checkpoint_interval=interval,
            weight_slots=slots,
        )
        knobs: list[tuple[int, int, dict[str, int]]] = []
        for path, more in self.paths.items():
            if self._excess((interval, slots), path) == 0:
                setting = {"gradient_slots": path[0], "gradient_staging": path[1]}
                time = uncontended_makespan_ns(
                    schedule_to_time(
                        with_knobs(short, chunk_bytes=ONE_COPY, **setting), self.costs
                    ),
                    self.costs,
                )
                knobs.append((time, sum(more), setting))
        fastest = min(time for time, _, _ in knobs)
        near_best = [entry for entry in knobs if entry[0] <= fastest * _TIE]
        kept = [min(near_best, key=lambda entry: entry[1]), min(knobs, key=lambda entry: entry[:2])]
        tried: list[tuple[int, int, int, dict[str, int]]] = []
        for (_, total, setting), chunk in itertools.product(kept, self.chunks):
            time = makespan_ns(
                schedule_to_time(with_knobs(short, chunk_bytes=chunk, **setting), self.costs),
                self.costs,
            )
            tried.append((time, total, -chunk, {**setting, "chunk_bytes": chunk}))
        fastest = min(entry[0] for entry in tried)
        chosen = min(
            (entry for entry in tried if entry[0] <= fastest * _TIE), key=lambda entry: entry[1:3]
        )
        return {**chosen[3], "checkpoint_interval": interval, "weight_slots": slots}

    def may_fit(self) -> bool:
        """Returns False only if `best` finds no plan that fits."""
        return bool(self._first_round())

    def nearest_miss(self) -> Plan:
        """Returns the plan that exceeds its limits by the fewest bytes. Call `may_fit` or `best`
        first, which compute the sizes.
        """
        pair, path = min(
            itertools.product(self.sizes, self.paths),
            key=lambda candidate: (self._excess(*candidate), candidate),
        )
        knobs = {
            "checkpoint_interval": pair[0],
            "weight_slots": pair[1],
            "gradient_slots": path[0],
            "gradient_staging": path[1],
        }
        return with_knobs(self.plan, **knobs)

    def _missed(self) -> Choice:
        """Returns the nearest miss. Its advice names a smaller batch if that would fit."""
        choice = assess(self.nearest_miss(), self.costs)
        if choice.feasible:  # with smaller copies than in the first round
            return self.filled(choice)
        advice = self._smaller_batch(choice)
        return (
            msgspec.structs.replace(
                choice, account=msgspec.structs.replace(choice.account, advice=advice)
            )
            if advice
            else choice
        )

    def _smaller_batch(self, choice: Choice) -> str:
        """Returns advice to use a smaller batch with which this plan fits.

        The batch is halved until the plan fits. Returns an empty text if halving does not help, or
        if the plan exceeds the host's memory.
        """
        batch = choice.plan.workload.batch // 2
        while batch and choice.account.host_peak_bytes <= self.plan.host_limit_bytes:
            work = msgspec.structs.replace(
                self.plan.workload,
                batch=batch,
                accumulation=min(2, self.plan.workload.accumulation),
            )
            plan = msgspec.structs.replace(
                choice.plan,
                workload=work,
                knobs=msgspec.structs.replace(choice.plan.knobs, chunk_bytes=ONE_COPY),
            )
            if plan_account(plan, policy_library.outline(plan), self.costs).fits:
                return f"batch = {batch} would fit (with accumulation for the same tokens per step)"
            batch //= 2
        return ""
