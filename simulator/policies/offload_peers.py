"""The base of peers: the policies of other systems, which are only for prediction.

Their compute is `training_step.compute` with a checkpoint at every decoder layer. The classes here
say where they keep weights, gradients and optimizer state. The bytes of the loss and of host memory
are derived from PyTorch's code and not fitted to measurements.

* The loss of transformers computes the logits of the whole micro-batch in bf16, copies them to fp32
  and applies cross-entropy. The fp32 log-softmax (4 bytes per logit) is kept until the backward
  pass, which also needs the gradients of its output and of its input (4 + 4). The sum is
  LOGIT_BYTES.
* The bytes per logit that the loss reads + writes are, in the forward pass: the cast to fp32 2 + 4,
  log-softmax 4 + 4. In the backward pass: the gradient of the log-softmax's output, which is zero
  except for the labels, 4; log-softmax 4 + 4 + 4; the cast 4 + 2.
* PyTorch's allocator of pinned memory rounds each block up to a power of two (`host.rounding`) and
  keeps blocks that were freed (`host.initial`).
* PyTorch's allocator of device memory reuses blocks. Logits are never live at the same time as a
  layer's activations and gradients. `device.logits` therefore holds only the bytes that the logits
  need in addition. The memory account treats the head's workspace in the same way.

Pools have other names than those of our policies, because a plan's knobs do not change the size of
a peer's pools. The memory of the process itself (interpreter, CUDA, libraries) is not counted: 1.5
GiB with PyTorch alone, some 3 GiB with DeepSpeed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import ClassVar

import msgspec

from megatrain.simulator.model.layer import DTYPE_BYTES, EMBEDDING
from megatrain.simulator.model.layer_memory import max_saved_bytes, transient_bytes
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.slot_cache import SlotCache, pool_of
from megatrain.simulator.policies.building.training_step import compute
from megatrain.simulator.policies.policy import Policy
from megatrain.simulator.schedule import BufferDtype, DataClass, OpId, Schedule
from megatrain.simulator.schedule.plan import Placement, Plan

LOGIT_BYTES = 12
"""Bytes of device memory per logit in the backward pass of the loss."""
LOSS_FORWARD_BYTES, LOSS_BACKWARD_BYTES = 14, 22
"""Bytes per logit that the loss reads and writes, forward and backward."""
ADAM_BYTES = 28
"""Bytes per parameter that AdamW reads and writes, all in fp32: weight 4 + 4, gradient 4, moments
8 + 8."""
_HOST_DATA: dict[str, tuple[DataClass, BufferDtype]] = {
    "weights": ("weights", "mixed"),
    "master": ("weights", "fp32"),
    "converted": ("weights", "mixed"),
    "gradients": ("gradients", "mixed"),
    "gradients_fp32": ("gradients", "fp32"),
    "moments": ("moments", "fp32"),
}
"""A peer's name for data in host memory -> its class of data and dtype."""
_BUCKET = 500_000_000
"""Parameters of DeepSpeed's default gradient bucket, which has the compute dtype."""


def whole_blocks(sizes: Iterable[int]) -> int:
    """Returns the bytes that pinned blocks of these sizes occupy.

    >>> whole_blocks([4096, 5000])
    12288
    """
    return sum(1 << max(size - 1, 0).bit_length() for size in sizes)


def rounding(builder: Builder, name: str, sizes: Iterable[int]) -> None:
    """Adds a buffer with the bytes that rounding adds to pinned blocks of these sizes."""
    sizes = list(sizes)
    builder.persistent("host.rounding", name, whole_blocks(sizes) - sum(sizes), "workspace")


def workspace(builder: Builder, plan: Plan) -> int:
    """Adds a buffer with a layer's temporaries, as in `memory.formulas.workspace_estimate`.

    Returns its bytes.
    """
    size = transient_bytes(plan.model, msgspec.structs.replace(plan.workload, compiled=False))
    builder.persistent("device.workspace", "layer", size, "workspace")
    return size


