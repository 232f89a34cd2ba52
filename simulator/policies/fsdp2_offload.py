"""PyTorch FSDP2 with CPUOffloadPolicy on one GPU: what a user of `fully_shard` gets. Prediction only.

Read in PyTorch's fully_shard and measured with 2.11: a group per decoder layer, one for the rest; bf16 compute and reduction, pinned memory.

* A layer's fp32 parameters cross the link (4 B a parameter), are cast to bf16 (4 + 2) and copied once (2 + 2), all on the compute stream: with one rank
  `unshard` leaves it to `wait_for_unshard`, which copies there and then, so that nothing is fetched ahead, in forward or backward, whatever
  prefetching was asked for (read in 2.13; pytorch PR 178861 of March 2026 says the same of its time, and offers a remedy). Freed after forward and
  gathered again for backward: 8 B a parameter up. Embedding and head come at the start, together, and stay.
* A gradient is put into the reduction's buffer (2 + 2), copied (2 + 2), cast to fp32 (2 + 4) and leaves the device as such, beside the next layer's
  backward: 4 B a parameter down.
* After backward: PyTorch's fused AdamW on the CPU, everything fp32. Clipping breaks under this offload, so there is none, whatever the workload says.

Host bytes a parameter: weights 4 and gradients 4, pinned, a block per tensor; moments 8, pageable.
"""

from __future__ import annotations

from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.offload_peers import Gathered, PeerPolicy, rounding
from megatrain.simulator.schedule import OpId
from megatrain.simulator.specs import EMBEDDING

_GATHER_BYTES = (4 + 2) + (2 + 2)
_REDUCE_BYTES = 2 * (2 + 2) + (2 + 4)


class _Sharded(Gathered):
    def __init__(self, builder: Builder, plan: Plan) -> None:
        super().__init__(builder, plan, {"weights": 4, "gradients": 4, "moments": 8}, 1, freed=True, landing_bytes=4)
        builder.slots("device.shards", 1, 4 * self.decoder, "weights", "fp32", staging=True)
        builder.slots("device.shards_vocabulary", 1, 4 * self.vocabulary, "weights", "fp32", staging=True)
        blocks = [4 * tensor.elements for layer in self.stack.values() for tensor in layer.tensors]
        rounding(builder, "weights", blocks)
        rounding(builder, "gradients", blocks)

    def on_device(self, layer: str, phase: str, micro: int) -> str:
        found = super().on_device(layer, phase, micro)
        if layer == EMBEDDING and self.plan.model.head not in self.kept:
            super().on_device(self.plan.model.head, phase, micro)
        return found

    def fetch(self, layer: str, phase: str, micro: int, slot: str) -> None:
        elements = self.stack[layer].elements
        shard = self.builder.acquire("device.shards" if self.stack[layer].kind == "decoder" else "device.shards_vocabulary")
        self.builder.op(
            OpId("load_weights", layer, phase, micro, 0), "h2d", [self.host["weights", layer]], [shard, slot], bytes=4 * elements
        )  # into the slot too: it waits until that is free
        self.builder.op(OpId("device_pass", layer, phase, micro, 0), "compute", [shard], [slot], bytes=_GATHER_BYTES * elements)
        self.builder.release(shard)

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        self.builder.op(OpId("device_pass", layer, phase, micro, 1), "compute", [buffer], [buffer], bytes=_REDUCE_BYTES * self.stack[layer].elements)
        super().gradient_written(layer, phase, micro, buffer)

    def update(self) -> None:
        self.release()
        self.adam(self.all("gradients"), self.all("weights") + self.all("moments"))


class Fsdp2Offload(PeerPolicy):
    """PyTorch FSDP2 with CPUOffloadPolicy."""

    name = "fsdp2_offload"
    step = _Sharded
