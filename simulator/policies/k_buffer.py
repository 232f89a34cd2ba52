"""`double_buffer` with any number of weight slots: loads run further ahead, and layers stay for the backward pass where slots allow."""

from __future__ import annotations

from megatrain.simulator.plan import Plan
from megatrain.simulator.policies._streamed import lower_streamed, outline_streamed
from megatrain.simulator.schedule import Schedule


def lower(plan: Plan) -> Schedule:
    return lower_streamed(plan)


def outline(plan: Plan, *, merged: bool = False) -> Schedule:
    """The buffers of `lower`, without its ops."""
    return outline_streamed(plan, merged=merged)