class Offload:
    """A parameter store with gradients and optimizer state in host memory.

    A layer's gradient is copied to the host as soon as it is complete. Subclasses define
    `on_device` and `update`.
    """

    def __init__(
        self, builder: Builder, plan: Plan, host_bytes: dict[str, int], landing_bytes: int = 0
    ) -> None:
        """Makes the buffers.

        Args:
            builder: The builder of the step.
            plan: The plan.
            host_bytes: Name -> bytes per parameter in host memory. It must contain `gradients`.
            landing_bytes: Bytes per parameter of a subclass's own device buffers that are in use
                while a layer is gathered, but not during the loss.
        """
        self.builder, self.plan, self.stack = builder, plan, plan.model.stack
        self.width = DTYPE_BYTES[plan.workload.dtype]
        self.parameters = sum(layer.elements for layer in self.stack.values())
        self.gradient_width = host_bytes["gradients"]
        self.host = {
            (name, layer.name): builder.persistent(
                f"host.{name}",
                layer.name,
                size * layer.elements,
                *_HOST_DATA[name],
                staging=name == "converted",
            )
            for name, size in host_bytes.items()
            for layer in self.stack.values()
        }
        self.decoder = max(layer.elements for layer in plan.model.decoders)
        self.vocabulary = max(
            layer.elements for layer in self.stack.values() if layer.kind != "decoder"
        )
        leaving = max(self.width, self.gradient_width)  # some peers cast before the copy
        builder.slots("device.layer_gradients", 2, leaving * self.decoder, "gradients", "mixed")
        builder.slots(
            "device.layer_gradients_vocabulary", 1, leaving * self.vocabulary, "gradients", "mixed"
        )
        if plan.workload.accumulation > 1:
            builder.slots(
                "host.gradient_staging",
                2,
                self.gradient_width * max(self.decoder, self.vocabulary),
                "gradients",
                "mixed",
                staging=True,
            )
        self.held: str | None = None
        """The slot with a tied matrix's gradient, between the head's and the embedding's backward.
        """
        self.passes = itertools.count()
        """Numbers of the host passes."""
        reused = workspace(builder, plan) + max_saved_bytes(
            plan.model, msgspec.structs.replace(plan.workload, compiled=False)
        )
        reused += leaving * (2 * self.decoder + self.vocabulary) + landing_bytes * (
            self.decoder + self.vocabulary
        )
        self.logits = plan.workload.tokens * plan.model.vocabulary
        builder.persistent(
            "device.logits", "loss", max(LOGIT_BYTES * self.logits - reused, 0), "workspace"
        )

    def host_pass(self, bytes_: int, reads: Collection[str], writes: Collection[str]) -> None:
        """Emits an elementwise pass over the whole model by all threads of the host. `bytes_` is
        the number of bytes read and written per parameter.
        """
        self.builder.op(
            OpId("host_pass", chunk=next(self.passes)),
            "cpu",
            reads,
            writes,
            bytes=bytes_ * self.parameters,
        )

    def weights(self, layer: str, phase: str, micro: int) -> str:
        """Returns what `ParameterStore.weights` returns.

        Before the head, it emits the memory traffic of the loss's forward pass.
        """
        if phase == "h":
            self.builder.op(
                OpId("device_pass", layer, "h", micro),
                "compute",
                (),
                (),
                bytes=LOSS_FORWARD_BYTES * self.logits,
            )
        return self.on_device(layer, phase, micro)

    def on_device(self, layer: str, phase: str, micro: int) -> str:
        """Returns a device buffer with the layer's weights."""
        raise NotImplementedError

    def gradient(self, layer: str, phase: str, micro: int) -> tuple[str, bool]:
        if layer == EMBEDDING and self.held:
            return self.held, True
        return self.builder.acquire(pool_of("device.layer_gradients", self.stack[layer])), False

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        if phase == "h":
            self.builder.op(
                OpId("device_pass", layer, "b", micro),
                "compute",
                (),
                (),
                bytes=LOSS_BACKWARD_BYTES * self.logits,
            )
            if self.plan.model.tied:
                self.held = buffer
                return
        size, target = (
            self.gradient_width * self.stack[layer].elements,
            self.host["gradients", layer],
        )
        arrival = self.builder.acquire("host.gradient_staging") if micro else target
        self.builder.op(
            OpId("save_gradients", layer, phase, micro, 0), "d2h", [buffer], [arrival], bytes=size
        )
        self.builder.release(buffer)
        self.held = None if layer == EMBEDDING else self.held
        if arrival != target:
            # DeepSpeed's stage 3 adds on the device instead, which takes one more copy.
            self.builder.op(
                OpId("host_pass", layer, phase, micro),
                "cpu",
                [arrival, target],
                [target],
                bytes=3 * size,
            )
            self.builder.release(arrival)
        if micro == self.plan.workload.accumulation - 1:
            self.gradient_arrived(layer)

    def gradient_arrived(self, layer: str) -> None:
        """Called once the layer's gradient of the whole step is in host memory."""

    def losses_written(self, losses: list[str]) -> None:
        """Does nothing: the peers clip by gradients alone."""

    def update(self) -> None:
        """Clips and updates. Called once every gradient of the step is in host memory."""
        raise NotImplementedError

    def all(self, name: str) -> list[str]:
        """Returns the host buffers of `name`, one for each layer."""
        return [self.host[name, layer] for layer in self.stack]

    def adam(self, reads: list[str], writes: list[str]) -> None:
        """Emits AdamW over the whole model in one op. The op reads every gradient, so it cannot
        overlap with the backward pass.
        """
        self.builder.op(
            OpId("cpu_adam"),
            "cpu",
            reads,
            writes,
            parameters=self.parameters,
            bytes=ADAM_BYTES * self.parameters,
        )


