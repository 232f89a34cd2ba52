"""What the peers share: other systems as schedules, for prediction only.

Their compute is `_layerwise.compute` with a checkpoint at every decoder layer; here is where they keep things. Bytes an element of the
loss and sizes of host memory are derived from what PyTorch does, not fitted:

* transformers' loss makes the logits of the whole micro-batch (bf16), an fp32 copy, and cross-entropy on it. Kept until backward: the fp32
  log-softmax, 4; there the gradients of its output and of its input join it, 4 + 4: LOGIT_BYTES. Memory traffic: upcast 2 + 4, log-softmax
  4 + 4; backward zeros with the picked entries 4, log-softmax 4 + 4 + 4, downcast 4 + 2.
* PyTorch's allocator of pinned memory rounds each block up to a power of two, and keeps what was freed: pools `host.rounding`, `host.initial`.
* The allocator of device memory reuses: logits, a layer's activations and its gradients never live together, so `device.logits` holds what
  the logits take beyond the room of the others (as `memory.workspace_beside` counts the head's workspace).

Pools have other names than ours, whose slots are knobs of a plan: no knob would make a peer fit. Not counted: the process itself (interpreter, CUDA, libraries), 1.5 GiB with PyTorch alone, some 3 with DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import msgspec

from megatrain.simulator.plan import Placement, Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.slot_cache import SlotCache
from megatrain.simulator.policies.building.training_step import compute
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.schedule import BufferDtype, DataClass, OpId, Schedule
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING

LOGIT_BYTES = 12
LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 14, 22
ADAM_BYTES = 28
"""read and written a parameter by AdamW with everything in fp32: weight 4 + 4, gradient 4, moments 8 + 8"""
_HOST_DATA: dict[str, tuple[DataClass, BufferDtype]] = {
    "weights": ("weights", "mixed"),
    "master": ("weights", "fp32"),
    "converted": ("weights", "mixed"),
    "gradients": ("gradients", "mixed"),
    "gradients_fp32": ("gradients", "fp32"),
    "moments": ("moments", "fp32"),
}
"""what peers keep on the host, by their own name for it: class of data and dtype"""
_BUCKET = 500_000_000  # parameters of a gradient bucket in DeepSpeed's default, in the compute dtype


def whole_blocks(sizes: Iterable[int]) -> int:
    """Bytes that pinned blocks of these sizes take.

    >>> whole_blocks([4096, 5000])
    12288
    """
    return sum(1 << max(size - 1, 0).bit_length() for size in sizes)


def rounding(builder: Builder, name: str, sizes: Iterable[int]) -> None:
    """What pinned blocks of these sizes take beyond them."""
    sizes = list(sizes)
    builder.persistent("host.rounding", name, whole_blocks(sizes) - sum(sizes), "workspace")


def workspace(builder: Builder, plan: Plan) -> int:
    """A layer's temporaries in `memory_formulas.workspace_estimate`, as a pool of the schedule: its bytes."""
    size = plan.model.transient_bytes(plan.workload.tokens, plan.workload.sequence, plan.workload.dtype)
    builder.persistent("device.workspace", "layer", size, "workspace")
    return size


