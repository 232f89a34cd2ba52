"""Variants: other knobs for the best plan of a policy, so that the planner's choice has something to be compared with."""

from __future__ import annotations

from collections.abc import Callable

from megatrain.simulator.assessment import varied
from megatrain.simulator.filling import ranges
from megatrain.simulator.plan import Placement, Plan


def _halved(plan: Plan) -> Plan:
    """Of every class of data half of the layers that stay."""
    stack, fields = list(plan.model.stack), Placement.__struct_fields__
    chosen = {name: [layer for layer in stack if layer in plan.placed(name)] for name in fields}
    return varied(plan, placement=Placement(**{name: ranges(stack, set(layers[: len(layers) // 2])) for name, layers in chosen.items()}))


VARIANTS: dict[str, Callable[[Plan], Plan]] = {
    "nothing stays": lambda plan: varied(plan, placement=Placement()),
    "parked": lambda plan: varied(plan, placement=Placement(parked="all")),
    "half stays": _halved,
    "host updates": lambda plan: varied(plan, placement=Placement(host_updated="all")),
    "one slot": lambda plan: varied(plan, weight_slots=1, gradient_slots=1, state_slots=1),
    "four slots": lambda plan: varied(plan, weight_slots=4),
    "small copies": lambda plan: varied(plan, chunk_bytes=max(plan.knobs.chunk_bytes // 4, 2**20)),
    "blocks of two": lambda plan: varied(plan, checkpoint_interval=2),
    "blocks of four": lambda plan: varied(plan, checkpoint_interval=4),
}
"""Only knobs: the arithmetic is the same. One that does not fit under the case's cap is left out."""
