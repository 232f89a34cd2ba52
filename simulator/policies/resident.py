"""Nothing streams: weights, gradients and optimizer state stay on the device, AdamW runs there. What to use when the model fits."""

from __future__ import annotations

from megatrain.simulator.arithmetic import contributions
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.clipping import Clipping
from megatrain.simulator.policies.building.training_step import compute, declare, state, update_operands
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.schedule import OpId, Schedule


class _State:
    """Every buffer is the layer's own, on the device."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        self.builder, self.plan, self.stack = builder, plan, plan.model.stack
        self.device = state(builder, plan, "device")
        self.clipping = Clipping(builder, plan, "device", "compute", "update")
        self.arrived = dict.fromkeys(self.stack, 0)

    def weights(self, layer: str, phase: str, micro: int) -> str:
        return self.device["weights", layer]

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        return self.device["gradients", layer], self.arrived[layer] > 0

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        self.arrived[layer] += 1
        if self.arrived[layer] == contributions(self.plan, layer):
            self.clipping.measure(layer, buffer, self.device["moments", layer])

    def losses_written(self, losses: list[str]) -> None:
        self.clipping.losses = losses

    def update(self) -> None:
        self.clipping.finish()
        for layer, spec in self.stack.items():
            reads, writes = update_operands(self.device, layer, self.clipping.factor(layer))
            self.builder.op(OpId("update", layer), "update", reads, writes, parameters=spec.elements)


class Resident(Policy):
    """Nothing streams."""

    name = "resident"
    knobs = ("checkpoint_interval",)
    placements = ("stored", "attention", "parked")

    def lower(self, plan: Plan) -> Schedule:
        builder = Builder(plan.policy)
        compute(builder, plan, _State(builder, plan))
        return builder.build()

    def buffers(self, plan: Plan, *, merged: bool = False) -> Schedule:
        """The buffers of `lower`, without its ops."""
        builder = Builder(plan.policy, merged=merged)
        declare(builder, plan, _State(builder, plan))
        return builder.build()
