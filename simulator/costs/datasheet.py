"""Datasheet: durations from rates, for machines nobody has measured: FLOPs / (peak x efficiency), latency + bytes / rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.costs.protocol import FIX, Unmeasured
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import COPY_KINDS, PASS_KINDS, HardwareSpec
from megatrain.simulator.schedule import Op
from megatrain.simulator.sharing import Sharing
from megatrain.simulator.specs import DTYPE_BYTES, ModelSpec, Workload


def duplex_curve(hardware: HardwareSpec) -> Sequence[Sequence[float]]:
    """(bytes, GB/s of each direction while both run), where that was measured."""
    curve: Sequence[Sequence[float]] = getattr(hardware, "duplex_curve", ())
    return curve


_ADAM_BYTES = 22
"""Read and written a parameter by the AdamW of `cpu_adam_per_s`: bf16 weight 2 + 2 and gradient 2, fp32 moments 8 + 8. It is bound by memory, so
others cost by their bytes: on machine A of library/hardware/h200.toml 6.2e9/s x 22 B = 136 GB/s, all fp32 4.9e9 x 28 = 137, all bf16 10.4e9 x 14 = 146."""
_PASS_SHARE = 107 / 136.4
"""A copy's GB/s with all threads over that of this AdamW, both measured on that machine; taken for every elementwise pass and every machine."""


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
        adam_gb_per_s = _ADAM_BYTES * hardware.cpu_adam_per_s / 1e9
        self._pass_gb_per_s = {
            "cpu_adam": adam_gb_per_s, "host_pass": _PASS_SHARE * adam_gb_per_s,
            "thread_pass": hardware.thread_gb_per_s, "device_pass": hardware.device_gb_per_s,
        }  # fmt: skip
        self._embedding_bytes = 2 * DTYPE_BYTES[workload.dtype] * workload.tokens * model.hidden

    def touched_bytes(self, op: Op) -> int:
        return self._elementwise.touched_bytes(op) or 0

    def duration_ns(self, op: Op) -> int:
        hardware, kind = self.hardware, op.kind
        if kind in PASS_KINDS:
            return math.ceil(op.bytes / self._pass_gb_per_s[kind])
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
