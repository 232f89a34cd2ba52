"""Outlook: tells whether any plan fits, without searching for the fastest one.

A search spends most of its time on comparing step times, but whether a plan fits depends on memory
alone. So the outlook takes a fraction of the time of a search:

* If any plan fits, the outlook is one that fits, with a lower bound of every plan's step time.
* If no plan fits, the outlook is the plan that `candidates` would report, with its memory.

`first_plan` takes little more time, and returns a plan that is probably a few percent slower than
the best.
"""

from __future__ import annotations

import math

from megatrain.simulator import policies as policy_library
from megatrain.simulator.costs import CostModel, cost_model
from megatrain.simulator.engine.evaluator import LowerBounds
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import Account
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import (
    Choice,
    assess,
    group_sizes,
    plan_account,
    with_knobs,
)
from megatrain.simulator.planner.capacity import fitting
from megatrain.simulator.planner.lower_bound import LowerBound
from megatrain.simulator.planner.placement_search import PlacementSearch
from megatrain.simulator.planner.search import plans_of, rank
from megatrain.simulator.planner.slot_search import SlotSearch
from megatrain.simulator.schedule.plan import Placement, Plan


def outlook(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    device_limit: int | None = None,
    host_limit: int | None = None,
    policies: list[str] | None = None,
) -> Choice | None:
    """Returns a choice that fits if the first of `candidates` fits, and otherwise that candidate.

    The arguments are those of `candidates`. Only these fields of the result are valid:

    * `feasible`.
    * `step_seconds`, which is a lower bound for all plans that fit.
    * If the result is not feasible, `plan` without its digest, and `account` without its advice.

    Returns None if only a search can tell whether a plan fits, and if a policy is only for
    prediction. Raises UserError as `candidates` does.
    """
    plans = plans_of(
        model,
        hardware,
        workload,
        device_limit=device_limit,
        host_limit=host_limit,
        policies=policies,
    )
    names = [plan.policy for plan in plans]
    if any(policy_library.find(name).prediction_only for name in names):
        return None
    costs = cost_model(hardware, model, workload)
    if footprint := fitting(plans[0], hardware, costs, names):
        return _choice(footprint.plan, footprint.account(), costs)
    misses = []
    for plan in plans:
        if policy_library.find(plan.policy).obeys_everything:
            search: PlacementSearch | SlotSearch = PlacementSearch(plan, costs)
            possible = any(
                PlacementSearch(with_knobs(plan, micro_batch_group=size), costs).may_fit()
                for size in group_sizes(plan)
            )
        else:
            search = SlotSearch(plan, costs)
            possible = search.may_fit()
        if possible:
            return None
        missed = search.nearest_miss()
        memory = plan_account(missed, policy_library.outline(missed), costs)
        misses.append(_choice(missed, memory, costs))
    return min(misses, key=rank)


def first_plan(
    model: ModelSpec,
    hardware: HardwareSpec,
    workload: Workload,
    *,
    device_limit: int | None = None,
    host_limit: int | None = None,
    policies: list[str] | None = None,
) -> Choice | None:
    """Returns a plan that fits, which was chosen by lower bounds of step times. Only this plan is
    simulated.

    Returns None if no such plan was found, and if no policy obeys every field of the placement. The
    arguments are those of `candidates`. Raises UserError as `candidates` does.
    """
    plans = plans_of(
        model,
        hardware,
        workload,
        device_limit=device_limit,
        host_limit=host_limit,
        policies=policies,
    )
    costs = cost_model(hardware, model, workload)
    found = [
        entry
        for plan in plans
        if policy_library.find(plan.policy).obeys_everything
        for size in group_sizes(plan)
        if (entry := PlacementSearch(with_knobs(plan, micro_batch_group=size), costs).likely())
    ]
    if not found:
        return None
    return assess(min(found, key=lambda entry: entry[0])[1], costs)


def _choice(plan: Plan, memory: Account, costs: CostModel) -> Choice:
    """Returns `plan` with `memory`. Its step time is the compute time without any recompute."""
    saved = with_knobs(plan, rebuild_outputs=0, placement=Placement(saved_activations="all"))
    least = LowerBound(saved, costs).compute_ns(saved)
    return Choice(
        plan=plan,
        account=memory,
        streams=False,
        bounds=LowerBounds(lanes_ns={}, critical_path_ns=0, lower_bound_ns=least, sum_ns=least),
        step_seconds=math.nextafter(least / 1e9, 0),
    )
