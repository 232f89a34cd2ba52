"""What policies are made of; public, so that a policy outside the package can use it too.

`Builder` turns a sequential program into a schedule. `compute` emits the training step of a decoder
model, micro-batch by micro-batch, and asks a `Storage` where weights and gradients are. `SlotCache`
keeps layers in weight slots, and `Clipping` emits the ops that clip.
"""

from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.clipping import Clipping
from megatrain.simulator.policies.building.evaluation import forward_only
from megatrain.simulator.policies.building.slot_cache import SlotCache
from megatrain.simulator.policies.building.training_step import Storage, compute, declare, state, update_operands

__all__ = ["Builder", "Clipping", "SlotCache", "Storage", "compute", "declare", "forward_only", "state", "update_operands"]
