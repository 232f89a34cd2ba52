"""The compute of one optimizer step, layer by layer; where weights come from and gradients go is a `Storage`'s business.

For each micro-batch: embed; forward, keeping the input of every K-th decoder layer (on the device, or parked on the host), or all
activations of a stored layer, or its attention's output and log-sum-exp; head with loss, forward and backward; then block by block from the end: run the block's layers again
keeping their activations, unless they are stored, all but an attention that was kept, then backward through them; embedding's backward.
"""

from __future__ import annotations

from typing import Any, Protocol

from megatrain.simulator.arithmetic import SCALAR_BYTES, STATE, blocks_of, cost_keys, state_bytes, state_dtype
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.schedule import OpId
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING


class Storage(Protocol):
    """Where a policy keeps weights and gradients. Buffers are named by id."""

    def weights(self, layer: str, phase: str, micro: int) -> str:
        """A device buffer that holds the layer's weights at this point of the program."""

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        """A device buffer for the layer's gradient, and whether the op is to add to what is there."""

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        """The gradient stands in `buffer`: send it where it belongs."""

    def losses_written(self, losses: list[str]) -> None:
        """Every loss of the step stands in a buffer of `losses`, before any gradient of the last micro-batch is told."""

    def update(self) -> None:
        """Every gradient of the step is there: clip and update."""


def state(builder: Builder, plan: Plan, place: str) -> dict[tuple[str, str], str]:
    """Persistent buffers of every layer's weights, low plane, moments and gradients in `place`, by (class, layer)."""
    made: dict[tuple[str, str], str] = {}
    for layer in plan.model.stack.values():
        for name in STATE:
            if size := state_bytes(plan, name, layer.name):
                dtype = state_dtype(plan, name, layer.name)
                made[name, layer.name] = builder.persistent(f"{place}.{name}", layer.name, size * layer.elements, name, dtype)
    return made


def update_operands(state: dict[tuple[str, str], str], layer: str, clip: str) -> tuple[list[str], list[str]]:
    """What an optimizer op of `layer` reads and writes."""
    return [state["gradients", layer], clip], [state[name, layer] for name in ("weights", "low", "moments") if (name, layer) in state]


