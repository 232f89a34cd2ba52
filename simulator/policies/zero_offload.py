"""The policy `zero_offload`: DeepSpeed ZeRO-Offload (stage 2, optimizer on the host) on one GPU.

Prediction only. It follows the source of stage_1_and_2.py (DeepSpeed 0.19.8) and was not compared
with measurements. Numbers in parentheses are bytes read + bytes written per parameter.

* bf16 weights stay on the device. During backward, each layer's gradient is cast to fp32 on the
  device, its norm is computed there, and it is copied into a pinned fp32 buffer on the host
  (4 bytes per parameter).
* After backward, these run one after the other while the GPU is idle: scaling by the clip
  coefficient (4 + 4), Adam on fp32 master and moments, conversion of the master to bf16 on the host
  (4 + 2), and a copy of all weights to the device (2 bytes per parameter). DeepSpeed makes that
  copy from pageable memory, at a fifth of the link rate on an H200. Here it has the full rate.

Host bytes per parameter:

* fp32 master: 4, one pinned block
* fp32 gradients: 4, one pinned block
* moments: 8
* converted weights: 2
"""

from __future__ import annotations

from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.policies.building.builder import Builder
from megatrain.simulator.policies.offload_peers import Offload, PeerPolicy, bucket, rounding
from megatrain.simulator.schedule import OpId
from megatrain.simulator.schedule.plan import Plan

_NORM_AND_CAST_BYTES = 2 + (2 + 4)
"""Bytes per parameter that the norm of a gradient reads, and that its cast reads and writes."""


class _Stage2(Offload):
    """The parameter store of one step of ZeRO-Offload."""

    def __init__(self, builder: Builder, plan: Plan) -> None:
        super().__init__(
            builder,
            plan,
            {
                "gradients": 4,
                "master": 4,
                "moments": 8,
                "converted": DTYPE_BYTES[plan.workload.dtype],
            },
        )
        bucket(builder, plan)
        rounding(builder, "gradients", [4 * self.parameters])
        rounding(builder, "master", [4 * self.parameters])
        self.device = {
            name: builder.persistent(
                "device.weights", name, self.width * layer.elements, "weights", plan.workload.dtype
            )
            for name, layer in self.stack.items()
        }

    def on_device(self, layer: str, phase: str, micro: int) -> str:
        return self.device[layer]

    def gradient_written(self, layer: str, phase: str, micro: int, buffer: str) -> None:
        bytes_ = _NORM_AND_CAST_BYTES * self.stack[layer].elements
        self.builder.op(
            OpId("device_pass", layer, phase, micro, 1), "compute", [buffer], [buffer], bytes=bytes_
        )
        super().gradient_written(layer, phase, micro, buffer)

    def update(self) -> None:
        gradients, master, converted = (
            self.all("gradients"),
            self.all("master"),
            self.all("converted"),
        )
        if self.plan.workload.clipping == "global":
            self.host_pass(4 + 4, gradients, gradients)
        self.adam(gradients, master + self.all("moments"))
        self.host_pass(4 + self.width, master, converted)
        for name, layer in self.stack.items():
            reads = [self.host["converted", name]]
            self.builder.op(
                OpId("load_weights", name),
                "h2d",
                reads,
                [self.device[name]],
                bytes=self.width * layer.elements,
            )


class ZeroOffload(PeerPolicy):
    """DeepSpeed ZeRO-Offload, stage 2."""

    name = "zero_offload"
    step = _Stage2
