"""The policy `megatrain_code`: the paper's published code as it runs on one GPU.

Prediction only. It follows the code (arXiv 2604.05091, April 2026) and was compared with runs of
it. The code differs from the paper's description, which is the policy `double_buffer`. Numbers in
parentheses are bytes read + bytes written per parameter.

* Embedding, norm and head live on the device with their gradients. A decoder layer is copied into
  one of two flat device buffers, then tensor by tensor into one of two template layers, which frees
  the flat buffer. The next layer can therefore load while this one computes.
* Every 4th layer is a checkpoint, independent of the knobs. In backward, each block first runs all
  its layers forward without gradients. Then each layer is loaded again, run forward a third time
  and run backward. For N parameters, this takes 10 N FLOPs per token, and copies 6 bytes per
  parameter to the device.
* The loss is computed in chunks of 128 positions, with one backward at the end. The log-softmax of
  every chunk stays until then (2 bytes per logit). During backward there are also two gradients of
  a chunk of logits, and the head's gradient twice.
* Gradients are copied tensor by tensor into one of 12 pinned staging buffers. One thread copies
  them out in bf16 (2 + 2), or adds them to earlier ones (4 + 2).
* After backward, these run one after the other while the GPU is idle: clipping, Adam (bf16 weights
  and fp32 moments, 22 bytes), a copy of decoder weights to their pinned copies (2 + 2), a copy of
  the other weights to the device, zeroing of gradients (2), and returning their pages to the
  system. The copy to the device is from pageable memory: one thread copies to pinned memory at 13
  GB/s, and then the link copies to the device. Together they reach 10.6 GB/s (H200, 2026-11-21).

Host bytes per parameter:

* weights: 2, pageable
* gradients: 2, pageable
* moments: 8, pageable
* second copy of decoder layers: 2, pinned

The pinned staging buffers are needed in addition: 14 of a decoder layer's size, of which gradients
use 12, and 2 of the size of the embedding or the head, whichever is larger.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from megatrain.simulator.model.layer import DTYPE_BYTES, EMBEDDING
from megatrain.simulator.model.layer_memory import max_saved_bytes
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.slot_cache import pool_of
from megatrain.simulator.policies.offload_peers import rounding, workspace
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.schedule import BufferDtype, DataClass, OpId, Schedule
from megatrain.simulator.schedule.arithmetic import cost_keys
from megatrain.simulator.schedule.plan import Plan

_POSITIONS = 128
"""Positions of a loss chunk."""
_FREE_SHARE = 0.41
"""Time to return memory to the system, as a share of the time in which one thread copies it. See
`docs/lab_notes.md`, *Freeing host memory*."""


class Ablation(NamedTuple):
    """Settings that the paper's ablations change, or that differ between versions of its code.

    The defaults are those of the code of April 2026.
    """

    buffers: int = 2
    """Flat buffers and templates. With 1, a load waits until the layer before it has run."""
    staging_buffers: int = 12
    """Pinned staging buffers for the gradients of decoder layers."""
    interval: int = 4
    """Decoder layers per checkpoint."""
    copies: bool = True
    """Whether every decoder layer has a second copy in pinned memory. Versions before 2026-04-17
    (commit 5cf47ac) instead packed each layer into one of two pinned buffers before every load,
    with all threads, while the layer before it computed. The paper's host memory agrees with those
    versions: in Figure 5, which was measured after gradients are freed, it grows by 10 bytes per
    parameter."""
    packs: bool = False
    """Whether one thread packs each layer (2 + 2) when its flat device buffer is free, and copies
    it afterwards. Versions before 2026-04-17 pack in their Python thread. The number of threads of
    PyTorch's copies there is not known, and one is the slowest case."""


