"""The base of `double_buffer`, `k_buffer` and `sequential`: all state in host memory.

Weights stream to the device and gradients stream back. AdamW runs on the CPU after the backward
pass.
"""

from __future__ import annotations

from typing import ClassVar

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.clipping import Clipping
from megatrain.simulator.policies.building.parameter_store_policy import ParameterStorePolicy
from megatrain.simulator.policies.building.slot_cache import SlotCache, pool_of
from megatrain.simulator.policies.building.training_step import state, update_operands
from megatrain.simulator.schedule import OpId
from megatrain.simulator.schedule.arithmetic import contributions
from megatrain.simulator.schedule.plan import Plan


class Streamed:
    """The parameter store of one step: state in host memory, and a few slots on the device.

    A layer that is still in a slot when it is needed is not loaded again.
    """

    def __init__(self, builder: Builder, plan: Plan) -> None:
        self.builder, self.plan = builder, plan
        self.stack, knobs = plan.model.stack, plan.knobs
        self.width = DTYPE_BYTES[plan.workload.dtype]
        if knobs.gradient_staging == 0 and any(
            contributions(plan, layer) > 1 for layer in self.stack
        ):
            raise UserError(
                "knobs: gradient_staging",
                found=0,
                allowed=">= 1 if gradients are summed (accumulation > 1 or tied embeddings)",
                fix="set gradient_staging = 2",
            )
        self.host = state(builder, plan, "host")
        self.clipping = Clipping(builder, plan, "host", "cpu", "cpu")
        decoder = max(layer.elements for layer in plan.model.decoders)
        others = [layer.elements for layer in self.stack.values() if layer.kind != "decoder"]
        for suffix, size, counts, names in (
            (
                "",
                decoder,
                (knobs.weight_slots, knobs.gradient_slots, knobs.gradient_staging),
                ("weight_slots", "gradient_slots", "gradient_staging"),
            ),
            ("_vocabulary", max(others), (1, 1, min(knobs.gradient_staging, 1)), ("", "", "")),
        ):
            dtype, bytes_ = plan.workload.dtype, self.width * size
            builder.slots(
                f"device.weights{suffix}", counts[0], bytes_, "weights", dtype, knob=names[0]
            )
            builder.slots(
                f"device.gradients{suffix}", counts[1], bytes_, "gradients", dtype, knob=names[1]
            )
            builder.slots(
                f"host.gradient_staging{suffix}",
                counts[2],
                bytes_,
                "gradients",
                dtype,
                staging=True,
                per_gpu=True,
                knob=names[2],
            )
        self.decoders = SlotCache(builder, "device.weights", knobs.weight_slots)
        self.vocabulary = SlotCache(builder, "device.weights_vocabulary", 1)
        self.arrived = dict.fromkeys(self.stack, 0)
        """Layer -> gradient contributions that the step has written so far."""

    def _chunks(self, layer: str) -> list[tuple[int, int]]:
        """Returns (offset, bytes) of each copy of the layer in the compute dtype."""
        total, chunk = self.width * self.stack[layer].elements, self.plan.knobs.chunk_bytes
        return [(offset, min(chunk, total - offset)) for offset in range(0, total, chunk)]

    def weights(self, layer: str, phase: str, micro: int) -> str:
        cache = self.decoders if self.stack[layer].kind == "decoder" else self.vocabulary
        slot = cache.find(layer)
        if slot is not None:
            return slot
        slot = cache.take(layer)
        for chunk, (offset, size) in enumerate(self._chunks(layer)):
            self.builder.op(
                OpId("load_weights", layer, phase, micro, chunk),
                "h2d",
                [self.host["weights", layer]],
                [slot],
                offset=offset,
                bytes=size,
            )
        return slot

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        return self.builder.acquire(pool_of("device.gradients", self.stack[layer])), False

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        target, elements = self.host["gradients", layer], self.stack[layer].elements
        staging = (
            self.builder.acquire(pool_of("host.gradient_staging", self.stack[layer]))
            if self.plan.knobs.gradient_staging
            else target
        )
        for chunk, (offset, size) in enumerate(self._chunks(layer)):
            self.builder.op(
                OpId("save_gradients", layer, phase, micro, chunk),
                "d2h",
                [buffer],
                [staging],
                offset=offset,
                bytes=size,
            )
        self.builder.release(buffer)
        if staging != target:
            reads = [staging] + ([target] if self.arrived[layer] else [])
            self.builder.op(
                OpId("accumulate_gradients", layer, phase, micro),
                "cpu",
                reads,
                [target],
                parameters=elements,
            )
            self.builder.release(staging)
        self.arrived[layer] += 1
        if self.arrived[layer] == contributions(self.plan, layer):
            self.clipping.measure(layer, target, self.host.get(("moments", layer), ""))

    def losses_written(self, losses: list[str]) -> None:
        self.clipping.losses = losses

    def update(self) -> None:
        self.decoders.clear()
        self.vocabulary.clear()
        self.clipping.finish()
        for layer, spec in self.stack.items():
            reads, writes = update_operands(self.host, layer, self.clipping.factor(layer))
            self.builder.op(
                OpId("cpu_update", layer), "cpu", reads, writes, parameters=spec.elements
            )


class StreamedPolicy(ParameterStorePolicy):
    """A policy that streams weights and gradients, with `Streamed` as its parameter store."""

    knobs = (
        "weight_slots",
        "gradient_slots",
        "gradient_staging",
        "checkpoint_interval",
        "chunk_bytes",
    )
    placements = ("saved_activations", "saved_attention", "offloaded_inputs", "offloaded_attention")
    updates_on_host = True
    slots: ClassVar[int | None] = None
    """The only allowed number of weight slots, or None if any number is allowed."""

    def storage(self, builder: Builder, plan: Plan) -> Streamed:
        """Returns the parameter store of one step.

        Raises UserError if the plan has a number of weight slots that is not allowed.
        """
        if self.slots not in (None, plan.knobs.weight_slots):
            raise UserError(
                f"policy {self.name}: weight_slots",
                found=plan.knobs.weight_slots,
                allowed=self.slots,
                fix=f"set weight_slots = {self.slots}, or use policy k_buffer",
            )
        return Streamed(builder, plan)
