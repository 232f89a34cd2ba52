"""Weights streamed in from the host, gradients streamed out, AdamW on the CPU when the backward pass is over."""

from __future__ import annotations

from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies._builder import Builder
from megatrain.simulator.policies._clipping import Clipping
from megatrain.simulator.policies._layerwise import compute, contributions, declare, state, update_operands
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
        for suffix, size, weights, gradients, slabs in (
            ("", decoder, knobs.weight_slots, knobs.gradient_slots, knobs.gradient_slabs),
            ("_vocabulary", max(others), 1, 1, min(knobs.gradient_slabs, 1)),
        ):
            builder.slots(f"device.weights{suffix}", weights, self.width * size)
            builder.slots(f"device.gradients{suffix}", gradients, self.width * size)
            builder.slots(f"host.slabs{suffix}", slabs, self.width * size)
        self.loaded: dict[str, str] = {}  # layer -> weight slot, least recently used first
        self.arrived = dict.fromkeys(self.stack, 0)

    def _pool(self, name: str, layer: str) -> str:
        return name if self.stack[layer].kind == "decoder" else f"{name}_vocabulary"

    def _chunks(self, layer: str) -> list[tuple[int, int]]:
        """(offset, bytes) of each copy of the layer in the compute dtype."""
        total, chunk = self.width * self.stack[layer].elements, self.plan.knobs.chunk_bytes
        return [(offset, min(chunk, total - offset)) for offset in range(0, total, chunk)]

    def weights(self, layer: str, phase: str, micro: int) -> str:
        if layer in self.loaded:
            self.loaded[layer] = slot = self.loaded.pop(layer)
            return slot
        pool = self._pool("device.weights", layer)
        users = [name for name in self.loaded if self._pool("device.weights", name) == pool]
        if len(users) == (self.plan.knobs.weight_slots if self.stack[layer].kind == "decoder" else 1):
            self.builder.release(self.loaded.pop(users[0]))
        slot = self.loaded[layer] = self.builder.acquire(pool)
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
        for slot in self.loaded.values():
            self.builder.release(slot)
        self.clipping.finish()
        for layer, spec in self.stack.items():
            reads, writes = update_operands(self.host, layer, self.clipping.factor(layer))
            self.builder.op(OpId("cpu_update", layer), "cpu", reads, writes, parameters=spec.elements)


def lower_streamed(plan: Plan, *, serial: bool = False) -> Schedule:
    """The streamed step of `plan`; with `serial`, one op at a time."""
    builder = Builder(plan.policy, serial=serial)
    compute(builder, plan, Streamed(builder, plan))
    return builder.build()


def outline_streamed(plan: Plan, *, merged: bool = False) -> Schedule:
    """The buffers of `lower_streamed`, without its ops; `merged` as the builder does it."""
    builder = Builder(plan.policy, merged=merged)
    declare(builder, plan, Streamed(builder, plan))
    return builder.build()
