"""Datasheet: durations from rates, for machines nobody has measured.

    copy      the time on the link's curve, linear between its points and along the outermost segment beyond; latency + bytes / rate without a
              curve; nothing at all on a unified machine
    compute   FLOPs / (peak x efficiency)
    the rest  bytes or parameters / rate

Only copies beyond a curve that was measured are flagged as extrapolated; how far off the rates may be is the machine's `uncertainty`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatrain.simulator.costs.interpolation import interpolate
from megatrain.simulator.costs.protocol import FIX, Unmeasured
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import COPY_KINDS, HardwareSpec
from megatrain.simulator.schedule import Op
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING, ModelSpec, Workload


class Datasheet(Unmeasured):
    """Rates of a HardwareSpec."""

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
        self._curves = {
            lane: tuple((size, round(size / rate)) for size, rate in curve) for lane, curve in (("h2d", hardware.h2d_curve), ("d2h", hardware.d2h_curve))
        }
        self._rates = {"h2d": hardware.h2d_gb_per_s, "d2h": hardware.d2h_gb_per_s}
        self._embedding_bytes = 2 * width * workload.tokens * model.hidden

    def _gradient_width(self, layer: str) -> int:
        """Bytes an element of the layer's step gradient: fp32 where several are summed."""
        several = self.workload.accumulation > 1 or (self.model.tied and layer == EMBEDDING)
        return 4 if several else self._width

    def _copy(self, op: Op) -> tuple[int, bool]:
        """(duration, extrapolated) of a copy."""
        if self.hardware.unified:
            return 0, False
        if curve := self._curves[op.lane]:
            return interpolate(curve, op.bytes)
        return math.ceil(self.hardware.link_latency_ns + op.bytes / self._rates[op.lane]), False

    def extrapolated(self, op: Op) -> bool:
        return op.kind in COPY_KINDS and self._copy(op)[1]

    def duration_ns(self, op: Op) -> int:
        """Bytes of elementwise ops, per parameter: the sum of squares reads the gradient; an accumulation reads the slab, writes the gradient,
        and reads it where it adds; AdamW reads and writes master (4) and moments (8) and reads the gradient.
        """
        hardware, kind = self.hardware, op.kind
        if kind in COPY_KINDS:
            return self._copy(op)[0]
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
