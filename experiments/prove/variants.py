"""Variants: other knobs for the best plan of a policy, so that the planner's choice has something to be compared with."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from megatrain.simulator.assessment import varied
from megatrain.simulator.placing import ranges
from megatrain.simulator.plan import Placement, Plan


def _placed(plan: Plan, **classes: str) -> Plan:
    return varied(plan, placement=msgspec.structs.replace(plan.knobs.placement, **classes))


def _every_other(plan: Plan) -> str:
    stack = list(plan.model.stack)
    streamed = [layer for layer in stack if layer not in plan.placed("weights")]
    return ranges(stack, set(streamed[::2]))


VARIANTS: dict[str, Callable[[Plan], Plan]] = {
    "one slot": lambda plan: varied(plan, weight_slots=1, gradient_slots=1, state_slots=1),
    "large copies": lambda plan: varied(plan, chunk_bytes=4 * plan.knobs.chunk_bytes),
    "small copies": lambda plan: varied(plan, chunk_bytes=max(plan.knobs.chunk_bytes // 8, 2**20)),
    "nothing stays": lambda plan: varied(plan, placement=Placement(parked=plan.knobs.placement.parked)),
    "host updates": lambda plan: varied(plan, placement=Placement(host_updated="all", parked=plan.knobs.placement.parked)),
    "host updates half": lambda plan: _placed(plan, host_updated=_every_other(plan)),
    "recompute all": lambda plan: _placed(plan, stored="", attention=""),
    "lean state": lambda plan: varied(plan, state_slots=1, weight_slots=3),
}
"""Only knobs: the arithmetic is the same. One that does not fit under the case's cap is left out."""
