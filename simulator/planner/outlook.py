"""Outlook: what is known of the best plan before it is searched.

Whether a plan fits follows from memory alone, and a search takes most of its time to compare step
times. So the outlook is known in a fraction of that time:

* If a plan fits, the outlook is one that does, with a lower bound of every plan's step time.
* If none fits, the outlook is the plan that `candidates` reports, with its memory.
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
from megatrain.simulator.planner.assessment import Choice, group_sizes, plan_account, with_knobs
from megatrain.simulator.planner.capacity import usable
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
    """Returns a choice that fits if the first of `candidates` does, and otherwise its plan.

    The arguments are those of `candidates`. Of the result only this is right:

    * `feasible`, and `step_seconds`, which is at most that of every plan that fits;
    * if it is not feasible, `plan` without its digest, and `account` without its advice.

    Returns None if only a search can tell, and for the policies of other systems.

    Raises UserError as `candidates` does.
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
    for footprint in usable(plans[0], hardware, costs, names):
        if (memory := footprint.account()).fits:
            return _choice(footprint.plan, memory, costs)
    found = []
    for plan in plans:
        if policy_library.find(plan.policy).places_state:
            search: PlacementSearch | SlotSearch = PlacementSearch(plan, costs)
            grouped = (with_knobs(plan, micro_batch_group=size) for size in group_sizes(plan))
            possible = any(PlacementSearch(each, costs).may_fit() for each in grouped)
        else:
            search = SlotSearch(plan, costs)
            possible = search.may_fit()
        if possible:
            return None
        missed = search.nearest_miss()
        memory = plan_account(missed, policy_library.outline(missed), costs)
        found.append(_choice(missed, memory, costs))
    return min(found, key=rank)


def _choice(plan: Plan, memory: Account, costs: CostModel) -> Choice:
    """Returns `plan` with `memory`, and with the time of all layers without any recompute."""
    saved = with_knobs(plan, placement=Placement(saved_activations="all"))
    least = LowerBound(saved, costs).compute_ns(saved)
    return Choice(
        plan=plan,
        account=memory,
        streams=False,
        bounds=LowerBounds(lanes_ns={}, critical_path_ns=0, lower_bound_ns=least, sum_ns=least),
        step_seconds=math.nextafter(least / 1e9, 0),
    )
