"""No overlap: one weight slot, every op waits for the one before it. The floor that every other policy has to beat."""

from __future__ import annotations

from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies._streamed import lower_streamed
from megatrain.simulator.schedule import Schedule

DOMINATED_BY = "k_buffer"
"""it can do all that this can"""


def lower(plan: Plan) -> Schedule:
    if plan.knobs.weight_slots != 1:
        raise UserError("policy sequential: weight_slots", found=plan.knobs.weight_slots, allowed=1, fix="set weight_slots = 1, or use policy k_buffer")
    return lower_streamed(plan, serial=True)
