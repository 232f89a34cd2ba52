"""Datasheet: durations from rates, for machines nobody has measured.

    copy      the time on the link's curve, linear between its points and along the outermost segment beyond; latency + bytes / rate without a
              curve; nothing at all on a unified machine
    compute   linear FLOPs / (peak x linear efficiency) + attention FLOPs / (peak x attention efficiency x S / (S + half length))
              + moved bytes / device rate, S tokens a sequence; of the workload's attention kernel where the machine names it. Documents are told
              to flash attention by their lengths: its rate, as if every row were one document, since shorter ones only take less. Where a mask
              keeps them apart no masked pair is left out: twice the FLOPs, which nobody measured
    the rest  bytes or parameters / rate

The terms add up because kernels run one after the other, and because a product is slower by about the time of reading its weights: 1,024 tokens
times a 3584 x 18944 matrix take 0.230 ms on an H200 (2026-11-21), its rate with many tokens says 0.196, reading the matrix once takes 0.034.
Traffic is counted as eager PyTorch moves it (`ModelSpec.work`): compiled layers are 15 to 20 % faster. Launching kernels costs nothing here, so
ops of a few hundred tokens come out too fast.

Copies beyond a curve that was measured are flagged as extrapolated, and layers whose attention reads a mask for documents; how far off the rates may
be is the machine's `uncertainty`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from megatrain.simulator.costs.elementwise import Elementwise
from megatrain.simulator.costs.interpolation import interpolate
from megatrain.simulator.costs.protocol import FIX, Unmeasured
from megatrain.simulator.errors import UserError
from megatrain.simulator.families import WRITTEN_OUT
from megatrain.simulator.hardware import COMPUTE_KINDS, COPY_KINDS, LAYER_KINDS, PASS_KINDS, UNMEASURED_KINDS, AttentionRate, HardwareSpec
from megatrain.simulator.schedule import KEPT, Op, is_kept
from megatrain.simulator.sharing import Sharing
from megatrain.simulator.specs import ModelSpec
from megatrain.simulator.workload import Workload

_ADAM_BYTES = 22
"""Read and written a parameter by the AdamW of `cpu_adam_per_s`: bf16 weight 2 + 2 and gradient 2, fp32 moments 8 + 8. It is bound by memory, so
others cost by their bytes: on machine A of library/hardware/h200.toml 6.2e9/s x 22 B = 136 GB/s, all fp32 4.9e9 x 28 = 137, all bf16 10.4e9 x 14 = 146."""
_PASS_SHARE = 107 / 136.4
"""A copy's GB/s with all threads over that of this AdamW, both measured on that machine; taken for every elementwise pass and every machine."""

_THREAD_NORM_NS = 0.265
"""A parameter's share in PyTorch's norm of a bf16 tensor, which one thread computes and a second one does not speed up: clipping 7.6e9 parameters took
2.2 s on 64 cores (H200, 2026-11-21), of which scaling them, 4 B each on all threads, is 0.18. The core's chain of additions bounds it, not memory: on a Xeon
of 2.8 GHz a tensor takes 0.163 ns an element from cache and 0.24 from memory (2026-11-21). So it is the same for every host."""
_ATTENTION_BACKWARD = 1.25
"""Flash attention's backward has five products where `ModelSpec.work` counts four: it computes the scores again (Dao, 2023)."""


