"""CostModel: how long an op takes when it has its lane, the link and the host's memory to itself.

Two models for prediction, one for checking. `Calibrated` reads curves measured on the machine:

    duration(size) = linear between the two measured sizes around it, along the outermost segment beyond them

and, for compute, the duration of the very shape, or of the nearest measured shape scaled by FLOPs. Whatever lies outside the
measured sizes or shapes is flagged as extrapolated. `Datasheet` divides by rates: FLOPs / (peak x efficiency), latency + bytes / rate.
`Replayed` returns what a run measured. How much busy lanes slow each other is told here (`contention`) and applied by the engine.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Mapping
from typing import Protocol

from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import COPY_KINDS, CostTable, HardwareSpec, Workspace
from megatrain.simulator.schedule import Op
from megatrain.simulator.specs import DTYPE_BYTES, EMBEDDING, ModelSpec, Workload
from megatrain.simulator.timeline import Timeline

_FIX = "run `megatrain calibrate` for this model and workload"


class CostModel(Protocol):
    """Durations of ops in integer nanoseconds, and what else the machine does to a schedule."""

    @property
    def contention(self) -> Mapping[str, Mapping[str, float]]:
        """Lane -> other lane -> rate of the first, (0, 1], while the other is busy too."""

    @property
    def dispatch_ns(self) -> Mapping[str, int]:
        """Lane -> time from an op being ready to its start."""

    @property
    def step_overhead_ns(self) -> int:
        """Host time per step outside the schedule."""

    def duration_ns(self, op: Op) -> int:
        """Time of `op` at full rate. Raises UserError where nothing is known of its kind or shape."""

    def extrapolated(self, op: Op) -> bool:
        """The duration lies outside what was measured."""

    def activations_bytes(self, shape: str) -> int | None:
        """Bytes of one decoder layer's saved activations, where that was measured."""

    def workspace(self, shape: str) -> Workspace | None:
        """Peak device bytes besides the planned pools and saved activations, where that was measured."""


