"""DeepSpeed ZeRO-3 with parameters and optimizer on the host, on one GPU: what a user of DeepSpeed gets. Prediction only.

Read in the source of stage3.py and measured with version 0.19.8, overlap_comm, pinned memory, recompute of every layer, clipping:

* A layer's bf16 weights are gathered ahead, in forward and again in backward, as long as at most 2e9 parameters (stage3_max_live_parameters)
  are on the device; what is used again within that distance is not released.
* A gradient goes to a pinned bf16 buffer; the CPU then takes its norm (2 bytes read) and converts it to fp32 (2 + 4).
* After backward, in series, the GPU idle: scale the fp32 gradients by the clip coefficient (4 + 4), Adam on fp32 master and moments, copy the
  master to the bf16 weights (4 + 2).

Host bytes a parameter: bf16 weights 2 and gradients 2, each one pinned block; fp32 gradients 4, pinned, a block per subgroup of 1e9; fp32
master 4 and moments 8, pageable; and the pinned bf16 blocks, one a tensor, in which the model was first built: freed, but kept by the allocator.
"""

from __future__ import annotations

from megatrain.simulator.plan import Plan
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.offload_peers import Gathered, PeerPolicy, bucket, rounding, whole_blocks
from megatrain.simulator.schedule import OpId
from megatrain.simulator.specs import DTYPE_BYTES

_LIVE = 2_000_000_000
_SUBGROUP = 1_000_000_000


class _Stage3(Gathered):
    def __init__(self, builder: Builder, plan: Plan) -> None:
        stack, width = plan.model.stack, DTYPE_BYTES[plan.workload.dtype]
        live = _LIVE - sum(layer.elements for layer in stack.values() if layer.kind != "decoder")
        slots = min(max(live // stack["0"].elements, 2), plan.model.layers)
        super().__init__(builder, plan, {"weights": width, "gradients": width, "gradients_fp32": 4, "master": 4, "moments": 8}, slots, freed=False)
        bucket(builder, plan)
        rounding(builder, "weights", [width * self.parameters])
        rounding(builder, "gradients", [width * self.parameters])
        rounding(builder, "gradients_fp32", [4 * size for size in self._subgroups()])
        built = whole_blocks(width * tensor.elements for layer in stack.values() for tensor in layer.tensors)
        builder.persistent("host.initial", "weights", built, "weights", "mixed")
        self.clipped = plan.workload.clipping == "global"

    def _subgroups(self) -> list[int]:
        """Parameters of each: tensors are added until there are enough."""
        sizes = [0]
        for layer in self.stack.values():
            for tensor in layer.tensors:
                if sizes[-1] >= _SUBGROUP:
                    sizes.append(0)
                sizes[-1] += tensor.elements
        return sizes

    def gradient_arrived(self, layer: str) -> None:
        bytes_ = (self.width if self.clipped else 0) + self.width + 4
        target = self.host["gradients_fp32", layer]
        size = bytes_ * self.stack[layer].elements
        self.builder.op(OpId("host_pass", layer), "cpu", [self.host["gradients", layer]], [target], bytes=size)

    def update(self) -> None:
        self.release()
        gradients, master = self.all("gradients_fp32"), self.all("master")
        if self.clipped:
            self.host_pass(4 + 4, gradients, gradients)
        self.adam(gradients, master + self.all("moments"))
        self.host_pass(4 + self.width, master, self.all("weights"))


class Zero3Offload(PeerPolicy):
    """DeepSpeed ZeRO-3 with offload."""

    name = "zero3_offload"
    step = _Stage3
