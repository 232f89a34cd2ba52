"""The published code of the paper (arXiv 2604.05091, April 2026) as it really runs on one GPU, not as the paper tells it. Prediction only.

Read and executed; `double_buffer` is what the paper describes.

* Embedding, norm and head live on the device with their gradients. A decoder layer crosses the link into one of two flat buffers and is then
  copied, tensor by tensor, into one of two templates, which frees the flat buffer; so the next load runs beside the layer.
* A checkpoint every 4 layers, whatever the knobs say. Backward, block by block: every layer again without gradients, then each layer loaded
  once more, run forward a third time, and backward. 10 N FLOPs a token, 6 B a parameter up.
* Loss in chunks of 128 positions, but one backward at its end: the log-softmax of every chunk stays, 2 B a logit. Beside it, during that
  backward, are two gradients of a chunk of logits, and the head's gradient twice.
* Gradients go tensor by tensor into one of 12 pinned slabs, from which one thread copies them (2 + 2), or adds them (2 + 4), in bf16.
* After backward, in series, the GPU idle: clip, Adam (bf16 weights, fp32 moments: 22 B), copy decoder weights into the pinned flats (2 + 2)
  and the others to the device, zero the gradients (2) and give their pages back. What goes to the device is pageable: 10.6 GB/s measured (H200, 2026-11-21), as a
  thread that reads it at 13 GB/s and the link, one after the other, give.

Host bytes a parameter: weights 2, gradients 2, moments 8, pageable; decoder layers a second time, 2, pinned. 12 slabs and 2 more of the
layer's size, one of the head's, one of the embedding's, pinned.
"""

from __future__ import annotations

from typing import NamedTuple

from megatrain.simulator.arithmetic import cost_keys
from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.offload_peers import rounding, workspace
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.schedule import BufferDtype, DataClass, OpId, Schedule
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING

_POSITIONS = 128
_FREE_SHARE = 0.41
"""Of the time in which a thread copies memory, what giving it back takes: 130 ns a page of 4 KiB, 31.5 GB/s (munmap of touched pages on a Xeon of 2.8 GHz,
2026-11-21), where a copy moves 13 GB/s. Zeroing and freeing took 0.5 s at 7B on 64 cores (H200, 2026-11-21): 0.09 and 0.48 here."""


class Ablation(NamedTuple):
    """What the paper's ablations and its code's versions change; the defaults are those of April 2026."""

    buffers: int = 2
    """flat buffers and templates; with one, a load waits until the layer before has run"""
    slabs: int = 12
    interval: int = 4
    copies: bool = True
    """every decoder layer a second time in pinned memory. An earlier public version (undated), with which the paper's host memory agrees (Figure 5 grows by 10 bytes a parameter,
    read when gradients are freed), packed each layer into one of two pinned buffers before every load: on all threads, hidden by the layer before"""


