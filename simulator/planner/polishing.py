"""Polishing: improves the result of a search by one change at a time, and gives up something else.

The steps of a search add only what fits in the memory that is left. So, with half a GiB more, they
may fill this memory with something that gains less than what they chose before. `making_room.py`
has the changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from megatrain.simulator.costs import CostModel
from megatrain.simulator.planner.assessment import Estimate, RunnerUp, without_unused_inputs
from megatrain.simulator.planner.filling import host_share
from megatrain.simulator.planner.making_room import MakingRoom
from megatrain.simulator.planner.ranking import WAITING_NEARBY, Ranking
from megatrain.simulator.schedule.plan import Knobs, Plan

# The fastest plan with another share of host updates is polished, too, unless the best plan is
# faster by this factor. It is larger if the best plan takes longer than its lower bound by
# `_WAITING`, because then another plan can gain more. With 1.02 alone, the step of a test case was
# predicted 12 % slower.
_MOST_RIVAL, _MOST_RIVAL_OF_WAITING = 1.02, 1.06
_WAITING = 1.03
_LEAST_POLISH = 1.002  # the best plan is changed if that makes it faster by this factor
# Plans near the best one that are lowered before the search goes on from the fastest of them.
_MOST_POLISHED = 12
_MORE_POLISHED = 4  # plans that are still lowered after a faster one was found
_POLISHING_OPS = 24_000  # the most ops of these plans together; one plan may have more


class Polishing(Ranking):
    """Improves plans that a search has found."""

    def __init__(self, plan: Plan, costs: CostModel, coarse: int, *, more: bool = False) -> None:
        """The arguments are those of `Ranking`."""
        super().__init__(plan, costs, coarse, more=more)
        self.by_share: dict[int, tuple[float, Plan]] = {}
        """Share of host updates -> the fastest plan found with it, and its step time in ns."""

    def keep(self, found: Iterable[tuple[float, Plan]]) -> None:
        """Adds plans, with their step times in ns, to `by_share`."""
        for time, plan in found:
            share = host_share(plan)
            if share not in self.by_share or time < self.by_share[share][0]:
                self.by_share[share] = (time, plan)

    def polished(self, best: Estimate) -> Estimate:
        """Returns `best`, which this search found, or a faster plan with `best` as its runner-up.

        Each step goes to a plan that differs from the last one by one change, for which the plan
        gives up something else (`MakingRoom`). Steps hardly change the share of host updates. So
        the fastest plan with each other share (`by_share`) is polished, too, if it is nearly as
        fast.
        """
        time = self.time(best.plan)
        waits = self.lower_bound.step_ns(best.plan) * _WAITING < time
        limit = time * (_MOST_RIVAL_OF_WAITING if waits else _MOST_RIVAL)
        starts = [best.plan]
        starts += [
            plan
            for share, (other, plan) in self.by_share.items()
            if share != host_share(best.plan) and other < limit
        ]
        ends = [self._polished(plan) for plan in starts]
        found = [self._estimate(end) for end in ends if end not in starts]
        return if_faster(min(found, key=lambda entry: entry.step_seconds, default=best), best)

    def _polished(self, plan: Plan) -> Plan:
        """Returns the plan at the end of the steps of `polished` from `plan`."""
        time, tried = self.time(plan), {plan.knobs}
        while better := self._faster_change(time, plan, tried):
            time, plan = better
        return plan

    def _faster_change(
        self, time: float, plan: Plan, tried: set[Knobs]
    ) -> tuple[float, Plan] | None:
        """Returns a plan of `MakingRoom` that is faster than `plan`, and its step time in ns.

        Plans are tried in the order of their expected times: the lower bound, and the waiting of
        a plan of the same kind. Returns None if none of the first is faster. `time` is the step
        time of `plan` in ns. Plans whose knobs are in `tried` are left out, and all others are
        added.
        """
        limit = time / _LEAST_POLISH
        # Larger copies gain at most what the large copies of the ranking would gain.
        largest = self.coarse if self._coarse(plan).step_ns < limit else 0
        room = MakingRoom(self.filling, self.plan)
        usual, _ = self.waiting_ns(plan)
        # Plans with the same slots, copies and host updates wait for about as long as each other.
        waiting = {_kind(plan): usual}

        def may_be_faster(other: Plan) -> bool:
            # With larger copies or more slots, ops may not wait at all. Other changes hardly alter
            # how long they wait.
            less = _piece_bytes(other) > _piece_bytes(plan) or _has_more_slots(other, plan)
            least = 0.0 if less else usual
            least = waiting.get(_kind(other), least)
            return self.lower_bound.step_ns(other) + least < limit

        def expected_ns(other: Plan) -> float:
            return self.lower_bound.step_ns(other) + waiting.get(_kind(other), usual)

        hopeful: list[Plan] = []
        for changed in room.changes(plan, largest):
            # Giving something up hardly lowers the bound.
            if changed.knobs in tried or not may_be_faster(changed):
                continue
            for other in map(without_unused_inputs, room.fitting(changed)):
                if other.knobs not in tried and may_be_faster(other):
                    tried.add(other.knobs)
                    hopeful.append(other)
        best = None
        count = min(max(_POLISHING_OPS // self._run(plan).ops, 1), _MOST_POLISHED)
        while count and (hopeful := list(filter(may_be_faster, hopeful))):
            other = min(hopeful, key=expected_ns)
            hopeful.remove(other)
            count -= 1
            found = self._run(other).bound_ns
            if found < limit and (found := self.time(other)) < limit:
                best = limit, _ = found, other
                count = min(count, _MORE_POLISHED)
            kind, waited = _kind(other), found - self.lower_bound.step_ns(other)
            waiting[kind] = min(waiting.get(kind, math.inf), WAITING_NEARBY * waited)
        return best


def if_faster(found: Estimate, best: Estimate) -> Estimate:
    """Returns `found` with `best` as its runner-up if it is faster, and otherwise `best`."""
    if found.step_seconds >= best.step_seconds:
        return best
    runner_up = RunnerUp(
        policy=best.plan.policy, knobs=best.plan.knobs, step_seconds=best.step_seconds
    )
    return msgspec.structs.replace(found, runner_up=runner_up)


def _kind(plan: Plan) -> tuple[object, ...]:
    """Returns what the waiting of the ops of `plan` depends on most: its slots, the bytes of a
    copy, the share of host updates, and the memory that holds layer inputs.
    """
    knobs = plan.knobs
    return (
        knobs.weight_slots,
        knobs.gradient_slots,
        knobs.state_slots,
        knobs.chunk_bytes,
        knobs.exchange_bytes,
        knobs.placement.offloaded_inputs,
        host_share(plan),
    )


def _has_more_slots(plan: Plan, other: Plan) -> bool:
    """Returns whether `plan` has more gradient or state slots than `other`."""
    return (
        plan.knobs.gradient_slots > other.knobs.gradient_slots
        or plan.knobs.state_slots > other.knobs.state_slots
    )


def _piece_bytes(plan: Plan) -> int:
    """Returns the bytes of a copy and of a collective of `plan` together."""
    return plan.knobs.chunk_bytes + plan.knobs.exchange_bytes
