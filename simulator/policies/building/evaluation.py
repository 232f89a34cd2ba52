"""A forward pass with loss and nothing else, on the buffers that a plan's training step has: no policy needs one of its own.

Micro-batch by micro-batch: embed, the decoder layers, the loss. Weights that the step keeps on the device are read there; the others stream
from the host through the step's own weight slots, and one still in a slot is not loaded again. Hidden states take turns in two of its slots.
"""

from __future__ import annotations

from megatrain.simulator.arithmetic import cost_keys
from megatrain.simulator.errors import UserError
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.slot_cache import SlotCache
from megatrain.simulator.schedule import DataClass, OpId, Schedule, whole
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING


class Evaluation:
    """Writes the schedule into a builder."""

    def __init__(self, builder: Builder, plan: Plan, training: Schedule) -> None:
        self.builder, self.plan, self.training = builder, plan, training
        micros = [str(micro) for micro in range(plan.workload.accumulation)]
        self.home = {layer: self._keep("weights", layer) for layer in plan.model.stack}
        pools = self._weight_pools()
        self.pool: dict[str, str] = {}  # layer that streams -> its pool of slots
        for layer, home in self.home.items():
            if home.startswith("host."):
                if layer not in pools:
                    raise self._refusal(f"no slot that the weights of {layer} stream through", "one for each layer whose weights are on the host")
                self.pool[layer] = pools[layer]
        self.hidden = self._hidden_pool()
        used = {*self.pool.values(), self.hidden}
        pools_in_order = dict.fromkeys(buffer.pool for buffer in training.buffers)
        self.count = {pool: self._keep_slots(pool) for pool in pools_in_order if pool in used}
        self.tokens = [self._keep("tokens", micro) for micro in micros]
        self.losses = [self._keep("losses", micro) for micro in micros]
        self.loaded = {pool: SlotCache(builder, pool, count) for pool, count in self.count.items()}

    def _keep(self, data: DataClass, key: str) -> str:
        """The persistent buffer in which the training step has these data; raises UserError where it has none."""
        name = self.training.state.get((data, key))
        if name is None:
            raise self._refusal(f"no persistent buffer of the {data} of {key}", "one for each layer's weights, each micro-batch's tokens and loss")
        self.builder.keep([self.training.buffer[name]])
        return name

    def _weight_pools(self) -> dict[str, str]:
        """The pool of slots through which the training step streams each layer's weights."""
        found: dict[str, str] = {}
        for op in self.training.ops:
            for buffer in [self.training.buffer[whole(name)] for name in op.writes]:
                if buffer.data == "weights" and not (buffer.persistent or buffer.chunk):
                    found[op.layer] = buffer.pool
        return found

    def _hidden_pool(self) -> str:
        """The pool with the slot into which the head writes the gradient of its input."""
        head = next(op for op in self.training.ops if op.kind == "head")
        return next(self.training.buffer[name].pool for name in head.writes if self.training.buffer[name].data == "hidden")

    def _keep_slots(self, pool: str) -> int:
        """Makes the training step's slots of `pool`; returns how many there are."""
        slots = [buffer for buffer in self.training.buffers if buffer.pool == pool and not buffer.persistent]
        self.builder.keep(slots)
        return len(slots)

    def _refusal(self, found: str, allowed: str) -> UserError:
        return UserError(f"policy {self.plan.policy}: evaluation", found=found, allowed=allowed, fix="train without evaluation, or mend the policy")

    def weights(self, layer: str, phase: str, micro: int) -> str:
        """A device buffer with the layer's weights."""
        pool = self.pool.get(layer)
        if pool is None:
            return self.home[layer]
        found = self.loaded[pool].find(layer)
        if found is not None:
            return found
        slot = self.loaded[pool].take(layer)
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
        x = self.builder.acquire(self.hidden)
        self._compute("embed", "", micro, [weights, self.tokens[micro]], [x])
        for layer in model.decoders:
            weights = self.weights(layer.name, "f", micro)
            output = self.builder.acquire(self.hidden)
            self._compute("forward", layer.name, micro, [weights, x], [output])
            self.builder.release(x)
            x = output
        self._compute("loss", "", micro, [self.weights(model.head, "h", micro), x, self.tokens[micro]], [self.losses[micro]])
        self.builder.release(x)

    def close(self) -> None:
        """Gives the weight slots back."""
        for cache in self.loaded.values():
            cache.clear()


def forward_only(plan: Plan, training: Schedule) -> Schedule:
    """As many micro-batches as a step has, forward only, on buffers of `training`, of the same names and sizes."""
    builder = Builder(plan.policy)
    step = Evaluation(builder, plan, training)
    for micro in range(plan.workload.accumulation):
        step.micro_batch(micro)
    step.close()
    return builder.build()
