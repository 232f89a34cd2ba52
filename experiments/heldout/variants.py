"""Variants: a policy's best plan with changed knobs. The planner's choice is compared with them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from megatrain.simulator.planner.assessment import with_knobs
from megatrain.simulator.planner.filling import CLASSES, host_updating, ranges
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


def _one_layer_less(plan: Plan) -> Plan:
    """Returns the plan without the device state of the last layer whose weights stay there. The
    host updates this layer if it updates others.
    """
    stack, kept = list(plan.model.stack), plan.placed("weights")
    last = next((layer for layer in reversed(stack) if layer in kept), None)
    placement = plan.knobs.placement
    if last is None:
        return plan
    fewer = dict[str, str]()
    for name in CLASSES:
        fewer[name] = ranges(stack, set(plan.placed(name)) - {last})
    if placement.host_updated:
        fewer["host_updated"] = ranges(stack, {*plan.placed("host_updated"), last})
    return with_knobs(plan, placement=msgspec.structs.replace(placement, **fewer))


def _placed(plan: Plan, **fields: str) -> Plan:
    """Returns the plan with other fields of its placement."""
    return with_knobs(plan, placement=msgspec.structs.replace(plan.knobs.placement, **fields))


VARIANTS: dict[str, Callable[[Plan], Plan]] = {
    "nothing stays": lambda plan: with_knobs(plan, placement=Placement()),
    "offloaded_inputs": lambda plan: with_knobs(plan, placement=Placement(offloaded_inputs="all")),
    "half stays": _halved,
    "host updates": lambda plan: with_knobs(plan, placement=Placement(host_updated="all")),
    "one layer less": _one_layer_less,
    "one layer less, no host updates": lambda plan: _placed(_one_layer_less(plan), host_updated=""),
    "one layer less, half of host updates": lambda plan: host_updating(_one_layer_less(plan), 2),
    "one layer less, three slots": lambda plan: with_knobs(_one_layer_less(plan), weight_slots=3),
    "one layer less, inputs stay": lambda plan: _placed(_one_layer_less(plan), offloaded_inputs=""),
    "one slot": lambda plan: with_knobs(plan, weight_slots=1, gradient_slots=1, state_slots=1),
    "one gradient slot": lambda plan: with_knobs(plan, gradient_slots=1),
    "two slots": lambda plan: with_knobs(plan, weight_slots=2),
    "four slots": lambda plan: with_knobs(plan, weight_slots=4),
    "small copies": lambda plan: with_knobs(
        plan, chunk_bytes=max(plan.knobs.chunk_bytes // 4, 2**20)
    ),
    "large copies": lambda plan: with_knobs(plan, chunk_bytes=4 * plan.knobs.chunk_bytes),
    "blocks of two": lambda plan: with_knobs(plan, checkpoint_interval=2),
    "blocks of four": lambda plan: with_knobs(plan, checkpoint_interval=4),
}
"""Name -> function that returns the changed plan. Only knobs change, so the arithmetic stays the
same. A variant that does not fit under the case's cap is left out.
"""
