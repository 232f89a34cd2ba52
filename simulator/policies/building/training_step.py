"""The compute ops of one optimizer step. A `ParameterStore` supplies weight and gradient buffers.

Micro-batches run in groups of `micro_batch_group`, one by default. All micro-batches of a group run
each step of this list, and each layer or block in it, before the next one begins:

1. Embedding.
2. Forward through one decoder layer after the other. Every K-th layer (`checkpoint_interval`) keeps
   its input on the device, or offloads it to host memory. Layers in `saved_activations` save all
   activations. Layers in `saved_attention` save their attention output and log-sum-exp. Layers that
   are also in `offloaded_attention` keep these in host memory.
3. Head with loss, forward and backward.
4. For each block of K layers, from the last to the first: recompute the block's layers to get their
   activations, then run backward through them. Saved activations are not recomputed, and neither is
   saved attention.
5. Backward of the embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from megatrain.simulator.base import plugins
from megatrain.simulator.model.layer import DTYPE_BYTES, EMBEDDING
from megatrain.simulator.model.layer_memory import max_saved_bytes
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.schedule import SAVED_ACTIVATIONS, OpId
from megatrain.simulator.schedule.arithmetic import SCALAR_BYTES, blocks_of, cost_keys, layer_state
from megatrain.simulator.schedule.plan import Plan
from megatrain.simulator.schedule.update_layout import update_layout


class ParameterStore(Protocol):
    """The interface between `compute` and a policy, which decides where weights and gradients are.

    `compute` calls these methods in program order. Each method may emit ops, such as copies, sums
    and updates. Buffers are given by their ids. `phase` is the phase of an `OpId` (`f` forward, `h`
    head, `r` recompute, `b` backward), and `micro` is the index of the micro-batch.
    """

    def weights(self, layer: str, phase: str, micro: int) -> str:
        """Returns a device buffer that holds the layer's weights at this point of the program."""

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        """Returns a device buffer for the layer's gradient, and whether to add to its content."""

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        """Takes over the gradient that was just written to `buffer`."""

    def losses_written(self, losses: list[str]) -> None:
        """Receives the buffers of all losses of the step, once all of them are written.

        `compute` calls it before `gradient_written` for any gradient of the last micro-batch.
        """

    def update(self) -> None:
        """Clips and updates. Called once every gradient of the step has been written."""


def state(
    builder: Builder, plan: Plan, place: str, on_device: Collection[str] = ()
) -> dict[tuple[str, str], str]:
    """Makes persistent buffers for the state of every layer: in `place`, which is `device` or
    `host`, and for the layers in `on_device` on the device.

    Returns their ids by (class of data, layer). The classes are `weights`, `master_low`, `moments`
    and `gradients`, without those that a layer does not have.
    """
    buffers: dict[tuple[str, str], str] = {}
    for layer, spec in plan.model.stack.items():
        side = "device" if layer in on_device else place
        for name, part in layer_state(plan, layer).items():
            if part.bytes:
                buffers[name, layer] = builder.persistent(
                    f"{side}.{name}", layer, part.whole(spec.elements), name, part.dtype
                )
    return buffers


def update_workspace(builder: Builder, plan: Plan) -> dict[str, list[str]]:
    """Makes a buffer for the temporary tensors of updates on the device.

    Returns layer -> a list with the buffer's id, or an empty list if the layer's update needs no
    temporary tensors. All layers share one buffer, because updates run one after the other.
    """
    sizes = _workspaces(plan.model, plan.workload.optimizer)
    if not any(sizes.values()):
        return {layer: [] for layer in sizes}
    buffer = builder.persistent(
        "device.update_workspace", "all", max(sizes.values()), "workspace", matrix_products=True
    )
    return {layer: [buffer] if size else [] for layer, size in sizes.items()}


@plugins.cached(maxsize=4)
def _workspaces(model: ModelSpec, optimizer: str) -> Mapping[str, int]:
    """Returns layer -> the bytes of the temporary tensors of its update on the device. Cached
    because a search asks for it with each plan.
    """
    return {
        layer: layout.workspace if (layout := update_layout(optimizer, spec)) else 0
        for layer, spec in model.stack.items()
    }