class _Code:
    """Emits the ops of one step."""

    def __init__(self, plan: Plan, ablation: Ablation) -> None:
        self.plan, self.model, self.work = plan, plan.model, plan.workload
        self.ablation, self.interval = ablation, ablation.interval
        self.builder = builder = Builder(plan.policy)
        self.stack, self.width = self.model.stack, DTYPE_BYTES[self.work.dtype]
        self.parameters = sum(layer.elements for layer in self.stack.values())
        dtype, kinds = self.work.dtype, list[tuple[DataClass, BufferDtype, int]]()
        kinds += [
            ("weights", dtype, self.width),
            ("gradients", dtype, self.width),
            ("moments", "fp32", 8),
        ]
        self.host = {
            (name, layer.name): builder.persistent(
                f"host.{name}", layer.name, size * layer.elements, name, kind
            )
            for name, kind, size in kinds
            for layer in self.stack.values()
        }
        layer = self.width * max(spec.elements for spec in self.model.decoders)
        others = {
            name: self.width * spec.elements
            for name, spec in self.stack.items()
            if spec.kind != "decoder"
        }
        self.flats = {
            str(index): self.host["weights", str(index)] for index in range(self.model.layers)
        }
        if ablation.copies:
            self.flats = {
                name: builder.persistent("host.flats", name, layer, "weights", dtype, staging=True)
                for name in self.flats
            }
            rounding(builder, "weights", [layer] * self.model.layers)
        self.device = {
            name: builder.persistent("device.vocabulary", name, size, "weights", dtype)
            for name, size in others.items()
        }
        self.gradients = {
            name: builder.persistent("device.vocabulary_gradients", name, size, "gradients", dtype)
            for name, size in others.items()
        }
        builder.slots(
            "host.gradient_staging",
            ablation.staging_buffers,
            layer,
            "gradients",
            dtype,
            staging=True,
        )
        builder.slots(
            "host.gradient_staging_vocabulary",
            2,
            max(others.values()),
            "gradients",
            dtype,
            staging=True,
        )
        builder.persistent("host.spare_staging", "", 2 * layer, "gradients", dtype, staging=True)
        rounding(
            builder,
            "staging_buffers",
            [layer] * (ablation.staging_buffers + 2) + [max(others.values())] * 2,
        )
        builder.slots("device.flats", ablation.buffers, layer, "weights", dtype, staging=True)
        builder.slots("device.templates", ablation.buffers, layer, "weights", dtype)
        builder.slots("device.layer_gradients", 2, layer, "gradients", dtype)
        hidden = self.work.tokens * self.model.carried * self.width
        blocks = -(-self.model.layers // self.interval)
        builder.slots(
            "device.checkpoints", blocks + 1, hidden, "hidden", dtype, scales_with_tokens=True
        )
        builder.slots(
            "device.hidden", self.interval + 2, hidden, "hidden", dtype, scales_with_tokens=True
        )
        saved = max_saved_bytes(self.model, msgspec.structs.replace(self.work, compiled=False))
        builder.slots(
            "device.activations", 1, saved, "activations", dynamic=True, scales_with_tokens=True
        )
        logits = self.width * self.work.tokens * self.model.vocabulary
        chunk = (
            self.width
            * self.work.batch
            * min(_POSITIONS, self.work.sequence)
            * self.model.vocabulary
        )
        # In a block's backward, the logits are gone and their memory is reused.
        reused = saved + workspace(builder, plan) + 2 * layer + self.interval * hidden
        builder.persistent(
            "device.logits",
            "loss",
            max(logits + 2 * chunk + self.device_bytes(self.model.head) - reused, 0),
            "workspace",
        )

    def device_bytes(self, layer: str) -> int:
        """Returns the bytes of the layer's weights in the compute dtype."""
        return self.width * self.stack[layer].elements

    def load(self, layer: str, phase: str, micro: int) -> str:
        """Emits the copies of the layer to the device. Returns the template that holds it, which
        the caller releases.
        """
        size = self.device_bytes(layer)
        flat = self.builder.acquire("device.flats")
        template = self.builder.acquire("device.templates")
        targets = [flat, template] if self.ablation.buffers == 1 else [flat]
        if self.ablation.packs:  # on the lane of the copy, because the two run one after the other
            self.builder.op(
                OpId("thread_pass", layer, phase, micro, 0),
                "h2d",
                [self.flats[layer]],
                targets,
                bytes=2 * size,
            )
        self.builder.op(
            OpId("load_weights", layer, phase, micro, 0),
            "h2d",
            [self.flats[layer]],
            targets,
            bytes=size,
        )
        self.builder.op(
            OpId("device_pass", layer, phase, micro), "compute", [flat], [template], bytes=2 * size
        )
        self.builder.release(flat)
        return template

    def run(
        self, kind: str, layer: str, phase: str, micro: int, reads: list[str], writes: list[str]
    ) -> None:
        """Emits a compute op."""
        self.builder.op(
            OpId(kind, layer, phase, micro),
            "compute",
            reads,
            writes,
            # The code computes whole layers again.
            **cost_keys(self.plan, kind, layer, read=kind == "recompute"),
        )

    def save(self, layer: str, phase: str, micro: int, gradient: str) -> None:
        """Emits the copy of a gradient into a staging buffer, and the pass in which one thread
        moves it to the host's gradients.
        """
        size, target = self.device_bytes(layer), self.host["gradients", layer]
        staging = self.builder.acquire(pool_of("host.gradient_staging", self.stack[layer]))
        self.builder.op(
            OpId("save_gradients", layer, phase, micro, 0), "d2h", [gradient], [staging], bytes=size
        )
        adds = micro > 0
        self.builder.op(
            OpId("thread_pass", layer, phase, micro),
            "cpu",
            [staging] + ([target] if adds else []),
            [target],
            bytes=(3 if adds else 2) * size,
        )
        self.builder.release(staging)

    def micro_batch(self, micro: int) -> None:
        """Emits forward and backward of one micro-batch."""
        builder, layers, head = self.builder, self.model.layers, self.model.head
        tokens = builder.persistent(
            "device.tokens", str(micro), 2 * 8 * self.work.tokens, "tokens", scales_with_tokens=True
        )
        x, checkpoints = builder.acquire("device.checkpoints"), {}
        self.run("embed", "", "", micro, [self.device[EMBEDDING], tokens], [x])
        for index in range(layers):
            checkpoints.update({index: x} if index % self.interval == 0 else {})
            template = self.load(str(index), "f", micro)
            kept = (index + 1) % self.interval == 0 or index + 1 == layers
            y = builder.acquire("device.checkpoints" if kept else "device.hidden")
            self.run("forward", str(index), "", micro, [template, x], [y])
            builder.release(template)
            if index not in checkpoints:
                builder.release(x)
            x = y
        dx = builder.acquire("device.hidden")
        self.run("head", "", "", micro, [self.device[head], x, tokens], [self.gradients[head], dx])
        builder.release(x)
        if not self.model.tied:
            self.save(head, "h", micro, self.gradients[head])
        for first in reversed(range(0, layers, self.interval)):
            dx = self.block(
                range(first, min(first + self.interval, layers)), checkpoints[first], dx, micro
            )
        reads = [tokens, dx] + ([self.gradients[EMBEDDING]] if self.model.tied else [])
        self.run("embed_backward", "", "", micro, reads, [self.gradients[EMBEDDING]])
        builder.release(dx)
        self.save(EMBEDDING, "b", micro, self.gradients[EMBEDDING])

    def block(self, block: range, x: str, dx: str, micro: int) -> str:
        """Emits the backward pass of a block, and returns the gradient of its input.

        `x` holds the block's input, and `dx` the gradient of its output.
        """
        builder, inputs = self.builder, {block[0]: x}
        for index in block:  # the code also runs the last layer, though its output is not used
            template = self.load(str(index), "r", micro)
            inputs[index + 1] = builder.acquire("device.hidden")
            self.run(
                "recompute", str(index), "", micro, [template, inputs[index]], [inputs[index + 1]]
            )
            builder.release(template)
        builder.release(inputs[block[-1] + 1])
        for index in reversed(block):
            layer, template, saved = (
                str(index),
                self.load(str(index), "b", micro),
                builder.acquire("device.activations"),
            )
            self.run("recompute", layer, "b", micro, [template, inputs[index]], [saved])
            below, gradient = (
                builder.acquire("device.hidden"),
                builder.acquire("device.layer_gradients"),
            )
            self.run(
                "backward",
                layer,
                "",
                micro,
                [template, saved, inputs[index], dx],
                [gradient, below],
            )
            for slot in (saved, inputs[index], dx):
                builder.release(slot)
            self.save(layer, "b", micro, gradient)
            builder.release(template)
            builder.release(gradient)
            dx = below
        return dx

    def update(self) -> None:
        """Emits everything after the backward pass, one op after the other."""
        names = list(self.stack)
        weights, gradients, moments = (
            [self.host[name, layer] for layer in names]
            for name in ("weights", "gradients", "moments")
        )
        if self.work.clipping == "global":
            self.builder.op(
                OpId("thread_pass"),
                "cpu",
                gradients,
                gradients,
                bytes=self.width * self.parameters,
                parameters=self.parameters,
            )
            self.builder.op(
                OpId("host_pass", chunk=0), "cpu", gradients, gradients, bytes=4 * self.parameters
            )
        adam_bytes = 3 * self.width + 16
        self.builder.op(
            OpId("cpu_adam"),
            "cpu",
            gradients,
            weights + moments,
            parameters=self.parameters,
            bytes=adam_bytes * self.parameters,
        )
        flats, decoder = (
            list(self.flats.values()),
            sum(self.device_bytes(layer) for layer in self.flats),
        )
        if self.ablation.copies:
            self.builder.op(OpId("host_pass", chunk=1), "cpu", weights, flats, bytes=2 * decoder)
        for chunk, (layer, buffer) in enumerate(self.device.items(), 1):
            # A copy from pageable memory: a thread first copies it to pinned memory.
            source, size = self.host["weights", layer], self.device_bytes(layer)
            self.builder.op(
                OpId("thread_pass", chunk=chunk),
                "cpu",
                [source, *flats, *self.device.values()],
                [buffer],
                bytes=size,
            )
            self.builder.op(OpId("load_weights", layer), "h2d", [source], [buffer], bytes=size)
        self.builder.op(
            OpId("host_pass", chunk=2),
            "cpu",
            list(self.device.values()),
            gradients,
            bytes=self.width * self.parameters,
        )
        self.builder.op(
            OpId("thread_pass", chunk=3),
            "cpu",
            gradients,
            gradients,
            bytes=round(_FREE_SHARE * self.width * self.parameters),
        )


def lower_ablated(plan: Plan, ablation: Ablation) -> Schedule:
    """Returns the schedule of a step with the code's defaults changed by `ablation`."""
    code = _Code(plan, ablation)
    for micro in range(plan.workload.accumulation):
        code.micro_batch(micro)
    code.update()
    return code.builder.build()


class MegatrainCode(Policy):
    """The published code with its defaults."""

    name = "megatrain_code"
    prediction_only = True

    def lower(self, plan: Plan) -> Schedule:
        return lower_ablated(plan, Ablation())
