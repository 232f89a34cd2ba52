"""step_range: the range in which the time of a step is expected."""

from __future__ import annotations

from megatrain.simulator import policies
from megatrain.simulator.costs import Calibrated, costs_of
from megatrain.simulator.costs.adjusted import WithinSpread
from megatrain.simulator.costs.several_gpus import OneOfSeveral
from megatrain.simulator.engine.evaluator import uncontended_makespan_ns
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.planner.assessment import InShortGroups, expected_ns, with_knobs
from megatrain.simulator.schedule.plan import Plan


def step_range(
    plan: Plan, seconds: float, hardware: HardwareSpec
) -> tuple[float, float] | tuple[None, None]:
    """Returns the lower and the upper end of the range of the step time, in seconds.

    Args:
        plan: The plan.
        seconds: Its predicted step time.
        hardware: The machine. If it was measured but without spreads, or if the plan is for several
            GPUs and this number was not measured together, or for several hosts, the range is not
            known, and two times None are returned.
    """
    table = hardware.costs
    if table is None:
        return seconds * (1 - hardware.uncertainty), seconds * (1 + hardware.uncertainty)
    if plan.hosts > 1:
        return None, None
    # The relative range is computed for two groups of micro-batches and used for any number.
    few, group = with_knobs(plan, groups=2), plan.knobs.micro_batch_group
    costs = costs_of(few, hardware)
    # The spreads of one GPU say nothing about collectives, about GPUs that wait for each other, or
    # about the memory that their links share.
    one = costs.calibration if isinstance(costs, OneOfSeveral) else costs
    if not (isinstance(costs, Calibrated | OneOfSeveral) and isinstance(one, Calibrated)):
        return None, None
    if not table.spread:
        return None, None
    schedule = policies.lower(few)
    least, most = (
        uncontended_makespan_ns(
            schedule, InShortGroups(WithinSpread(costs, hardware.uncertainty, longer=longer), group)
        )
        for longer in (False, True)
    )
    usual = expected_ns(schedule, InShortGroups(costs, group), uncontended_makespan_ns)
    return seconds * least / usual, seconds * most / usual
