"""The policy `fsdp2_offload`: PyTorch FSDP2 (`fully_shard`) with CPUOffloadPolicy on one GPU.

Prediction only. It follows the source of `fully_shard`, and was compared with measurements with
PyTorch 2.11, one parameter group per decoder layer and one for the rest, bf16 compute and
reduction, and pinned memory. Numbers in parentheses are bytes read + bytes written per parameter.

* A layer's fp32 parameters are copied to the device (4 bytes per parameter), cast to bf16 (4 + 2)
  and copied once (2 + 2), all on the compute stream. Nothing is prefetched with any settings: with
  one rank, `unshard` leaves the copy to `wait_for_unshard`, which runs just before the layer
  (source of PyTorch 2.13; pytorch PR 178861 of March 2026 describes this and proposes a fix). A
  layer is freed after forward and gathered again for backward, so 8 bytes per parameter are copied
  to the device. Embedding and head are gathered together at the start and stay.
* A gradient is copied into the buffer of the reduction (2 + 2), copied again (2 + 2), cast to fp32
  (2 + 4) and copied to the host (4 bytes per parameter) during the next layer's backward.
* After backward, one CPU thread computes the norm of the fp32 gradients (reads 4), all threads
  scale the gradients (4 + 4), and PyTorch's fused AdamW runs on the CPU, all in fp32. Clipping
  fails with this offload in some versions of PyTorch (pytorch #148532). It works in 2.11.

Host bytes per parameter:

* weights: 4, one pinned block per tensor
* gradients: 4, one pinned block per tensor
* moments: 8, pageable
"""

from __future__ import annotations

from megatrain.simulator.model.layer import EMBEDDING
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.building.slot_cache import pool_of
from megatrain.simulator.policies.offload_peers import Gathered, PeerPolicy, rounding
from megatrain.simulator.schedule import OpId
from megatrain.simulator.schedule.plan import Plan

_GATHER_BYTES = (4 + 2) + (2 + 2)
"""Bytes per parameter that the cast and the copy of gathered weights read and write."""
_REDUCE_BYTES = 2 * (2 + 2) + (2 + 4)
"""Bytes per parameter that the two copies and the cast of a gradient read and write."""


class _Sharded(Gathered):
    """The parameter store of one step of FSDP2."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        super().__init__(
            builder,
            plan,
            {"weights": 4, "gradients": 4, "moments": 8},
            1,
            freed=True,
            landing_bytes=4,
        )
        builder.slots("device.shards", 1, 4 * self.decoder, "weights", "fp32", staging=True)
        builder.slots(
            "device.shards_vocabulary", 1, 4 * self.vocabulary, "weights", "fp32", staging=True
        )
        blocks = [4 * tensor.elements for layer in self.stack.values() for tensor in layer.tensors]
        rounding(builder, "weights", blocks)
        rounding(builder, "gradients", blocks)

    def on_device(self, layer: str, phase: str, micro: int) -> str:
        slot = super().on_device(layer, phase, micro)
        if layer == EMBEDDING and self.plan.model.head not in self.kept:
            super().on_device(self.plan.model.head, phase, micro)
        return slot

    def fetch(self, layer: str, phase: str, micro: int, slot: str) -> None:
        elements = self.stack[layer].elements
        shard = self.builder.acquire(pool_of("device.shards", self.stack[layer]))
        self.builder.op(
            OpId("load_weights", layer, phase, micro, 0),
            "h2d",
            [self.host["weights", layer]],
            [shard, slot],  # `slot` too, so that the copy waits until it is free
            bytes=4 * elements,
        )
        self.builder.op(
            OpId("device_pass", layer, phase, micro, 0),
            "compute",
            [shard],
            [slot],
            bytes=_GATHER_BYTES * elements,
        )
        self.builder.release(shard)

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        self.builder.op(
            OpId("device_pass", layer, phase, micro, 1),
            "compute",
            [buffer],
            [buffer],
            bytes=_REDUCE_BYTES * self.stack[layer].elements,
        )
        super().gradient_written(layer, phase, micro, buffer)

    def update(self) -> None:
        self.release()
        gradients = self.all("gradients")
        if self.plan.workload.clipping == "global":
            self.builder.op(
                OpId("thread_pass"),
                "cpu",
                gradients,
                gradients,
                bytes=4 * self.parameters,
                parameters=self.parameters,
            )
            self.host_pass(4 + 4, gradients, gradients)
        self.adam(gradients, self.all("weights") + self.all("moments"))


class Fsdp2Offload(PeerPolicy):
    """PyTorch FSDP2 with CPUOffloadPolicy."""

    name = "fsdp2_offload"
    step = _Sharded