class _Compute:
    """The compute ops of one step."""

    def __init__(self, builder: Builder, plan: Plan, storage: Storage) -> None:
        self.builder, self.plan, self.storage = builder, plan, storage
        model, work = plan.model, plan.workload
        self.hidden_bytes = work.tokens * model.hidden * DTYPE_BYTES[work.dtype]
        self.blocks = blocks_of(plan)
        self.stored, parked = {int(layer) for layer in plan.placed("stored")}, plan.placed("parked")
        self.parked = {block[0] for block in self.blocks if str(block[0]) in parked} - self.stored
        self.first = {block[0] for block in self.blocks}
        self.attended = {int(layer) for layer in plan.placed("attention")} - self.stored
        longest = max((len(block) for block in self.blocks if block[0] not in self.stored), default=0)
        saved = model.most_saved_bytes(work.tokens, work.sequence, work.dtype)
        builder.slots(
            "device.checkpoints",
            len(self.blocks) - len(self.parked) + min(len(self.parked), 2),
            self.hidden_bytes,
            "hidden",
            work.dtype,
            scales_with_tokens=True,
        )
        builder.slots("device.hidden", max(longest, 1) + 1, self.hidden_bytes, "hidden", work.dtype, scales_with_tokens=True)
        builder.slots("device.activations", longest, saved, "activations", dynamic=True, scales_with_tokens=True, knob="checkpoint_interval")
        builder.slots("device.stored", len(self.stored), saved, "saved_activations", dynamic=True, scales_with_tokens=True)
        attention = max((model.kept_attention(str(index), work.tokens, work.dtype).bytes for index in self.attended), default=0)
        builder.slots("device.attention", len(self.attended), attention, "attention", scales_with_tokens=True)
        self.homes = {
            index: builder.persistent("host.parked", str(index), self.hidden_bytes, "hidden", work.dtype, scales_with_tokens=True, per_gpu=True)
            for index in sorted(self.parked)
        }
        token_bytes = work.token_rows * 8 * work.tokens
        micros = [str(micro) for micro in range(work.accumulation)]
        self.tokens = [builder.persistent("device.tokens", micro, token_bytes, "tokens", scales_with_tokens=True) for micro in micros]
        self.losses = [builder.persistent("device.losses", micro, SCALAR_BYTES, "losses") for micro in micros]
        self.costs: dict[tuple[str, str, bool], dict[str, Any]] = {}
        self.inputs: dict[int, str] = {}
        self.saved: dict[int, str] = {}
        self.attention: dict[int, str] = {}

    def emit(self, kind: str, layer: str, micro: int, reads: list[str], writes: list[str], *, kept: bool = False) -> None:
        key = kind, self.plan.model.stack[layer].signature if layer else "", kept
        if key not in self.costs:
            self.costs[key] = cost_keys(self.plan, kind, layer, kept=kept)
        self.builder.op(OpId(kind, layer, micro=micro), "compute", reads, writes, **self.costs[key])

    def park(self, index: int, micro: int) -> None:
        """Sends the layer's input to the host, as soon as it is there."""
        self.builder.op(OpId("save_activations", str(index), micro=micro), "d2h", [self.inputs[index]], [self.homes[index]], bytes=self.hidden_bytes)

    def input_of(self, index: int, micro: int) -> str:
        """The layer's input on the device again, for the backward pass."""
        if index in self.parked:
            self.inputs[index] = slot = self.builder.acquire("device.checkpoints")
            self.builder.op(OpId("load_activations", str(index), micro=micro), "h2d", [self.homes[index]], [slot], bytes=self.hidden_bytes)
        return self.inputs[index]

    def forward(self, micro: int) -> str:
        """Embedding and all decoder layers; the last one's output."""
        x = self.builder.acquire("device.checkpoints")
        self.emit("embed", "", micro, [self.storage.weights(EMBEDDING, "f", micro), self.tokens[micro]], [x])
        for index in range(self.plan.model.layers):
            self.inputs[index] = x
            if index in self.parked:
                self.park(index, micro)
            weights = self.storage.weights(str(index), "f", micro)
            outputs = [self.builder.acquire("device.checkpoints" if index + 1 in self.first else "device.hidden")]
            if index in self.stored:
                self.saved[index] = self.builder.acquire("device.stored")
                outputs.append(self.saved[index])
            if index in self.attended:
                self.attention[index] = self.builder.acquire("device.attention")
                outputs.append(self.attention[index])
            self.emit("forward", str(index), micro, [weights, x], outputs)
            if index not in self.first or index in self.parked:
                self.builder.release(x)
            x = outputs[0]
        return x

    def head(self, micro: int, x: str) -> str:
        """Loss, forward and backward; the gradient of the last layer's output."""
        model, work = self.plan.model, self.plan.workload
        weights, (gradient, adding) = self.storage.weights(model.head, "h", micro), self.storage.gradient(model.head, "h", micro)
        dx = self.builder.acquire("device.hidden")
        reads = [weights, x, self.tokens[micro]] + ([gradient] if adding else [])
        self.emit("head", "", micro, reads, [gradient, dx, self.losses[micro]])
        self.builder.release(x)
        if micro == work.accumulation - 1:
            self.storage.losses_written(self.losses)
        self.storage.gradient_written(model.head, "h", micro, gradient)
        return dx

    def recompute(self, block: list[int], micro: int) -> None:
        """Runs the block's layers again, keeping their activations."""
        x = self.input_of(block[0], micro)
        for index in block:
            self.inputs[index] = x
            weights = self.storage.weights(str(index), "r", micro)
            self.saved[index] = self.builder.acquire("device.activations")
            outputs = [self.saved[index]] + ([self.builder.acquire("device.hidden")] if index != block[-1] else [])
            self.emit("recompute", str(index), micro, [weights, x, *self._kept(index)], outputs, kept=index in self.attended)
            x = outputs[-1]

    def _kept(self, index: int) -> list[str]:
        """The buffer of the layer's attention, where it is kept."""
        return [self.attention[index]] if index in self.attended else []

    def backward(self, index: int, micro: int, dx: str) -> str:
        """The gradient of the layer's input."""
        weights, (gradient, adding) = self.storage.weights(str(index), "b", micro), self.storage.gradient(str(index), "b", micro)
        below = self.builder.acquire("device.hidden")
        reads = [weights, self.saved[index], self.inputs[index], dx, *self._kept(index)] + ([gradient] if adding else [])
        self.emit("backward", str(index), micro, reads, [gradient, below])
        for slot in (self.saved[index], self.inputs[index], dx, *self._kept(index)):
            self.builder.release(slot)
        self.storage.gradient_written(str(index), "b", micro, gradient)
        return below

    def micro_batch(self, micro: int) -> None:
        dx = self.head(micro, self.forward(micro))
        for block in reversed(self.blocks):
            if block[0] not in self.stored:
                self.recompute(block, micro)
            for index in reversed(block):
                dx = self.backward(index, micro, dx)
        gradient, adding = self.storage.gradient(EMBEDDING, "b", micro)
        self.emit("embed_backward", "", micro, [self.tokens[micro], dx] + ([gradient] if adding else []), [gradient])
        self.builder.release(dx)
        self.storage.gradient_written(EMBEDDING, "b", micro, gradient)


def compute(builder: Builder, plan: Plan, storage: Storage) -> None:
    """Emits the step's compute ops, calling on `storage` for weights and gradients, then its update."""
    step = _Compute(builder, plan, storage)
    for micro in range(plan.workload.accumulation):
        step.micro_batch(micro)
    storage.update()


def declare(builder: Builder, plan: Plan, storage: Storage) -> None:
    """Makes the buffers of `compute`, and no op."""
    _Compute(builder, plan, storage)
