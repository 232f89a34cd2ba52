"""The compute of one optimizer step, layer by layer; where weights come from and gradients go is a `Storage`'s business.

For each micro-batch: embed; forward, keeping the input of every K-th decoder layer; head with loss, forward and backward; then block
by block from the end: run the block's K layers again keeping their activations, then backward through them; embedding's backward.
"""

from __future__ import annotations

import functools
from typing import Any, Protocol

from megatrain.simulator.plan import Plan
from megatrain.simulator.policies._builder import Builder
from megatrain.simulator.schedule import OpId
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING

SCALAR_BYTES = 8  # one fp32 value; 8 keeps pools of them aligned


class Storage(Protocol):
    """Where a policy keeps weights and gradients. Buffers are named by id."""

    def weights(self, layer: str, phase: str, micro: int) -> str:
        """A device buffer that holds the layer's weights at this point of the program."""

    def gradient(self, layer: str) -> tuple[str, bool]:
        """A device buffer for the layer's gradient, and whether the op is to add to what is there."""

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        """The gradient stands in `buffer`: send it where it belongs."""

    def update(self) -> None:
        """Every gradient of the step is there: clip and update."""


def contributions(plan: Plan, layer: str) -> int:
    """Gradients that `layer` gets in one step: one per micro-batch, two where embedding and head share it."""
    return plan.workload.accumulation * (2 if layer == EMBEDDING and plan.model.tied else 1)


def gradient_bytes(plan: Plan, layer: str) -> int:
    """Bytes a parameter of a layer's step gradient: fp32 where several are summed, the compute dtype otherwise."""
    return 4 if contributions(plan, layer) > 1 else DTYPE_BYTES[plan.workload.dtype]


def state(builder: Builder, plan: Plan, place: str) -> dict[tuple[str, str], str]:
    """Persistent buffers of every layer's weights, low plane, moments and gradients in `place`, by (class, layer)."""
    width = DTYPE_BYTES[plan.workload.dtype]
    sizes = {"weights": width, "low": 4 - width, "moments": 8}
    made = {}
    for layer in plan.model.stack.values():
        for name, per_parameter in {**sizes, "gradients": gradient_bytes(plan, layer.name)}.items():
            if per_parameter:
                made[name, layer.name] = builder.persistent(f"{place}.{name}", layer.name, per_parameter * layer.elements)
    return made


def update_operands(state: dict[tuple[str, str], str], layer: str, clip: str | None) -> tuple[list[str], list[str]]:
    """What an optimizer op of `layer` reads and writes."""
    reads = [state["gradients", layer]] + ([clip] if clip else [])
    return reads, [state[name, layer] for name in ("weights", "low", "moments") if (name, layer) in state]


def norm_scalars(builder: Builder, plan: Plan, place: str) -> dict[str, str]:
    """Persistent scalars for the layers' sums of squares (by layer) and for the clip coefficient (by `clip`); none without clipping."""
    if plan.workload.clipping == "none":
        return {}
    return {key: builder.persistent(f"{place}.norm", key, SCALAR_BYTES) for key in (*plan.model.stack, "clip")}


def compute(builder: Builder, plan: Plan, storage: Storage) -> None:
    """Emits the step's compute ops, calling on `storage` for weights and gradients, then its update."""
    model, work, interval = plan.model, plan.workload, plan.knobs.checkpoint_interval
    hidden_bytes = work.tokens * model.hidden * DTYPE_BYTES[work.dtype]
    blocks = [range(first, min(first + interval, model.layers)) for first in range(0, model.layers, interval)]
    longest = len(blocks[0])
    builder.slots("device.checkpoints", len(blocks), hidden_bytes)
    builder.slots("device.hidden", longest + 1, hidden_bytes)
    saved_bytes = max(model.saved_bytes(layer.name, work.tokens, work.dtype) for layer in model.decoders)
    builder.slots("device.activations", longest, saved_bytes, dynamic=True)
    tokens = [builder.persistent("device.tokens", str(micro), 2 * 8 * work.tokens) for micro in range(work.accumulation)]
    losses = [builder.persistent("device.losses", str(micro), SCALAR_BYTES) for micro in range(work.accumulation)]

    @functools.cache
    def sizes(kind: str, signature: str, layer: str) -> dict[str, Any]:
        """Of an op, by what its cost depends on."""
        flops = model.work(kind, layer, work).flops
        return {"flops": flops, "elements": 0 if flops else work.tokens * model.hidden, "shape": f"{signature}/{work.shape}"}

    examples = {layer.signature: layer.name for layer in reversed(model.decoders)}

    def emit(kind: str, layer: str, micro: int, reads: list[str], writes: list[str]) -> None:
        signature = model.stack[layer].signature if layer else model.shape
        builder.op(OpId(kind, layer, micro=micro), "compute", reads, writes, **sizes(kind, signature, examples.get(signature, "")))

    for micro in range(work.accumulation):
        embedding = storage.weights(EMBEDDING, "f", micro)
        x = builder.acquire("device.checkpoints")
        emit("embed", "", micro, [embedding, tokens[micro]], [x])
        inputs: dict[int, str] = {}
        for index in range(model.layers):
            inputs[index] = x
            weights = storage.weights(str(index), "f", micro)
            kept = (index + 1) % interval == 0 and index + 1 < model.layers
            y = builder.acquire("device.checkpoints" if kept else "device.hidden")
            emit("forward", str(index), micro, [weights, x], [y])
            if index % interval:
                builder.release(x)
            x = y

        weights, (gradient, adding) = storage.weights(model.head, "h", micro), storage.gradient(model.head)
        dx = builder.acquire("device.hidden")
        reads = [weights, x, tokens[micro]] + ([gradient] if adding else [])
        emit("head", "", micro, reads, [gradient, dx, losses[micro]])
        builder.release(x)
        storage.gradient_written(model.head, "h", micro, gradient)

        for block in reversed(blocks):
            x, saved = inputs[block[0]], {}
            for index in block:
                inputs[index] = x
                weights = storage.weights(str(index), "r", micro)
                saved[index] = builder.acquire("device.activations")
                outputs = [saved[index]] + ([builder.acquire("device.hidden")] if index != block[-1] else [])
                emit("recompute", str(index), micro, [weights, x], outputs)
                x = outputs[-1]
            for index in reversed(block):
                weights, (gradient, adding) = storage.weights(str(index), "b", micro), storage.gradient(str(index))
                below = builder.acquire("device.hidden")
                reads = [weights, saved[index], inputs[index], dx] + ([gradient] if adding else [])
                emit("backward", str(index), micro, reads, [gradient, below])
                for slot in (saved[index], inputs[index], dx):
                    builder.release(slot)
                dx = below
                storage.gradient_written(str(index), "b", micro, gradient)

        gradient, adding = storage.gradient(EMBEDDING)
        emit("embed_backward", "", micro, [tokens[micro], dx] + ([gradient] if adding else []), [gradient])
        builder.release(dx)
        storage.gradient_written(EMBEDDING, "b", micro, gradient)
    storage.update()
