"""The paper's pipeline (arXiv 2604.05091): two weight slots, so that a layer loads while the one before it computes; a checkpoint
every K layers; gradients through slots and slabs to the host; AdamW on the CPU after backward.

Where it differs from the paper: the master weights are exact (fp32 in two 16-bit planes), a recomputed layer keeps its activations
until its backward (two forwards a layer, not three), and a layer that is still in a slot is not loaded again.
"""

from __future__ import annotations

from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies._streamed import lower_streamed
from megatrain.simulator.schedule import Schedule

DOMINATED_BY = "k_buffer"
"""it can do all that this can"""


def lower(plan: Plan) -> Schedule:
    if plan.knobs.weight_slots != 2:
        raise UserError("policy double_buffer: weight_slots", found=plan.knobs.weight_slots, allowed=2, fix="set weight_slots = 2, or use policy k_buffer")
    return lower_streamed(plan)
