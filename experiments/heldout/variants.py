"""Variants: a policy's best plan with changed knobs. The planner's choice is compared with them."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.simulator.planner.assessment import with_knobs
from megatrain.simulator.planner.filling import ranges
from megatrain.simulator.schedule.plan import Placement, Plan


def _halved(plan: Plan) -> Plan:
    """Returns the plan with the first half of its resident layers, for each class of data."""
    stack, fields = list(plan.model.stack), Placement.__struct_fields__
    chosen = {name: [layer for layer in stack if layer in plan.placed(name)] for name in fields}
    return with_knobs(
        plan,
        placement=Placement(
            **{
                name: ranges(stack, set(layers[: len(layers) // 2]))
                for name, layers in chosen.items()
            }
        ),
    )


VARIANTS: dict[str, Callable[[Plan], Plan]] = {
    "nothing stays": lambda plan: with_knobs(plan, placement=Placement()),
    "offloaded_inputs": lambda plan: with_knobs(plan, placement=Placement(offloaded_inputs="all")),
    "half stays": _halved,
    "host updates": lambda plan: with_knobs(plan, placement=Placement(host_updated="all")),
    "one slot": lambda plan: with_knobs(plan, weight_slots=1, gradient_slots=1, state_slots=1),
    "four slots": lambda plan: with_knobs(plan, weight_slots=4),
    "small copies": lambda plan: with_knobs(
        plan, chunk_bytes=max(plan.knobs.chunk_bytes // 4, 2**20)
    ),
    "blocks of two": lambda plan: with_knobs(plan, checkpoint_interval=2),
    "blocks of four": lambda plan: with_knobs(plan, checkpoint_interval=4),
}
"""Name -> function that returns the changed plan. Only knobs change, so the arithmetic stays the
same. A variant that does not fit under the case's cap is left out.
"""