class _Code:
    """Emits the step; every op's buffers are its arguments."""

    def __init__(self, plan: Plan, ablation: Ablation) -> None:
        self.plan, self.model, self.work, self.ablation, self.interval = plan, plan.model, plan.workload, ablation, ablation.interval
        self.builder = builder = Builder(plan.policy)
        self.stack, self.width = self.model.stack, DTYPE_BYTES[self.work.dtype]
        self.parameters = sum(layer.elements for layer in self.stack.values())
        dtype, kinds = self.work.dtype, list[tuple[DataClass, BufferDtype, int]]()
        kinds += [("weights", dtype, self.width), ("gradients", dtype, self.width), ("moments", "fp32", 8)]
        self.host = {
            (name, layer.name): builder.persistent(f"host.{name}", layer.name, size * layer.elements, name, kind)
            for name, kind, size in kinds for layer in self.stack.values()
        }  # fmt: skip
        layer = self.width * max(spec.elements for spec in self.model.decoders)
        others = {name: self.width * spec.elements for name, spec in self.stack.items() if spec.kind != "decoder"}
        self.flats = {str(index): self.host["weights", str(index)] for index in range(self.model.layers)}
        if ablation.copies:
            self.flats = {name: builder.persistent("host.flats", name, layer, "weights", dtype, staging=True) for name in self.flats}
            rounding(builder, "weights", [layer] * self.model.layers)
        self.device = {name: builder.persistent("device.vocabulary", name, size, "weights", dtype) for name, size in others.items()}
        self.gradients = {name: builder.persistent("device.vocabulary_gradients", name, size, "gradients", dtype) for name, size in others.items()}
        builder.slots("host.gradient_slabs", ablation.slabs, layer, "gradients", dtype, staging=True)
        builder.slots("host.gradient_slabs_vocabulary", 2, max(others.values()), "gradients", dtype, staging=True)
        builder.persistent("host.spare_slabs", "", 2 * layer, "gradients", dtype, staging=True)
        rounding(builder, "slabs", [layer] * (ablation.slabs + 2) + [max(others.values())] * 2)
        builder.slots("device.flats", ablation.buffers, layer, "weights", dtype, staging=True)
        builder.slots("device.templates", ablation.buffers, layer, "weights", dtype)
        builder.slots("device.layer_gradients", 2, layer, "gradients", dtype)
        hidden = self.work.tokens * self.model.hidden * self.width
        blocks = -(-self.model.layers // self.interval)
        builder.slots("device.checkpoints", blocks + 1, hidden, "hidden", dtype, scales_with_tokens=True)
        builder.slots("device.hidden", self.interval + 2, hidden, "hidden", dtype, scales_with_tokens=True)
        saved = self.model.most_saved_bytes(self.work.tokens, self.work.sequence, self.work.dtype)
        builder.slots("device.activations", 1, saved, "activations", dynamic=True, scales_with_tokens=True)
        logits = self.width * self.work.tokens * self.model.vocabulary
        chunk = self.width * self.work.batch * min(_POSITIONS, self.work.sequence) * self.model.vocabulary
        beside = saved + workspace(builder, plan) + 2 * layer + self.interval * hidden  # of a block's backward, when the logits are gone
        builder.persistent("device.logits", "loss", max(logits + 2 * chunk + self.device_bytes(self.model.head) - beside, 0), "workspace")
        self.loaded = self.passes = 0

    def device_bytes(self, layer: str) -> int:
        return self.width * self.stack[layer].elements

    def load(self, layer: str, phase: str, micro: int) -> str:
        """The template that holds the layer; the caller releases it."""
        size = self.device_bytes(layer)
        flat = self.builder.acquire("device.flats")
        template = self.builder.acquire("device.templates")
        targets = [flat, template] if self.ablation.buffers == 1 else [flat]
        self.builder.op(OpId("load_weights", layer, phase, micro, 0), "h2d", [self.flats[layer]], targets, bytes=size)
        self.builder.op(OpId("device_pass", layer, phase, micro), "compute", [flat], [template], bytes=2 * size)
        self.builder.release(flat)
        return template

    def run(self, kind: str, layer: str, phase: str, micro: int, reads: list[str], writes: list[str]) -> None:
        self.builder.op(OpId(kind, layer, phase, micro), "compute", reads, writes, **cost_keys(self.plan, kind, layer))

    def save(self, layer: str, phase: str, micro: int, gradient: str) -> None:
        """Off the device into a slab, and from there by one thread."""
        size, target = self.device_bytes(layer), self.host["gradients", layer]
        slab = self.builder.acquire("host.gradient_slabs" if self.stack[layer].kind == "decoder" else "host.gradient_slabs_vocabulary")
        self.builder.op(OpId("save_gradients", layer, phase, micro, 0), "d2h", [gradient], [slab], bytes=size)
        adds = micro > 0
        self.builder.op(OpId("thread_pass", layer, phase, micro), "cpu", [slab] + ([target] if adds else []), [target], bytes=(3 if adds else 2) * size)
        self.builder.release(slab)

    def micro_batch(self, micro: int) -> None:
        builder, layers, head = self.builder, self.model.layers, self.model.head
        tokens = builder.persistent("device.tokens", str(micro), 2 * 8 * self.work.tokens, "tokens", scales_with_tokens=True)
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
            dx = self.block(range(first, min(first + self.interval, layers)), checkpoints[first], dx, micro)
        reads = [tokens, dx] + ([self.gradients[EMBEDDING]] if self.model.tied else [])
        self.run("embed_backward", "", "", micro, reads, [self.gradients[EMBEDDING]])
        builder.release(dx)
        self.save(EMBEDDING, "b", micro, self.gradients[EMBEDDING])

    def block(self, block: range, x: str, dx: str, micro: int) -> str:
        builder, inputs = self.builder, {block[0]: x}
        for index in block:  # the last one too, though nobody reads its output
            template = self.load(str(index), "r", micro)
            inputs[index + 1] = builder.acquire("device.hidden")
            self.run("recompute", str(index), "", micro, [template, inputs[index]], [inputs[index + 1]])
            builder.release(template)
        builder.release(inputs[block[-1] + 1])
        for index in reversed(block):
            layer, template, saved = str(index), self.load(str(index), "b", micro), builder.acquire("device.activations")
            self.run("recompute", layer, "b", micro, [template, inputs[index]], [saved])
            below, gradient = builder.acquire("device.hidden"), builder.acquire("device.layer_gradients")
            self.run("backward", layer, "", micro, [template, saved, inputs[index], dx], [gradient, below])
            for slot in (saved, inputs[index], dx):
                builder.release(slot)
            self.save(layer, "b", micro, gradient)
            builder.release(template)
            builder.release(gradient)
            dx = below
        return dx

    def update(self) -> None:
        """In series."""
        names = list(self.stack)
        weights, gradients, moments = ([self.host[name, layer] for layer in names] for name in ("weights", "gradients", "moments"))
        if self.work.clipping == "global":
            self.builder.op(OpId("thread_pass"), "cpu", gradients, gradients, bytes=self.width * self.parameters, parameters=self.parameters)
            self.builder.op(OpId("host_pass", chunk=0), "cpu", gradients, gradients, bytes=4 * self.parameters)
        adam_bytes = 3 * self.width + 16
        self.builder.op(OpId("cpu_adam"), "cpu", gradients, weights + moments, parameters=self.parameters, bytes=adam_bytes * self.parameters)
        flats, decoder = list(self.flats.values()), sum(self.device_bytes(layer) for layer in self.flats)
        if self.ablation.copies:
            self.builder.op(OpId("host_pass", chunk=1), "cpu", weights, flats, bytes=2 * decoder)
        for chunk, (layer, buffer) in enumerate(self.device.items(), 1):  # pageable: a thread stages it
            source, size = self.host["weights", layer], self.device_bytes(layer)
            self.builder.op(OpId("thread_pass", chunk=chunk), "cpu", [source, *flats, *self.device.values()], [buffer], bytes=size)
            self.builder.op(OpId("load_weights", layer), "h2d", [source], [buffer], bytes=size)
        self.builder.op(OpId("host_pass", chunk=2), "cpu", list(self.device.values()), gradients, bytes=self.width * self.parameters)
        self.builder.op(OpId("thread_pass", chunk=3), "cpu", gradients, gradients, bytes=round(_FREE_SHARE * self.width * self.parameters))


def lower_ablated(plan: Plan, ablation: Ablation) -> Schedule:
    """The step with other buffers, slabs or checkpoint interval than the code's defaults."""
    code = _Code(plan, ablation)
    for micro in range(plan.workload.accumulation):
        code.micro_batch(micro)
    code.update()
    return code.builder.build()


class MegatrainCode(Policy):
    """The published code, with its defaults."""

    name = "megatrain_code"
    prediction_only = True

    def lower(self, plan: Plan) -> Schedule:
        return lower_ablated(plan, Ablation())