class Datasheet(Unmeasured):
    """Rates of a HardwareSpec."""

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
        self.sharing = Sharing(pairs, hardware.host_memory, hardware.duplex_curve, hardware.turns)
        self._elementwise = Elementwise(model, workload)
        self.dispatch_ns, self.step_overhead_ns = hardware.dispatch_ns, 0
        flops_per_ns = hardware.peak_tflops[workload.dtype] * 1e3
        usual = AttentionRate(efficiency=hardware.attention_efficiency, half_tokens=hardware.attention_half_tokens)
        attention = hardware.attention.get("flash" if workload.documents else workload.attention or "", usual)
        # written-out scores are all computed, with documents or without
        self.masked = workload.documents and model.documents_by(workload.dtype) == "mask" and model.family not in WRITTEN_OUT
        self._linear_flops_per_ns = flops_per_ns * hardware.linear_efficiency
        self._attention_flops_per_ns = flops_per_ns * attention.efficiency * workload.sequence / (workload.sequence + attention.half_tokens)
        self._computed: dict[tuple[str, str, bool], int] = {}
        self._curves = {
            lane: tuple((size, round(size / rate)) for size, rate in curve) for lane, curve in (("h2d", hardware.h2d_curve), ("d2h", hardware.d2h_curve))
        }
        self._rates = {"h2d": hardware.h2d_gb_per_s, "d2h": hardware.d2h_gb_per_s}
        adam_gb_per_s = _ADAM_BYTES * hardware.cpu_adam_per_s / 1e9
        self._pass_gb_per_s = {
            "cpu_adam": adam_gb_per_s, "host_pass": _PASS_SHARE * adam_gb_per_s,
            "thread_pass": hardware.thread_gb_per_s, "device_pass": hardware.device_gb_per_s,
        }  # fmt: skip

    def touched_bytes(self, op: Op) -> int:
        return self._elementwise.touched_bytes(op) or 0

    def _copy(self, op: Op) -> tuple[int, bool]:
        """(duration, extrapolated) of a copy."""
        if self.hardware.unified:
            return 0, False
        if curve := self._curves[op.lane]:
            return interpolate(curve, op.bytes)
        return math.ceil(self.hardware.link_latency_ns + op.bytes / self._rates[op.lane]), False

    def whole(self, op: Op) -> tuple[Op, float]:
        """Of a recompute without attention: the same with it, and the share of its time that the one without takes."""
        layer, _, workload = op.shape.partition("/")
        flops = self.model.work(op.kind, op.layer, self.workload).flops
        full = msgspec.structs.replace(op, flops=flops, shape=f"{layer.removesuffix(KEPT)}/{workload}")
        return full, self._compute_ns(op.kind, op.layer, kept=True) / self._compute_ns(op.kind, op.layer)

    def _compute_ns(self, kind: str, layer: str, *, kept: bool = False) -> int:
        if (kind, layer, kept) not in self._computed:
            work = self.model.work(kind, layer, self.workload, kept=kept)
            attention = work.attention_flops * (_ATTENTION_BACKWARD if kind == "backward" else 1) * (2 if self.masked else 1)
            self._computed[kind, layer, kept] = math.ceil(
                work.linear_flops / self._linear_flops_per_ns + attention / self._attention_flops_per_ns + work.moved_bytes / self.hardware.device_gb_per_s
            )
        return self._computed[kind, layer, kept]

    def extrapolated(self, op: Op) -> bool:
        return (op.kind in COPY_KINDS and self._copy(op)[1]) or (self.masked and op.kind in LAYER_KINDS)

    def share(self, op: Op, workload: Workload) -> float:
        """The time of a decoder layer's `op` over what it would be under another `workload` of the same tokens."""
        other, kept = Datasheet(self.hardware, self.model, workload), is_kept(op.shape)
        return self._compute_ns(op.kind, op.layer, kept=kept) / other._compute_ns(op.kind, op.layer, kept=kept)

    def duration_ns(self, op: Op) -> int:
        hardware, kind = self.hardware, op.kind
        if kind == "thread_pass" and op.parameters:  # a norm
            return math.ceil(max(op.bytes / hardware.thread_gb_per_s, op.parameters * _THREAD_NORM_NS))
        if kind in PASS_KINDS:
            return math.ceil(op.bytes / self._pass_gb_per_s[kind])
        if kind in COPY_KINDS:
            return self._copy(op)[0]
        if kind in COMPUTE_KINDS + UNMEASURED_KINDS:
            return self._compute_ns(kind, op.layer, kept=is_kept(op.shape))
        if kind == "clip":
            return 0
        if kind == "cpu_update":
            return math.ceil(op.parameters / hardware.cpu_update_per_s * 1e9)
        touched = self._elementwise.touched_bytes(op)
        if touched is None:
            raise UserError(f"hardware {hardware.name}: {op.id}", found=f"an op of kind {kind}", allowed="a kind with a datasheet formula", fix=FIX)
        return math.ceil(touched / (hardware.host_gb_per_s if op.lane == "cpu" else hardware.device_gb_per_s))