def update_flops(plan: Plan, layer: str, first: int, count: int) -> dict[str, Any]:
    """Returns the fields `flops` and `high_priority` of an update op that multiplies matrices, and
    an empty dict for other update ops.

    An op that multiplies matrices has many short kernels. Without priority, each of them would wait
    for a long kernel of compute.
    """
    layout = update_layout(plan.workload.optimizer, plan.model.stack[layer])
    flops = layout.flops(first, count) if layout and layout.matrices else 0
    return {"flops": flops, "high_priority": True} if flops else {}


def update_operands(
    state: dict[tuple[str, str], str], layer: str, clip: str
) -> tuple[list[str], list[str]]:
    """Returns (buffers that an update of `layer` reads, buffers that it writes).

    `state` has the layers' buffers by (class of data, layer), and `clip` is the buffer with the
    clip coefficient or factors.
    """
    return [state["gradients", layer], clip], [
        state[name, layer]
        for name in ("weights", "master_low", "moments")
        if (name, layer) in state
    ]


class _Buffers:
    """Makes the buffers of one step's compute."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        self.builder, self.plan = builder, plan
        model, work = plan.model, plan.workload
        self.group = group = plan.knobs.micro_batch_group
        self.hidden_bytes = work.tokens * model.carried * DTYPE_BYTES[work.dtype]
        self.blocks = blocks_of(plan)
        self.saved_layers = {int(layer) for layer in plan.placed("saved_activations")}
        """Layers that save all activations."""
        offloaded = plan.placed("offloaded_inputs")
        self.offloaded = {
            block[0] for block in self.blocks if str(block[0]) in offloaded
        } - self.saved_layers
        """Layers whose input waits in host memory for the backward pass."""
        self.first = {block[0] for block in self.blocks}
        """First layers of the blocks."""
        self.attended = {int(layer) for layer in plan.placed("saved_attention")} - self.saved_layers
        """Layers that save only their attention."""
        self.attention_offloaded = {
            int(layer) for layer in plan.placed("offloaded_attention")
        } & self.attended
        """Layers whose saved attention waits in host memory for the backward pass."""
        longest = max(
            (len(block) for block in self.blocks if block[0] not in self.saved_layers), default=0
        )
        saved = max_saved_bytes(model, msgspec.structs.replace(work, compiled=False))
        builder.slots(
            "device.checkpoints",
            # Even if all inputs are offloaded, the inputs of one layer and one output are on the
            # device.
            group * (len(self.blocks) - len(self.offloaded))
            + min(group * len(self.offloaded), group + 1),
            self.hidden_bytes,
            "hidden",
            work.dtype,
            scales_with_tokens=True,
        )
        builder.slots(
            "device.hidden",
            max(longest, 1) + group,
            self.hidden_bytes,
            "hidden",
            work.dtype,
            scales_with_tokens=True,
        )
        builder.slots(
            "device.activations",
            longest,
            saved,
            "activations",
            dynamic=True,
            scales_with_tokens=True,
            knob="checkpoint_interval",
        )
        builder.slots(
            SAVED_ACTIVATIONS,
            group * len(self.saved_layers),
            saved,
            "saved_activations",
            dynamic=True,
            scales_with_tokens=True,
        )
        self.attention_bytes = {
            index: model.kept_attention(str(index), work).bytes for index in self.attended
        }
        together = max(len(self.attention_offloaded.intersection(block)) for block in self.blocks)
        builder.slots(
            "device.attention",
            # The offloaded attention of one block is on the device, plus one slot that is copied.
            group * (len(self.attended) - len(self.attention_offloaded))
            + min(group * len(self.attention_offloaded), together + 1),
            max(self.attention_bytes.values(), default=0),
            "attention",
            scales_with_tokens=True,
        )
        self.homes = {
            (index, place): builder.persistent(
                "host.offloaded_inputs",
                str(index) if group == 1 else f"{index}.{place}",
                self.hidden_bytes,
                "hidden",
                work.dtype,
                scales_with_tokens=True,
                per_gpu=True,
            )
            for index in sorted(self.offloaded)
            for place in range(group)
        }
        """(layer, place of the micro-batch in its group) -> the buffer with its input."""
        self.attention_homes = {
            (index, place): builder.persistent(
                "host.offloaded_attention",
                str(index) if group == 1 else f"{index}.{place}",
                self.attention_bytes[index],
                "attention",
                scales_with_tokens=True,
                per_gpu=True,
            )
            for index in sorted(self.attention_offloaded)
            for place in range(group)
        }
        """(layer, place of the micro-batch in its group) -> the buffer with its saved attention."""
        token_bytes = work.token_rows * 8 * work.tokens
        micros = [str(micro) for micro in range(plan.micro_batches)]
        self.tokens = [
            builder.persistent(
                "device.tokens", micro, token_bytes, "tokens", scales_with_tokens=True
            )
            for micro in micros
        ]
        self.losses = [
            builder.persistent("device.losses", micro, SCALAR_BYTES, "losses") for micro in micros
        ]


class _Compute(_Buffers):
    """Makes the buffers of one step's compute and emits its ops."""

    def __init__(self, builder: Builder, plan: Plan, storage: ParameterStore) -> None:
        super().__init__(builder, plan)
        self.storage, self.stack = storage, plan.model.stack
        self.costs: dict[tuple[str, str, bool, bool], dict[str, Any]] = {}
        """(kind, layer signature, kept, read) -> the fields of an op that its cost depends on."""
        self.inputs: dict[tuple[int, int], str] = {}
        """(layer, micro-batch) -> the buffer with its input."""
        self.saved: dict[tuple[int, int], str] = {}
        """(layer, micro-batch) -> the slot with its activations."""
        self.attention: dict[tuple[int, int], str] = {}
        """(layer, micro-batch) -> the slot with its saved attention."""

    def emit(
        self,
        kind: str,
        layer: str,
        micro: int,
        reads: list[str],
        writes: list[str],
        *,
        kept: bool = False,
        read: bool = False,
    ) -> None:
        """Emits a compute op. `kept` and `read` are the arguments of `cost_keys`."""
        key = kind, self.stack[layer].signature if layer else "", kept, read
        if key not in self.costs:
            self.costs[key] = cost_keys(self.plan, kind, layer, kept=kept, read=read)
        self.builder.op(OpId(kind, layer, micro=micro), "compute", reads, writes, **self.costs[key])

    def offload_input(self, index: int, micro: int) -> None:
        """Emits the copy of the layer's input to the host."""
        self.builder.op(
            OpId("save_activations", str(index), micro=micro),
            "d2h",
            [self.inputs[index, micro]],
            [self.homes[index, micro % self.group]],
            bytes=self.hidden_bytes,
        )

    def input_of(self, index: int, micro: int) -> str:
        """Returns the slot with the layer's input for the backward pass, and loads the input if it
        was offloaded.
        """
        if index in self.offloaded:
            self.inputs[index, micro] = slot = self.builder.acquire("device.checkpoints")
            self.builder.op(
                OpId("load_activations", str(index), micro=micro),
                "h2d",
                [self.homes[index, micro % self.group]],
                [slot],
                bytes=self.hidden_bytes,
            )
        return self.inputs[index, micro]

    def offload_attention(self, index: int, micro: int) -> None:
        """Emits the copy of the layer's saved attention to the host, and releases its slot."""
        slot = self.attention[index, micro]
        self.builder.op(
            OpId("save_attention", str(index), micro=micro),
            "d2h",
            [slot],
            [self.attention_homes[index, micro % self.group]],
            bytes=self.attention_bytes[index],
        )
        self.builder.release(slot)

    def load_attention(self, index: int, micro: int) -> None:
        """Emits the copy of the layer's saved attention from the host to a slot."""
        self.attention[index, micro] = slot = self.builder.acquire("device.attention")
        self.builder.op(
            OpId("load_attention", str(index), micro=micro),
            "h2d",
            [self.attention_homes[index, micro % self.group]],
            [slot],
            bytes=self.attention_bytes[index],
        )

    def embed(self, micro: int) -> str:
        """Emits the embedding. Returns its output."""
        x = self.builder.acquire("device.checkpoints")
        weights = self.storage.weights(EMBEDDING, "f", micro)
        self.emit("embed", "", micro, [weights, self.tokens[micro]], [x])
        return x

    def forward(self, index: int, micro: int, x: str) -> str:
        """Emits the forward pass of one decoder layer with input `x`. Returns its output."""
        self.inputs[index, micro] = x
        if index in self.offloaded:
            self.offload_input(index, micro)
        weights = self.storage.weights(str(index), "f", micro)
        outputs = [
            self.builder.acquire(
                "device.checkpoints" if index + 1 in self.first else "device.hidden"
            )
        ]
        if index in self.saved_layers:
            self.saved[index, micro] = self.builder.acquire(SAVED_ACTIVATIONS)
            outputs.append(self.saved[index, micro])
        if index in self.attended:
            self.attention[index, micro] = self.builder.acquire("device.attention")
            outputs.append(self.attention[index, micro])
        self.emit("forward", str(index), micro, [weights, x], outputs)
        if index in self.attention_offloaded:
            self.offload_attention(index, micro)
        if index not in self.first or index in self.offloaded:
            self.builder.release(x)
        return outputs[0]

    def head(self, micro: int, x: str) -> str:
        """Emits head and loss, forward and backward. Returns the gradient of the head's input."""
        model = self.plan.model
        weights, (gradient, adding) = (
            self.storage.weights(model.head, "h", micro),
            self.storage.gradient(model.head, "h", micro),
        )
        dx = self.builder.acquire("device.hidden")
        reads = [weights, x, self.tokens[micro]] + ([gradient] if adding else [])
        self.emit("head", "", micro, reads, [gradient, dx, self.losses[micro]])
        self.builder.release(x)
        if micro == self.plan.micro_batches - 1:
            self.storage.losses_written(self.losses)
        self.storage.gradient_written(model.head, "h", micro, gradient)
        return dx

    def recompute(self, block: list[int], micro: int) -> None:
        """Emits the recompute of the block's layers, which saves their activations."""
        x = self.input_of(block[0], micro)
        for index in block:
            self.inputs[index, micro] = x
            if index in self.attention_offloaded:
                self.load_attention(index, micro)
            weights = self.storage.weights(str(index), "r", micro)
            self.saved[index, micro] = self.builder.acquire("device.activations")
            outputs = [self.saved[index, micro]] + (
                [self.builder.acquire("device.hidden")] if index != block[-1] else []
            )
            self.emit(
                "recompute",
                str(index),
                micro,
                [weights, x, *self._kept(index, micro)],
                outputs,
                kept=index in self.attended,
                read=len(outputs) > 1,
            )
            x = outputs[-1]

    def _kept(self, index: int, micro: int) -> list[str]:
        """Returns the slot of the layer's saved attention, in a list that may be empty."""
        return [self.attention[index, micro]] if index in self.attended else []

    def backward(self, index: int, micro: int, dx: str) -> str:
        """Emits the layer's backward pass. Returns the gradient of its input."""
        weights, (gradient, adding) = (
            self.storage.weights(str(index), "b", micro),
            self.storage.gradient(str(index), "b", micro),
        )
        below = self.builder.acquire("device.hidden")
        used = [self.saved[index, micro], self.inputs[index, micro], dx, *self._kept(index, micro)]
        reads = [weights, *used] + ([gradient] if adding else [])
        self.emit("backward", str(index), micro, reads, [gradient, below])
        for slot in used:
            self.builder.release(slot)
        self.storage.gradient_written(str(index), "b", micro, gradient)
        return below

    def embed_backward(self, micro: int, dx: str) -> None:
        """Emits the backward pass of the embedding."""
        gradient, adding = self.storage.gradient(EMBEDDING, "b", micro)
        self.emit(
            "embed_backward",
            "",
            micro,
            [self.tokens[micro], dx] + ([gradient] if adding else []),
            [gradient],
        )
        self.builder.release(dx)
        self.storage.gradient_written(EMBEDDING, "b", micro, gradient)

    def micro_batches(self, group: Sequence[int]) -> None:
        """Emits forward and backward of a group of micro-batches."""
        x = {micro: self.embed(micro) for micro in group}
        for index in range(self.plan.model.layers):
            x |= {micro: self.forward(index, micro, x[micro]) for micro in group}
        dx = {micro: self.head(micro, x[micro]) for micro in group}
        for block in reversed(self.blocks):
            for micro in group:
                if block[0] not in self.saved_layers:
                    self.recompute(block, micro)
                for index in reversed(block):
                    dx[micro] = self.backward(index, micro, dx[micro])
        for micro in group:
            self.embed_backward(micro, dx[micro])


def compute(builder: Builder, plan: Plan, storage: ParameterStore) -> None:
    """Emits the compute ops of one step with the buffers of `storage`, then the update."""
    step = _Compute(builder, plan, storage)
    for first in range(0, plan.micro_batches, step.group):
        step.micro_batches(range(first, first + step.group))
    storage.update()


def declare(builder: Builder, plan: Plan) -> None:
    """Makes the buffers of `compute` without emitting ops."""
    _Buffers(builder, plan)