class Gathered(Offload):
    """An `Offload` whose weights are gathered into device slots, layer by layer."""

    def __init__(
        self,
        builder: Builder,
        plan: Plan,
        host_bytes: dict[str, int],
        slots: int,
        *,
        freed: bool,
        landing_bytes: int = 0,
    ) -> None:
        """Makes the buffers.

        `slots` is the number of slots for decoder layers. A layer that is still in a slot is not
        loaded again, unless layers are `freed` after the forward pass. For the other arguments see
        `Offload`.
        """
        super().__init__(builder, plan, host_bytes, landing_bytes)
        self.freed = freed
        self.loaded = SlotCache(builder, "device.gathered", slots)
        self.kept: dict[str, str] = {}
        """Embedding or head -> its slot, which stays from the first use to the end of the step."""
        builder.slots(
            "device.gathered", slots, self.width * self.decoder, "weights", plan.workload.dtype
        )
        builder.slots(
            "device.gathered_vocabulary",
            1 if plan.model.tied else 2,
            self.width * self.vocabulary,
            "weights",
            plan.workload.dtype,
        )

    def on_device(self, layer: str, phase: str, micro: int) -> str:
        if self.stack[layer].kind != "decoder":
            if layer not in self.kept:
                self.kept[layer] = slot = self.builder.acquire("device.gathered_vocabulary")
                self.fetch(layer, phase, micro, slot)
            return self.kept[layer]
        key = f"{layer}{phase == 'f'}{micro}" if self.freed else layer
        held = self.loaded.find(key)
        if held is not None:
            return held
        slot = self.loaded.take(key)
        self.fetch(layer, phase, micro, slot)
        return slot

    def fetch(self, layer: str, phase: str, micro: int, slot: str) -> None:
        """Emits the copy of the layer's weights into `slot`."""
        self.builder.op(
            OpId("load_weights", layer, phase, micro, 0),
            "h2d",
            [self.host["weights", layer]],
            [slot],
            bytes=self.width * self.stack[layer].elements,
        )

    def release(self) -> None:
        """Releases all slots."""
        self.loaded.clear()
        for slot in self.kept.values():
            self.builder.release(slot)


def bucket(builder: Builder, plan: Plan) -> None:
    """Adds the device buffer in which DeepSpeed reduces gradients."""
    builder.persistent(
        "device.bucket",
        "reduce",
        _BUCKET * DTYPE_BYTES[plan.workload.dtype],
        "gradients",
        plan.workload.dtype,
        staging=True,
    )


class PeerPolicy(Policy):
    """The policy of another system. Every decoder layer is a checkpoint with any knobs."""

    prediction_only = True
    step: ClassVar[type[Offload]]
    """The parameter store of one step."""

    def lower(self, plan: Plan) -> Schedule:
        plan = msgspec.structs.replace(
            plan,
            knobs=msgspec.structs.replace(plan.knobs, checkpoint_interval=1, placement=Placement()),
        )
        builder = Builder(plan.policy)
        compute(builder, plan, self.step(builder, plan))  # type: ignore[call-arg]
        return builder.build()
