"""Weights streamed in from the host, gradients streamed out, AdamW on the CPU when the backward pass is over."""

from __future__ import annotations

from typing import ClassVar

from megatrain.simulator.arithmetic import contributions
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.clipping import Clipping
from megatrain.simulator.policies.building.slot_cache import SlotCache
from megatrain.simulator.policies.building.training_step import compute, declare, state, update_operands
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.schedule import OpId, Schedule
from megatrain.simulator.specs import DTYPE_BYTES


class Streamed:
    """Host holds everything; the device has a few slots. A layer still in a slot when it is needed again is not loaded again."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        self.builder, self.plan = builder, plan
        self.stack, knobs = plan.model.stack, plan.knobs
        self.width = DTYPE_BYTES[plan.workload.dtype]
        if knobs.gradient_slabs == 0 and any(contributions(plan, layer) > 1 for layer in self.stack):
            raise UserError(
                "knobs: gradient_slabs", found=0, allowed=">= 1 where gradients are summed (accumulation > 1 or tied embeddings)", fix="set gradient_slabs = 2"
            )
        self.host = state(builder, plan, "host")
        self.clipping = Clipping(builder, plan, "host", "cpu", "cpu")
        decoder = max(layer.elements for layer in plan.model.decoders)
        others = [layer.elements for layer in self.stack.values() if layer.kind != "decoder"]
        for suffix, size, counts, names in (
            ("", decoder, (knobs.weight_slots, knobs.gradient_slots, knobs.gradient_slabs), ("weight_slots", "gradient_slots", "gradient_slabs")),
            ("_vocabulary", max(others), (1, 1, min(knobs.gradient_slabs, 1)), ("", "", "")),
        ):
            dtype, bytes_ = plan.workload.dtype, self.width * size
            builder.slots(f"device.weights{suffix}", counts[0], bytes_, "weights", dtype, knob=names[0])
            builder.slots(f"device.gradients{suffix}", counts[1], bytes_, "gradients", dtype, knob=names[1])
            builder.slots(f"host.slabs{suffix}", counts[2], bytes_, "gradients", dtype, staging=True, per_gpu=True, knob=names[2])
        self.decoders = SlotCache(builder, "device.weights", knobs.weight_slots)
        self.vocabulary = SlotCache(builder, "device.weights_vocabulary", 1)
        self.arrived = dict.fromkeys(self.stack, 0)

    def _pool(self, name: str, layer: str) -> str:
        return name if self.stack[layer].kind == "decoder" else f"{name}_vocabulary"

    def _chunks(self, layer: str) -> list[tuple[int, int]]:
        """(offset, bytes) of each copy of the layer in the compute dtype."""
        total, chunk = self.width * self.stack[layer].elements, self.plan.knobs.chunk_bytes
        return [(offset, min(chunk, total - offset)) for offset in range(0, total, chunk)]

    def weights(self, layer: str, phase: str, micro: int) -> str:
        cache = self.decoders if self.stack[layer].kind == "decoder" else self.vocabulary
        found = cache.find(layer)
        if found is not None:
            return found
        slot = cache.take(layer)
        for chunk, (offset, size) in enumerate(self._chunks(layer)):
            self.builder.op(OpId("load_weights", layer, phase, micro, chunk), "h2d", [self.host["weights", layer]], [slot], offset=offset, bytes=size)
        return slot

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        return self.builder.acquire(self._pool("device.gradients", layer)), False

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        target, elements = self.host["gradients", layer], self.stack[layer].elements
        slab = self.builder.acquire(self._pool("host.slabs", layer)) if self.plan.knobs.gradient_slabs else target
        for chunk, (offset, size) in enumerate(self._chunks(layer)):
            self.builder.op(OpId("save_gradients", layer, phase, micro, chunk), "d2h", [buffer], [slab], offset=offset, bytes=size)
        self.builder.release(buffer)
        if slab != target:
            reads = [slab] + ([target] if self.arrived[layer] else [])
            self.builder.op(OpId("accumulate_gradients", layer, phase, micro), "cpu", reads, [target], parameters=elements)
            self.builder.release(slab)
        self.arrived[layer] += 1
        if self.arrived[layer] == contributions(self.plan, layer):
            self.clipping.measure(layer, target, self.host["moments", layer])

    def losses_written(self, losses: list[str]) -> None:
        self.clipping.losses = losses

    def update(self) -> None:
        self.decoders.clear()
        self.vocabulary.clear()
        self.clipping.finish()
        for layer, spec in self.stack.items():
            reads, writes = update_operands(self.host, layer, self.clipping.factor(layer))
            self.builder.op(OpId("cpu_update", layer), "cpu", reads, writes, parameters=spec.elements)


class StreamedPolicy(Policy):
    """A policy whose step is `Streamed`."""

    knobs = ("weight_slots", "gradient_slots", "gradient_slabs", "checkpoint_interval", "chunk_bytes")
    placements = ("stored", "attention", "parked")
    serial: ClassVar[bool] = False
    """every op waits for the one before it"""
    slots: ClassVar[int | None] = None
    """the only number of weight slots; None where any will do"""

    def lower(self, plan: Plan) -> Schedule:
        """Raises UserError for another number of weight slots."""
        builder = self._builder(plan)
        compute(builder, plan, Streamed(builder, plan))
        return builder.build()

    def buffers(self, plan: Plan, *, merged: bool = False) -> Schedule:
        """The buffers of `lower`, without its ops."""
        builder = self._builder(plan, merged=merged)
        declare(builder, plan, Streamed(builder, plan))
        return builder.build()

    def _builder(self, plan: Plan, *, merged: bool = False) -> Builder:
        if self.slots not in (None, plan.knobs.weight_slots):
            raise UserError(
                f"policy {self.name}: weight_slots", found=plan.knobs.weight_slots, allowed=self.slots,
                fix=f"set weight_slots = {self.slots}, or use policy k_buffer",
            )  # fmt: skip
        return Builder(plan.policy, serial=self.serial, merged=merged)