class Offload:
    """State on the host, `host_bytes` a parameter by name, with `gradients` among it; a layer's gradient leaves the device when it is whole."""

    def __init__(self, builder: Builder, plan: Plan, host_bytes: dict[str, int], landing_bytes: int = 0) -> None:
        """`landing_bytes` a parameter: what a policy's own buffers take on the device while a layer is gathered, and not during the loss."""
        self.builder, self.plan, self.stack = builder, plan, plan.model.stack
        self.width = DTYPE_BYTES[plan.workload.dtype]
        self.parameters = sum(layer.elements for layer in self.stack.values())
        self.gradient_width = host_bytes["gradients"]
        self.host = {
            (name, layer.name): builder.persistent(f"host.{name}", layer.name, size * layer.elements, *_HOST_DATA[name], staging=name == "converted")
            for name, size in host_bytes.items() for layer in self.stack.values()
        }  # fmt: skip
        self.decoder = max(layer.elements for layer in plan.model.decoders)
        self.vocabulary = max(layer.elements for layer in self.stack.values() if layer.kind != "decoder")
        leaving = max(self.width, self.gradient_width)  # some are cast before they leave
        builder.slots("device.layer_gradients", 2, leaving * self.decoder, "gradients", "mixed")
        builder.slots("device.layer_gradients_vocabulary", 1, leaving * self.vocabulary, "gradients", "mixed")
        if plan.workload.accumulation > 1:
            builder.slots("host.gradient_slabs", 2, self.gradient_width * max(self.decoder, self.vocabulary), "gradients", "mixed", staging=True)
        self.held: str | None = None  # a tied matrix's gradient, between head and embedding
        self.passes = 0
        beside = workspace(builder, plan) + plan.model.most_saved_bytes(plan.workload.tokens, plan.workload.sequence, plan.workload.dtype)
        beside += leaving * (2 * self.decoder + self.vocabulary) + landing_bytes * (self.decoder + self.vocabulary)
        self.logits = plan.workload.tokens * plan.model.vocabulary
        builder.persistent("device.logits", "loss", max(LOGIT_BYTES * self.logits - beside, 0), "workspace")

    def host_pass(self, bytes_: int, reads: Iterable[str], writes: Iterable[str]) -> None:
        """An elementwise pass of the host, all threads; `bytes_` read and written a parameter of the whole model."""
        self.builder.op(OpId("host_pass", chunk=self._next()), "cpu", reads, writes, bytes=bytes_ * self.parameters)

    def _next(self) -> int:
        self.passes += 1
        return self.passes - 1

    def weights(self, layer: str, phase: str, micro: int) -> str:
        """As in `Storage`; before the head, the traffic of the loss's forward."""
        if phase == "h":
            self.builder.op(OpId("device_pass", layer, "h", micro), "compute", (), (), bytes=LOSS_FORWARD_BYTES * self.logits)
        return self.on_device(layer, phase, micro)

    def on_device(self, layer: str, phase: str, micro: int) -> str:
        raise NotImplementedError

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        if layer == EMBEDDING and self.held:
            return self.held, True
        return self.builder.acquire("device.layer_gradients" if self.stack[layer].kind == "decoder" else "device.layer_gradients_vocabulary"), False

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        if phase == "h":
            self.builder.op(OpId("device_pass", layer, "b", micro), "compute", (), (), bytes=LOSS_BACKWARD_BYTES * self.logits)
            if self.plan.model.tied:
                self.held = buffer
                return
        size, target = self.gradient_width * self.stack[layer].elements, self.host["gradients", layer]
        arrival = self.builder.acquire("host.gradient_slabs") if micro else target
        self.builder.op(OpId("save_gradients", layer, phase, micro, 0), "d2h", [buffer], [arrival], bytes=size)
        self.builder.release(buffer)
        self.held = None if layer == EMBEDDING else self.held
        if arrival != target:  # DeepSpeed's stage 3 adds on the device instead, with one more trip over the link
            self.builder.op(OpId("host_pass", layer, phase, micro), "cpu", [arrival, target], [target], bytes=3 * size)
            self.builder.release(arrival)
        if micro == self.plan.workload.accumulation - 1:
            self.gradient_arrived(layer)

    def gradient_arrived(self, layer: str) -> None:
        """The layer's gradient of the whole step is on the host."""

    def losses_written(self, losses: list[str]) -> None:
        """Clips on the host, by gradients alone."""

    def update(self) -> None:
        raise NotImplementedError

    def all(self, name: str) -> list[str]:
        return [self.host[name, layer] for layer in self.stack]

    def adam(self, reads: list[str], writes: list[str]) -> None:
        """AdamW over the whole model in one call, so after every gradient: nothing hides it."""
        self.builder.op(OpId("cpu_adam"), "cpu", reads, writes, parameters=self.parameters, bytes=ADAM_BYTES * self.parameters)


class Gathered(Offload):
    """Weights come a layer at a time into `slots` slots; one still there is not loaded again, unless `freed` after the forward pass."""

    def __init__(self, builder: Builder, plan: Plan, host_bytes: dict[str, int], slots: int, *, freed: bool, landing_bytes: int = 0) -> None:
        super().__init__(builder, plan, host_bytes, landing_bytes)
        self.freed = freed
        self.loaded = SlotCache(builder, "device.gathered", slots)
        self.kept: dict[str, str] = {}  # embedding and head stay from their first use to the end
        builder.slots("device.gathered", slots, self.width * self.decoder, "weights", plan.workload.dtype)
        builder.slots("device.gathered_vocabulary", 1 if plan.model.tied else 2, self.width * self.vocabulary, "weights", plan.workload.dtype)

    def on_device(self, layer: str, phase: str, micro: int) -> str:
        if self.stack[layer].kind != "decoder":
            if layer not in self.kept:
                self.kept[layer] = slot = self.builder.acquire("device.gathered_vocabulary")
                self.fetch(layer, phase, micro, slot)
            return self.kept[layer]
        key = f"{layer}{phase == 'f'}{micro}" if self.freed else layer
        found = self.loaded.find(key)
        if found is not None:
            return found
        slot = self.loaded.take(key)
        self.fetch(layer, phase, micro, slot)
        return slot

    def fetch(self, layer: str, phase: str, micro: int, slot: str) -> None:
        """Loads the layer into its slot."""
        self.builder.op(
            OpId("load_weights", layer, phase, micro, 0), "h2d", [self.host["weights", layer]], [slot], bytes=self.width * self.stack[layer].elements
        )

    def release(self) -> None:
        self.loaded.clear()
        for slot in self.kept.values():
            self.builder.release(slot)


def bucket(builder: Builder, plan: Plan) -> None:
    """DeepSpeed's buffer in which gradients are reduced."""
    builder.persistent("device.bucket", "reduce", _BUCKET * DTYPE_BYTES[plan.workload.dtype], "gradients", plan.workload.dtype, staging=True)


class PeerPolicy(Policy):
    """Another system. Every decoder layer is a checkpoint, whatever the plan's knobs say."""

    prediction_only = True
    step: ClassVar[type[Offload]]
    """where it keeps what"""

    def lower(self, plan: Plan) -> Schedule:
        plan = msgspec.structs.replace(plan, knobs=msgspec.structs.replace(plan.knobs, checkpoint_interval=1, placement=Placement()))
        builder = Builder(plan.policy)
        compute(builder, plan, self.step(builder, plan))  # type: ignore[call-arg]
        return builder.build()
