"""Datasheet: durations from rates, for machines nobody has measured: FLOPs / (peak x efficiency), latency + bytes / rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.costs.protocol import FIX, Unmeasured
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import COPY_KINDS, HardwareSpec
from megatrain.simulator.schedule import Op
from megatrain.simulator.sharing import Sharing
from megatrain.simulator.specs import DTYPE_BYTES, ModelSpec, Workload


def duplex_curve(hardware: HardwareSpec) -> Sequence[Sequence[float]]:
    """(bytes, GB/s of each direction while both run), where that was measured."""
    curve: Sequence[Sequence[float]] = getattr(hardware, "duplex_curve", ())
    return curve


class Datasheet(Unmeasured):
    """Rates of a HardwareSpec. Nothing is flagged: nothing was measured."""

    dispatch_ns: Mapping[str, int]

    def __init__(self, hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> None:
        self.hardware, self.model, self.workload = hardware, model, workload
        if workload.dtype not in hardware.peak_tflops:
            raise UserError(
                f"hardware {hardware.name}: peak_tflops",
                found=f"no rate for {workload.dtype}",
                allowed=", ".join(hardware.peak_tflops),
                fix="add the rate, or train in another dtype",
            )
        duplex = {"h2d": {"d2h": hardware.duplex_fraction}, "d2h": {"h2d": hardware.duplex_fraction}}
        named = hardware.contention
        pairs = {lane: {**duplex.get(lane, {}), **named.get(lane, {})} for lane in {**duplex, **named}}
        self.sharing = Sharing(pairs, hardware.host_memory, duplex_curve(hardware))
        self._elementwise = Elementwise(model, workload)
        self.dispatch_ns, self.step_overhead_ns = hardware.dispatch_ns, 0
        self._flops_per_ns = hardware.peak_tflops[workload.dtype] * hardware.compute_efficiency * 1e3
        self._embedding_bytes = 2 * DTYPE_BYTES[workload.dtype] * workload.tokens * model.hidden

    def touched_bytes(self, op: Op) -> int:
        return self._elementwise.touched_bytes(op) or 0

    def duration_ns(self, op: Op) -> int:
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
        touched = self._elementwise.touched_bytes(op)
        if touched is None:
            raise UserError(f"hardware {hardware.name}: {op.id}", found=f"an op of kind {kind}", allowed="a kind with a datasheet formula", fix=FIX)
        return math.ceil(touched / (hardware.host_gb_per_s if op.lane == "cpu" else hardware.device_gb_per_s))
