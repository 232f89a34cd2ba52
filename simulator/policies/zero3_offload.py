"""The policy `zero3_offload`: DeepSpeed ZeRO-3 with parameters and optimizer on the host.

Prediction only, on one GPU. It follows the source of stage3.py (DeepSpeed 0.19.8), and was compared
with measurements with overlap_comm, pinned memory, recompute of every layer, and clipping. Numbers
in parentheses are bytes read + bytes written per parameter.

* A layer's bf16 weights are gathered ahead of their use, in forward and again in backward, while at
  most 2e9 parameters (stage3_max_live_parameters) are on the device. Weights that are used again
  before that many other parameters are not released.
* A gradient is copied to a pinned bf16 buffer. The CPU computes its norm (reads 2) and converts it
  to fp32 (2 + 4).
* After backward, these run one after the other while the GPU is idle: scaling of the fp32 gradients
  by the clip coefficient (4 + 4), Adam on fp32 master and moments, and a copy of the master to the
  bf16 weights (4 + 2).

Host bytes per parameter:

* bf16 weights: 2, one pinned block
* bf16 gradients: 2, one pinned block
* fp32 gradients: 4, one pinned block per subgroup of 1e9 parameters
* fp32 master: 4, pageable
* moments: 8, pageable
* the blocks in which the model was first built: 2, one pinned block per tensor. They have been
  freed, but the allocator keeps them.
"""

from __future__ import annotations

from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.offload_peers import (
    Gathered,
    PeerPolicy,
    bucket,
    rounding,
    whole_blocks,
)
from megatrain.simulator.schedule import OpId
from megatrain.simulator.schedule.plan import Plan

_LIVE = 2_000_000_000
"""The default of stage3_max_live_parameters."""
_SUBGROUP = 1_000_000_000
"""Parameters of a subgroup by default."""


class _Stage3(Gathered):
    """The parameter store of one step of ZeRO-3."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        stack, width = plan.model.stack, DTYPE_BYTES[plan.workload.dtype]
        live = _LIVE - sum(layer.elements for layer in stack.values() if layer.kind != "decoder")
        slots = min(max(live // stack["0"].elements, 2), plan.model.layers)
        super().__init__(
            builder,
            plan,
            {"weights": width, "gradients": width, "gradients_fp32": 4, "master": 4, "moments": 8},
            slots,
            freed=False,
        )
        bucket(builder, plan)
        rounding(builder, "weights", [width * self.parameters])
        rounding(builder, "gradients", [width * self.parameters])
        rounding(builder, "gradients_fp32", [4 * size for size in self._subgroups()])
        built = whole_blocks(
            width * tensor.elements for layer in stack.values() for tensor in layer.tensors
        )
        builder.persistent("host.initial", "weights", built, "weights", "mixed")
        self.clipped = plan.workload.clipping == "global"

    def _subgroups(self) -> list[int]:
        """Returns the number of parameters of each subgroup. Tensors are added to a subgroup until
        it has at least `_SUBGROUP` parameters.
        """
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
        self.builder.op(
            OpId("host_pass", layer), "cpu", [self.host["gradients", layer]], [target], bytes=size
        )

    def update(self) -> None:
        self.release()
        gradients, master = self.all("gradients_fp32"), self.all("master")
        if self.clipped:
            self.host_pass(4 + 4, gradients, gradients)
        self.adam(gradients, master + self.all("moments"))
        self.host_pass(4 + self.width, master, self.all("weights"))


class Zero3Offload(PeerPolicy):
    """DeepSpeed ZeRO-3 with parameters and optimizer on the host."""

    name = "zero3_offload"
    step = _Stage3
