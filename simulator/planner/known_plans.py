"""Known plans: the memory and the times of plans that searches have looked at."""

from __future__ import annotations

import functools
from collections import deque

from megatrain.simulator import policies
from megatrain.simulator.costs import CostModel
from megatrain.simulator.engine.evaluator import two_groups_ns
from megatrain.simulator.memory.account import Account
from megatrain.simulator.planner.assessment import expected_ns, streams
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.schedule import Schedule
from megatrain.simulator.schedule.plan import Knobs, Plan


class TimedPlan:
    """A lowered plan with at most two groups of micro-batches, and its predicted times.

    Each further group of the step adds the time of the second group without contention.
    """

    def __init__(self, schedule: Schedule, costs: CostModel, group: int, more: int) -> None:
        """`group` is the number of micro-batches in a group of `schedule`. `more` is the number of
        groups that a step has in addition to two.
        """
        self._schedule, self._costs, self._group, self._more = schedule, costs, group, more
        self.ops = len(schedule.compiled.lanes)
        """The number of ops."""
        self.streams = streams(schedule)
        """Whether anything is copied between host and device."""

    @functools.cached_property
    def _alone_ns(self) -> tuple[int, int]:
        """The time of the schedule and the time of a further group, both in ns and without
        contention.
        """
        return two_groups_ns(self._schedule, self._costs, self._group)

    @functools.cached_property
    def _further_ns(self) -> int:
        """The time in ns that the groups beyond the second add.

        Without contention, because the contention of the other two groups would be too much for
        them: most ops that slow compute down are updates, which run once per step, at its ends.
        """
        return max(self._more, 0) * self._alone_ns[1]

    @functools.cached_property
    def bound_ns(self) -> float:
        """Step time without contention, in ns. It is a lower bound of `step_ns`."""
        return self._alone_ns[0] + self._further_ns

    @functools.cached_property
    def step_ns(self) -> float:
        """Expected step time in ns, from the engine. The first access runs the simulation."""
        return expected_ns(self._schedule, self._costs) + self._further_ns


class KnownPlans:
    """What is known about the plans of one policy, model and workload on one machine.

    Each result is stored with all that it depends on, so searches share it. They differ in the
    limits of memory, the size of micro-batch groups, and the ways to fill the device.
    """

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        """Only `rebuild_outputs` of the knobs of `plan` is used, and not its limits."""
        self.plan, self.costs, self.policy = plan, costs, policies.find(plan.policy)
        self.lower_bound = LowerBound(plan, costs)
        self.accounts: dict[tuple[Knobs, int, int], Account] = {}
        """Knobs and limits of a plan -> its memory."""
        self.runs: dict[Knobs, TimedPlan] = {}
        """Knobs of a plan -> its times."""
        self.usual: dict[tuple[Plan, bool], list[Plan]] = {}
        """(plan from which a search begins, whether it fills in additional ways) -> its usual
        candidates."""


_recent: deque[KnownPlans] = deque(maxlen=4)
"""The results of the last searches. A command searches the same plans several times: to choose a
loss chunk, to choose the plan, and for advice."""


def known_plans(plan: Plan, costs: CostModel) -> KnownPlans:
    """Returns the results for plans like `plan` with exactly this policy and cost model, and the
    same `rebuild_outputs`, which changes the duration of ops.
    """
    alike = Plan(
        policy=plan.policy,
        gpus=plan.gpus,
        hosts=plan.hosts,
        hardware="",
        source="",
        device_limit_bytes=1,
        host_limit_bytes=1,
        model=plan.model,
        workload=plan.workload,
        knobs=Knobs(rebuild_outputs=plan.knobs.rebuild_outputs),
    )
    policy = policies.find(plan.policy)
    for known in list(_recent):
        if known.costs is costs and known.policy is policy and known.plan == alike:
            return known
    known = KnownPlans(alike, costs)
    _recent.append(known)
    return known
