"""Datasheet: durations from rates, for machines nobody has measured: FLOPs / (peak x efficiency), latency + bytes / rate."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatrain.simulator.costs.protocol import FIX, Unmeasured
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import COPY_KINDS, HardwareSpec
from megatrain.simulator.schedule import Op
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING, ModelSpec, Workload


class Datasheet(Unmeasured):
    """Rates of a HardwareSpec. Nothing is flagged: nothing was measured."""

    dispatch_ns: Mapping[str, int]

    def __init__(self, hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> None:
        self.hardware, self.model, self.workload = hardware, model, workload
        width = self._width = DTYPE_BYTES[workload.dtype]
        if workload.dtype not in hardware.peak_tflops:
            raise UserError(
                f"hardware {hardware.name}: peak_tflops",
                found=f"no rate for {workload.dtype}",
                allowed=", ".join(hardware.peak_tflops),
                fix="add the rate, or train in another dtype",
            )
        duplex = {"h2d": {"d2h": hardware.duplex_fraction}, "d2h": {"h2d": hardware.duplex_fraction}}
        named = hardware.contention
        self.contention: Mapping[str, Mapping[str, float]] = {lane: {**duplex.get(lane, {}), **named.get(lane, {})} for lane in {**duplex, **named}}
        self.dispatch_ns, self.step_overhead_ns = hardware.dispatch_ns, 0
        self._flops_per_ns = hardware.peak_tflops[workload.dtype] * hardware.linear_efficiency * 1e3
        self._embedding_bytes = 2 * width * workload.tokens * model.hidden

    def _gradient_width(self, layer: str) -> int:
        """Bytes an element of the layer's step gradient: fp32 where several are summed."""
        several = self.workload.accumulation > 1 or (self.model.tied and layer == EMBEDDING)
        return 4 if several else self._width

    def duration_ns(self, op: Op) -> int:
        """Bytes of elementwise ops, per parameter: the sum of squares reads the gradient; an accumulation reads the slab, writes the gradient,
        and reads it where it adds; AdamW reads and writes master (4) and moments (8) and reads the gradient.
        """
        hardware, kind = self.hardware, op.kind
        if kind in COPY_KINDS:
            return math.ceil(hardware.link_latency_ns + op.bytes / (hardware.h2d_gb_per_s if op.lane == "h2d" else hardware.d2h_gb_per_s))
        if op.flops:
            return math.ceil(op.flops / self._flops_per_ns)
        if kind in ("embed", "embed_backward"):
            return math.ceil(self._embedding_bytes / hardware.device_gb_per_s)
        if kind == "clip":
            return 0
        if kind == "cpu_update":
            return math.ceil(op.parameters / hardware.cpu_update_per_s * 1e9)
        gradient = self._gradient_width(op.layer)
        per_parameter = {"norm": gradient, "accumulate_gradients": self._width + gradient * (2 if op.adds else 1), "update": 24 + gradient}.get(kind)
        if per_parameter is None:
            raise UserError(f"hardware {hardware.name}: {op.id}", found=f"an op of kind {kind}", allowed="a kind with a datasheet formula", fix=FIX)
        return math.ceil(per_parameter * op.parameters / (hardware.host_gb_per_s if op.lane == "cpu" else hardware.device_gb_per_s))
