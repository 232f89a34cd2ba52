"""Evaluation: a forward pass with loss, for the schedule of any policy.

For each micro-batch it emits the embedding, the decoder layers and the loss. It uses the buffers of
the plan's training step, so no policy has to write a forward pass of its own. Resident weights are
read from their buffers. Other weights stream through the weight slots of the training step, and a
layer that is still in a slot is not loaded again. Hidden states alternate between two slots.

With several GPUs, each rank computes its own micro-batches, loads its parts of the weights if they
are in host memory, and gathers the other parts, as in a training step. At the end, all ranks
receive all losses.
"""

from __future__ import annotations

from megatrain.simulator.base.errors import UserError
from megatrain.simulator.model.layer import DTYPE_BYTES, EMBEDDING
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.slot_cache import SlotCache
from megatrain.simulator.schedule import DataClass, OpId, Schedule, base_buffer
from megatrain.simulator.schedule.arithmetic import cost_keys, part_elements
from megatrain.simulator.schedule.plan import Plan


class EvaluationStep:
    """Emits the ops of an evaluation into a builder."""

    def __init__(self, builder: Builder, plan: Plan, training: Schedule) -> None:
        self.builder, self.plan, self.training = builder, plan, training
        micros = [str(micro) for micro in range(plan.micro_batches)]
        self.home = {layer: self._keep("weights", layer) for layer in plan.model.stack}
        pools = self._weight_pools()
        self.pool: dict[str, str] = {}
        """Streamed layer -> its pool of weight slots."""
        for layer, home in self.home.items():
            if home.startswith("host.") or training.buffer[home].sharded:
                if layer not in pools:
                    raise self._refusal(
                        f"no slot that the weights of {layer} stream through",
                        "one for each layer whose weights are not whole on the device",
                    )
                self.pool[layer] = pools[layer]
        self.hidden = self._hidden_pool()
        used = {*self.pool.values(), self.hidden}
        pools_in_order = dict.fromkeys(buffer.pool for buffer in training.buffers)
        self.count = {pool: self._keep_slots(pool) for pool in pools_in_order if pool in used}
        self.tokens = [self._keep("tokens", micro) for micro in micros]
        self.losses = [self._keep("losses", micro) for micro in micros]
        self.loaded = {pool: SlotCache(builder, pool, count) for pool, count in self.count.items()}

    def _keep(self, data: DataClass, key: str) -> str:
        """Adds the persistent buffer of the training step that holds `data` of `key`, a layer or a
        micro-batch, and returns its id. Raises UserError if the training step has none.
        """
        name = self.training.state.get((data, key))
        if name is None:
            raise self._refusal(
                f"no persistent buffer of the {data} of {key}",
                "one for each layer's weights, each micro-batch's tokens and loss",
            )
        self.builder.keep([self.training.buffer[name]])
        return name

    def _weight_pools(self) -> dict[str, str]:
        """Returns layer -> the pool of slots that its weights stream through in training."""
        pools: dict[str, str] = {}
        for op in self.training.ops:
            for buffer in [self.training.buffer[base_buffer(name)] for name in op.writes]:
                if buffer.data == "weights" and not (buffer.persistent or buffer.chunk):
                    pools[op.layer] = buffer.pool
        return pools

    def _hidden_pool(self) -> str:
        """Returns the pool of slots for hidden states. In training, the head writes the gradient of
        its input to such a slot.
        """
        head = next(op for op in self.training.ops if op.kind == "head")
        return next(
            self.training.buffer[name].pool
            for name in head.writes
            if self.training.buffer[name].data == "hidden"
        )

    def _keep_slots(self, pool: str) -> int:
        """Adds the training step's slots of `pool` and returns their number."""
        slots = [
            buffer
            for buffer in self.training.buffers
            if buffer.pool == pool and not buffer.persistent
        ]
        self.builder.keep(slots)
        return len(slots)

    def _refusal(self, found: str, allowed: str) -> UserError:
        return UserError(
            f"policy {self.plan.policy}: evaluation",
            found=found,
            allowed=allowed,
            fix="train without evaluation, or correct the policy",
        )

    def weights(self, layer: str, phase: str, micro: int) -> str:
        """Returns a device buffer with the layer's weights, and emits their copy if they are not on
        the device yet.
        """
        pool = self.pool.get(layer)
        if pool is None:
            return self.home[layer]
        slot = self.loaded[pool].find(layer)
        if slot is not None:
            return slot
        slot, home = self.loaded[pool].take(layer), self.home[layer]
        streamed = home.startswith("host.")
        total, size = (
            DTYPE_BYTES[self.plan.workload.dtype] * part_elements(self.plan, layer),
            self.plan.knobs.chunk_bytes,
        )
        for chunk, first in enumerate(range(0, total, size) if streamed else ()):
            name = OpId("load_weights", layer, phase, micro, chunk)
            self.builder.op(
                name, "h2d", [home], [slot], offset=first, bytes=min(size, total - first)
            )
        if self.plan.gpus > 1:
            self.builder.op(
                OpId("gather_weights", layer, phase, micro),
                "exchange",
                [slot if streamed else home],
                [slot],
                bytes=(self.plan.gpus - 1) * total,
                parameters=part_elements(self.plan, layer),
            )
        return slot

    def _compute(
        self, kind: str, layer: str, micro: int, reads: list[str], writes: list[str]
    ) -> None:
        self.builder.op(
            OpId(kind, layer, micro=micro),
            "compute",
            reads,
            writes,
            **cost_keys(self.plan, kind, layer),
        )

    def micro_batch(self, micro: int) -> None:
        """Emits the forward pass and the loss of one micro-batch."""
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
        self._compute(
            "loss",
            "",
            micro,
            [self.weights(model.head, "h", micro), x, self.tokens[micro]],
            [self.losses[micro]],
        )
        self.builder.release(x)

    def close(self) -> None:
        """Releases the weight slots. With several GPUs, it also emits the exchange of losses."""
        for cache in self.loaded.values():
            cache.clear()
        if self.plan.gpus > 1:
            self.builder.op(
                OpId("exchange_sums"),
                "exchange",
                self.losses,
                [
                    *(
                        self._keep("losses", f"all.{micro}")
                        for micro in range(self.plan.workload.accumulation)
                    ),
                    self._keep("workspace", "all"),
                ],
                bytes=(self.plan.gpus - 1) * 4 * len(self.losses),
            )


def forward_only(plan: Plan, training: Schedule) -> Schedule:
    """Returns the schedule of a forward pass with loss over the micro-batches of one step.

    `training` is the schedule of the plan's training step. The result uses some of its buffers,
    with the same ids and sizes. Raises UserError if a buffer that evaluation needs is missing.
    """
    builder = Builder(plan.policy)
    step = EvaluationStep(builder, plan, training)
    for micro in range(plan.micro_batches):
        step.micro_batch(micro)
    step.close()
    return builder.build()