class Calibrated:
    """A CostTable, looked up."""

    def __init__(self, table: CostTable) -> None:
        self.table = table
        self.contention: Mapping[str, Mapping[str, float]] = table.contention
        self.dispatch_ns: Mapping[str, int] = table.dispatch_ns
        self.step_overhead_ns = table.step_overhead_ns
        self._known: dict[tuple[str, str, bool, int | str], tuple[int, bool]] = {}

    def duration_ns(self, op: Op) -> int:
        return self._look_up(op)[0]

    def extrapolated(self, op: Op) -> bool:
        return self._look_up(op)[1]

    def _look_up(self, op: Op) -> tuple[int, bool]:
        """(duration, extrapolated) of `op`."""
        kind = op.kind
        size = op.shape or (op.bytes if kind in COPY_KINDS else op.parameters)
        key = (kind, op.lane, _adds(op), size)
        if key not in self._known:
            self._known[key] = self._compute(kind, size) if isinstance(size, str) else interpolate(self._curve(op), size)
        return self._known[key]

    def _curve(self, op: Op) -> tuple[tuple[int, int], ...]:
        kind, curves = op.kind, self.table.curves
        names = ([f"{kind}:add@{op.lane}", f"{kind}:add"] if _adds(op) else []) + [f"{kind}@{op.lane}", kind]
        name = next((name for name in names if name in curves), None)
        if name is None:
            raise UserError(f"costs of {self.table.measured_on}: curves", found=f"nothing for `{kind}` on lane {op.lane}", allowed=_list(curves), fix=_FIX)
        return curves[name]

    def _compute(self, kind: str, shape: str) -> tuple[int, bool]:
        durations = self.table.compute.get(kind, {})
        if shape in durations:
            return durations[shape], False
        model, _, workload = shape.partition("/")
        wanted = work(kind, shape)
        candidates = []
        for known in sorted(durations):
            amount = work(kind, known)
            if wanted and amount and known.rpartition("-")[2] == workload.rpartition("-")[2]:
                candidates.append((known.partition("/")[0] != model, abs(math.log(wanted / amount)), known, amount))
        if wanted is None or not candidates:
            raise UserError(f"costs of {self.table.measured_on}: compute.{kind}", found=f"nothing for {shape}", allowed=_list(durations), fix=_FIX)
        _, _, nearest, amount = min(candidates)
        return -(-durations[nearest] * wanted // amount), True

    def activations_bytes(self, shape: str) -> int | None:
        """Of this shape, or of the same model with other tokens: what autograd saves is proportional to the tokens."""
        known = self.table.activations
        if shape in known:
            return known[shape]
        tokens, (model, _, workload) = _tokens(shape), shape.partition("/")
        for other in sorted(known):
            other_tokens, (other_model, _, other_workload) = _tokens(other), other.partition("/")
            if tokens and other_tokens and other_model == model and other_workload.rpartition("-")[2] == workload.rpartition("-")[2]:
                return -(-known[other] * tokens // other_tokens)
        return None

    def workspace(self, shape: str) -> Workspace | None:
        """Of this very shape only: it has fixed parts, so it does not scale."""
        return self.table.workspace.get(shape)


def _adds(op: Op) -> bool:
    """`op` adds to what stands in its target."""
    return any(buffer in op.reads for buffer in op.writes)


def _list(keys: Mapping[str, object]) -> str:
    return ", ".join(sorted(keys)[:8]) or "nothing measured"


def interpolate(points: tuple[tuple[int, int], ...], size: int) -> tuple[int, bool]:
    """(duration in ns, extrapolated) at `size` on a curve of ascending (size, ns) points; never below 0.

    One point of size 0 is a constant. One point of another size stands for a proportion.

    >>> interpolate(((100, 20), (200, 30)), 150), interpolate(((100, 20), (200, 30)), 400)
    ((25, False), (50, True))
    """
    if len(points) == 1:
        known, duration = points[0]
        return (duration, False) if known in (0, size) else (-(-duration * size // known), True)
    right = min(max(bisect.bisect_left(points, (size, -1)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return max(y0 + -(-(y1 - y0) * (size - x0) // (x1 - x0)), 0), not points[0][0] <= size <= points[-1][0]


_SHAPE = re.compile(
    r"(?P<family>\w+)-(?P<hidden>\d+)x(?P<ffn>\d+)-(?P<heads>\d+):(?P<kv>\d+)x(?P<dim>\d+)-v(?P<vocabulary>\d+)/(?P<batch>\d+)x(?P<sequence>\d+)-(?P<dtype>\w+)"
)
_SHARES = {"forward": 1, "recompute": 1, "backward": 2, "head": 3}


def _tokens(shape: str) -> int | None:
    match = _SHAPE.fullmatch(shape)
    return int(match["batch"]) * int(match["sequence"]) if match else None


def work(kind: str, shape: str) -> int | None:
    """What the duration of a compute op of this shape is proportional to: FLOPs, for the embedding elements; None for an unreadable shape.

    >>> work("embed", "qwen2-2048x11008-16:2x128-v151936/32x1024-bf16")
    67108864
    """
    match = _SHAPE.fullmatch(shape)
    if match is None:
        return None
    hidden, ffn, heads, kv, dim, vocabulary, batch, sequence = (
        int(match[key]) for key in ("hidden", "ffn", "heads", "kv", "dim", "vocabulary", "batch", "sequence")
    )
    if kind not in _SHARES:
        return batch * sequence * hidden
    model = ModelSpec(
        name=shape, family=match["family"], layers=1, hidden=hidden, intermediate=ffn, heads=heads, kv_heads=kv, head_dim=dim, vocabulary=vocabulary, tied=False
    )
    tokens = batch * sequence
    return _SHARES[kind] * (model.head_flops(tokens) if kind == "head" else model.layer_flops(tokens, sequence))


class _Unmeasured:
    """A cost model that knows no measured sizes and flags nothing."""

    def extrapolated(self, op: Op) -> bool:
        return False

    def activations_bytes(self, shape: str) -> int | None:
        return None

    def workspace(self, shape: str) -> Workspace | None:
        return None


class Datasheet(_Unmeasured):
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
        self._flops_per_ns = hardware.peak_tflops[workload.dtype] * hardware.compute_efficiency * 1e3
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
        per_parameter = {"norm": gradient, "accumulate_gradients": self._width + gradient * (2 if _adds(op) else 1), "update": 24 + gradient}.get(kind)
        if per_parameter is None:
            raise UserError(f"hardware {hardware.name}: {op.id}", found=f"an op of kind {kind}", allowed="a kind with a datasheet formula", fix=_FIX)
        return math.ceil(per_parameter * op.parameters / (hardware.host_gb_per_s if op.lane == "cpu" else hardware.device_gb_per_s))


class Replayed(_Unmeasured):
    """Durations of a timeline, with nothing added: what the engine makes of them, against the timeline, is the engine's own error."""

    contention: Mapping[str, Mapping[str, float]] = {}
    dispatch_ns: Mapping[str, int] = {}
    step_overhead_ns = 0

    def __init__(self, timeline: Timeline) -> None:
        self._durations = {span.op: span.duration_ns for span in timeline.spans}

    def duration_ns(self, op: Op) -> int:
        if op.id not in self._durations:
            raise UserError("timeline", found=f"no span of {op.id}", allowed="a timeline of this very schedule", fix="run the plan again")
        return self._durations[op.id]


def cost_model(hardware: HardwareSpec, model: ModelSpec, workload: Workload) -> CostModel:
    """The calibrated model where the machine was measured, else the datasheet's."""
    return Calibrated(hardware.costs) if hardware.costs is not None else Datasheet(hardware, model, workload)
