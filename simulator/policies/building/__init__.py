"""Building blocks of scheduling policies, also for policies outside the package.

`Builder` turns a sequential program into a schedule. `compute` emits the training step of a decoder
model, one micro-batch after the other, and asks a `ParameterStore` for the buffers of weights and
gradients. `SlotCache` keeps layers in weight slots, and `Clipping` emits the ops that clip.
`contributions` and `layer_state` say how many gradients a layer gets and what its state is.
"""

from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.clipping import Clipping
from megatrain.simulator.policies.building.evaluation import forward_only
from megatrain.simulator.policies.building.parameter_store_policy import ParameterStorePolicy
from megatrain.simulator.policies.building.slot_cache import SlotCache
from megatrain.simulator.policies.building.training_step import (
    ParameterStore,
    compute,
    declare,
    state,
    update_operands,
)
from megatrain.simulator.schedule.arithmetic import contributions, layer_state

__all__ = [
    "DTYPE_BYTES",
    "Builder",
    "Clipping",
    "SlotCache",
    "ParameterStore",
    "ParameterStorePolicy",
    "compute",
    "contributions",
    "declare",
    "forward_only",
    "layer_state",
    "state",
    "update_operands",
]
