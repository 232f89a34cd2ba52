"""A forward pass with loss and nothing else, on the buffers that a plan's training step has: no policy needs one of its own.

Micro-batch by micro-batch: embed, the decoder layers, the loss. Weights that the step keeps on the device are read there; the others stream
from the host through the step's own weight slots, and one still in a slot is not loaded again. Hidden states take turns in two of its slots.
"""

from __future__ import annotations

from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies._builder import Builder
from megatrain.simulator.policies._layerwise import cost_keys
from megatrain.simulator.schedule import OpId, Schedule
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING

DECODER_SLOTS = ("device.weights", "device.streamed_weights")
VOCABULARY_SLOTS = ("device.weights_vocabulary", "device.streamed_vocabulary")
"""what policies call the slots of embedding and head; of the others the line above"""


class Evaluation:
    """Writes the schedule into a builder."""

    def __init__(self, builder: Builder, plan: Plan, training: Schedule) -> None:
        self.builder, self.plan, self.training = builder, plan, training
        self.home: dict[str, str] = {}  # layer -> the buffer that keeps its weights
        self.pool: dict[str, str] = {}  # layer that streams -> the slots that it streams through
        for layer, spec in plan.model.stack.items():
            names = [f"{place}.weights:{layer}" for place in ("device", "host")]
            self.home[layer] = next(name for name in names if name in training.buffer and training.buffer[name].persistent)
            self._keep(self.home[layer])
            if self.home[layer].startswith("host."):
                self.pool[layer] = self._slot_pool(DECODER_SLOTS if spec.kind == "decoder" else VOCABULARY_SLOTS)
        self.count = {pool: self._keep_slots(pool) for pool in sorted({*self.pool.values(), "device.hidden"})}
        self.tokens = [self._keep(f"device.tokens:{micro}") for micro in range(plan.workload.accumulation)]
        self.losses = [self._keep(f"device.losses:{micro}") for micro in range(plan.workload.accumulation)]
        self.loaded: dict[str, str] = {}  # layer -> weight slot, least recently used first

    def _keep(self, name: str) -> str:
        """A persistent buffer of the training step."""
        pool, _, key = name.partition(":")
        return self.builder.persistent(pool, key, self.training.buffer[name].bytes)

    def _slots(self, pool: str) -> list[int]:
        """Bytes of each slot of the training step's `pool`."""
        return [buffer.bytes for buffer in self.training.buffers if buffer.pool == pool and not buffer.persistent]

    def _keep_slots(self, pool: str) -> int:
        sizes = self._slots(pool)
        self.builder.slots(pool, len(sizes), sizes[0])
        return len(sizes)

    def _slot_pool(self, pools: tuple[str, ...]) -> str:
        pool = next((pool for pool in pools if self._slots(pool)), None)
        if pool is None:
            raise UserError(
                f"policy {self.plan.policy}: evaluation", found="streamed weights without slots", allowed=f"slots named {' or '.join(pools)}",
                fix="train without evaluation, or name the policy's slots so",
            )  # fmt: skip
        return pool

    def weights(self, layer: str, phase: str, micro: int) -> str:
        """A device buffer with the layer's weights."""
        pool = self.pool.get(layer)
        if pool is None:
            return self.home[layer]
        if layer in self.loaded:
            self.loaded[layer] = slot = self.loaded.pop(layer)
            return slot
        users = [name for name in self.loaded if self.pool[name] == pool]
        if len(users) == self.count[pool]:
            self.builder.release(self.loaded.pop(users[0]))
        slot = self.loaded[layer] = self.builder.acquire(pool)
        total, size = DTYPE_BYTES[self.plan.workload.dtype] * self.plan.model.stack[layer].elements, self.plan.knobs.chunk_bytes
        for chunk, first in enumerate(range(0, total, size)):
            name = OpId("load_weights", layer, phase, micro, chunk)
            self.builder.op(name, "h2d", [self.home[layer]], [slot], offset=first, bytes=min(size, total - first))
        return slot

    def _compute(self, kind: str, layer: str, micro: int, reads: list[str], writes: list[str]) -> None:
        self.builder.op(OpId(kind, layer, micro=micro), "compute", reads, writes, **cost_keys(self.plan, kind, layer))

    def micro_batch(self, micro: int) -> None:
        model = self.plan.model
        weights = self.weights(EMBEDDING, "f", micro)
        x = self.builder.acquire("device.hidden")
        self._compute("embed", "", micro, [weights, self.tokens[micro]], [x])
        for layer in model.decoders:
            weights = self.weights(layer.name, "f", micro)
            output = self.builder.acquire("device.hidden")
            self._compute("forward", layer.name, micro, [weights, x], [output])
            self.builder.release(x)
            x = output
        self._compute("loss", "", micro, [self.weights(model.head, "h", micro), x, self.tokens[micro]], [self.losses[micro]])
        self.builder.release(x)

    def close(self) -> None:
        """Gives the weight slots back."""
        for slot in self.loaded.values():
            self.builder.release(slot)


def forward_only(plan: Plan, training: Schedule) -> Schedule:
    """As many micro-batches as a step has, forward only, on buffers of `training`, of the same names and sizes."""
    builder = Builder(plan.policy)
    step = Evaluation(builder, plan, training)
    for micro in range(plan.workload.accumulation):
        step.micro_batch(micro)
    step.close()
    return builder.build()
