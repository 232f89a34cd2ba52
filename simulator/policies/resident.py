"""The policy `resident`: nothing streams, for models that fit in device memory.

Weights, gradients and optimizer state stay on the device, and AdamW runs there.
"""

from __future__ import annotations

from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.clipping import Clipping
from megatrain.simulator.policies.building.parameter_store_policy import ParameterStorePolicy
from megatrain.simulator.policies.building.training_step import (
    state,
    update_flops,
    update_operands,
    update_workspace,
)
from megatrain.simulator.schedule import OpId
from megatrain.simulator.schedule.arithmetic import contributions
from megatrain.simulator.schedule.plan import Plan


class _ResidentStore:
    """The parameter store of one step, with all buffers on the device."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        self.builder, self.plan, self.stack = builder, plan, plan.model.stack
        self.device = state(builder, plan, "device")
        self.workspace = update_workspace(builder, plan)
        self.clipping = Clipping(builder, plan, "device", "compute", "update")
        self.arrived = dict.fromkeys(self.stack, 0)
        """Layer -> gradient contributions that the step has written so far."""

    def weights(self, layer: str, phase: str, micro: int) -> str:
        return self.device["weights", layer]

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        return self.device["gradients", layer], self.arrived[layer] > 0

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        self.arrived[layer] += 1
        if self.arrived[layer] == contributions(self.plan, layer):
            self.clipping.measure(layer, buffer, self.device.get(("moments", layer), ""))

    def losses_written(self, losses: list[str]) -> None:
        self.clipping.losses = losses

    def update(self) -> None:
        self.clipping.finish()
        for layer, spec in self.stack.items():
            reads, writes = update_operands(self.device, layer, self.clipping.factor(layer))
            self.builder.op(
                OpId("update", layer),
                "update",
                reads,
                [*writes, *self.workspace[layer]],
                parameters=spec.elements,
                **update_flops(self.plan, layer, 0, spec.elements),
            )


class Resident(ParameterStorePolicy):
    """Keeps all state on the device."""

    name = "resident"
    streams = False
    knobs = ("checkpoint_interval", "rebuild_outputs")
    placements = ("saved_activations", "saved_attention", "offloaded_inputs", "offloaded_attention")

    def storage(self, builder: Builder, plan: Plan) -> _ResidentStore:
        return _ResidentStore(builder, plan)
