"""Times plans and ranks them, as far as a search needs it.

A plan is timed with at most two groups of micro-batches (`TimedPlan`). Candidates are ranked with
few large copies, because these are simulated quickly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from megatrain.simulator.costs import CostModel
from megatrain.simulator.costs.remembered import Remembered, costs_sizes
from megatrain.simulator.planner.assessment import (
    Estimate,
    InShortGroups,
    schedule_to_time,
    step_seconds,
    with_knobs,
    without_unused_inputs,
)
from megatrain.simulator.planner.filling import Filling
from megatrain.simulator.planner.known_plans import TimedPlan, known_plans
from megatrain.simulator.schedule.plan import Plan

TIE = 1.001
"""Plans whose times differ by less than this factor count as equally fast."""
FINALISTS = 2
"""Plans that a ranking returns, at most."""
WAITING_NEARBY = 0.5
"""A neighbour is simulated if it may be faster with this share of the waiting of the plan. With a
share of 0.75, a drawn step was predicted 3.7 % slower."""
# Simulated plans in a row that may be no better than the best before a ranking ends. All plans that
# remain have higher lower bounds.
_PATIENCE = 8
# With more ops than this, larger copies are tried instead of smaller ones. Smaller copies gain a
# few per cent, but a simulation of so many ops takes 0.1 s.
_MANY_OPS = 3000
_MANY_COARSE_OPS = 1000  # like `_MANY_OPS`, for a plan with few large copies
# A plan without larger copies is tried if it is faster even with this share of the waiting and
# contention of the best plan: of the time by which that plan's step takes longer than its bound.
_STILL_WAITING = 0.8


class Ranking:
    """The times of the plans of one search, and rankings by them."""

    def __init__(self, plan: Plan, costs: CostModel, coarse: int, *, more: bool = False) -> None:
        """Prepares to time plans of the model and workload of `plan`.

        Args:
            plan: The plan with which a search begins.
            costs: The machine's cost model.
            coarse: Bytes of a copy with which plans are ranked.
            more: An argument of the search's `Filling`.
        """
        self.plan, self.costs, self.coarse, self._more = plan, costs, coarse, more
        group = plan.knobs.micro_batch_group
        timing = InShortGroups(costs, group) if group > 2 else costs
        self.timing = Remembered(timing) if costs_sizes(timing) else timing
        """The costs of shortened plans."""
        self._known = known_plans(plan, costs)
        self.filling = Filling(plan, costs, self._known.accounts, more=more)
        self.lower_bound, self._runs = self._known.lower_bound, self._known.runs

    def time(self, plan: Plan) -> float:
        """Returns the simulated step time of `plan` in ns.

        Two groups of micro-batches are simulated. Each further group adds the time of the second
        without contention. Results are cached.
        """
        return self._run(plan).step_ns

    def waiting_ns(self, plan: Plan, share: float = _STILL_WAITING) -> tuple[float, float]:
        """Returns `share` of the time, in ns, by which a step of `plan` takes longer than its lower
        bound, and than the time of the evaluator, because ops wait for slots and slow each other.
        """
        run = self._run(plan)
        bounds = self.lower_bound.step_ns(plan), run.bound_ns
        return share * (run.step_ns - bounds[0]), share * (run.step_ns - bounds[1])

    def _run(self, plan: Plan) -> TimedPlan:
        """Returns the plan, lowered with at most two groups of micro-batches. Results are
        cached.
        """
        plan = without_unused_inputs(plan)
        if plan.knobs not in self._runs:
            schedule = schedule_to_time(with_knobs(plan, groups=2), self.timing)
            group = plan.knobs.micro_batch_group
            more = plan.micro_batches // group - 2
            self._runs[plan.knobs] = TimedPlan(schedule, self.timing, min(group, 2), more)
        return self._runs[plan.knobs]

    def _coarse(self, candidate: Plan) -> TimedPlan:
        """Returns the candidate, lowered with few large copies, even if it does not fit that way.

        Candidates are ranked with these copies because they are simulated quickly, and because all
        candidates then have copies of the same size.
        """
        return self._run(with_knobs(candidate, chunk_bytes=self.coarse))

    def _estimate(self, plan: Plan) -> Estimate:
        """Returns the memory of `plan`, and the time of a step with all its micro-batches."""
        run = self._run(plan)
        if with_knobs(plan, groups=2) == plan:  # the run has all micro-batches
            seconds = (run.step_ns + self.costs.step_overhead_ns) / 1e9
        else:
            seconds = step_seconds(schedule_to_time(plan, self.costs), self.costs)
        return Estimate(
            plan=plan, account=self.filling.account(plan), step_seconds=seconds, streams=run.streams
        )

    def _ranked(
        self,
        candidates: Sequence[Plan],
        limit_ns: float = math.inf,
        waiting: tuple[float, float] = (0.0, 0.0),
    ) -> list[Plan]:
        """Returns the fastest two of `candidates`, the fastest first.

        They are timed with few large copies. Candidates that then take more than `limit_ns` are
        left out. `waiting` is the time in ns by which a step is expected to take longer than its
        lower bound, and than the time of the evaluator. The ranking is a best-first search:

        1. Put all candidates into a priority queue, ordered by a lower bound of their step time.
        2. Take the candidate with the lowest bound. Replace its bound by the next tighter one, and
           put it back. The bounds are `LowerBound.compute_ns`, `LowerBound.step_ns`, and the time
           of the evaluator, for which the plan is lowered. `waiting` is added to the last two.
        3. If it already has the tightest bound, simulate it and compare it with the best two.
        4. Stop if the lowest bound is above the second-best time, or if several simulated
           candidates in a row were no better.
        """
        bounds: list[tuple[float, int, int]] = [
            (self.lower_bound.compute_ns(other), 0, index) for index, other in enumerate(candidates)
        ]
        heapq.heapify(bounds)
        best: list[tuple[float, int]] = []
        without_gain = 0
        while (
            bounds
            and bounds[0][0] <= (best[-1][0] if len(best) == FINALISTS else limit_ns)
            and without_gain < _PATIENCE
        ):
            bound, tightness, index = heapq.heappop(bounds)
            if tightness == 0:
                coarse = with_knobs(candidates[index], chunk_bytes=self.coarse)
                bound = max(bound, self.lower_bound.step_ns(coarse) + waiting[0])
                heapq.heappush(bounds, (bound, 1, index))
                continue
            run = self._coarse(candidates[index])
            if tightness == 1:
                heapq.heappush(bounds, (run.bound_ns + waiting[1], 2, index))
                continue
            better = (
                sorted([*best, (run.step_ns, index)])[:FINALISTS]
                if run.step_ns <= limit_ns
                else best
            )
            without_gain = without_gain + 1 if better == best else 0
            best = better
        return [candidates[index] for _, index in best]

    def faster(self, time: float, plan: Plan, others: Sequence[Plan]) -> tuple[float, Plan] | None:
        """Returns the fastest of `others` and its time in ns, or None if none is faster than
        `plan`, whose step takes `time` ns.

        The first two plans of the ranking are timed with their own size of copies. If `plan` has
        many ops, only the first is.
        """
        if not others:
            return None
        waiting = self.waiting_ns(with_knobs(plan, chunk_bytes=self.coarse), WAITING_NEARBY)
        ranked = self._ranked(others, TIE * self._coarse(plan).step_ns, waiting)[
            : 1 if self._has_many_ops(plan) else FINALISTS
        ]
        times = [(self.time(other), other) for other in ranked]
        fastest = min(times, key=lambda entry: entry[0], default=None)
        return fastest if fastest and fastest[0] < time else None

    def _is_faster(self, plan: Plan, time: float) -> bool:
        """Returns whether a step of `plan` takes less than `time` ns, by more than `TIE`.

        The plan is simulated only if its lower bound is low enough.
        """
        return self.lower_bound.step_ns(plan) * TIE < time and self.time(plan) * TIE < time

    def _has_many_ops(self, plan: Plan) -> bool:
        """Returns whether the plan has more than `_MANY_COARSE_OPS` ops with few large copies."""
        return self._coarse(plan).ops > _MANY_COARSE_OPS

    def _has_many_small_ops(self, plan: Plan) -> bool:
        """Returns whether the plan, with all its micro-batches, has more than `_MANY_OPS` ops."""
        # The run has at most two groups of micro-batches. Often they alone have enough ops.
        return self._run(plan).ops > _MANY_OPS or (
            plan.micro_batches > 2
            and len(schedule_to_time(plan, self.costs).compiled.lanes) > _MANY_OPS
        )
