"""Calibrate: measures this machine for some models over a grid of workloads, as a HardwareSpec with a CostTable.

Op durations come from the executor itself: a cut-down model (same layers, fewer of them) runs a few steps. The host's ops are timed under
`sequential`, each alone, and so is compute without a GPU; on one it is timed under `resident`, without a pause: a GPU that rests between ops
runs at higher clocks, and a 7B step on an H200 then took 9 to 14 % longer op by op than was measured with pauses. Copies are timed by size on top of that;
how lanes slow each other, by running them in pairs.

What hangs on the tokens (layers, head, activations, workspace) is measured at every workload of the grid, for every model. What does not, the optimizer's
ops, copies and contention, is measured for the first model alone, over sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch
from transformers import PretrainedConfig

from megatrain.runtime import machine
from megatrain.runtime.chunk_updates import BYTES, ChunkUpdates
from megatrain.runtime.executor import lane_threads
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.runtime.memory.kept_memory import KeptMemory
from megatrain.runtime.memory.process_memory import growth
from megatrain.runtime.rates import Rates, measure_rates
from megatrain.runtime.repeats import rounded, spread
from megatrain.runtime.trial import Trial, run_trial
from megatrain.simulator.arithmetic import gradient_bytes
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import (
    ATTENTION_EFFICIENCY,
    ATTENTION_HALF_TOKENS,
    COMPUTE_KINDS,
    COPY_KINDS,
    CURVE_KINDS,
    UNMEASURED_KINDS,
    WIDE_KINDS,
    CostTable,
    Curve,
    HardwareSpec,
    Workspace,
)
from megatrain.simulator.plan import Knobs, Placement, Plan
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op, serialized
from megatrain.simulator.specs import DTYPE_BYTES, ModelSpec
from megatrain.simulator.workload import Workload

_LAYERS = 3
_LEAST_ATTENTION = 0.05  # of a recompute's FLOPs: below, nobody keeps it (a tenth of the time on an H200)
_STEPS = 3
_SECONDS = 1.5  # of steps at least, under each plan: a shared machine's speed wanders within seconds
_HOST_SECONDS = 1.0  # of the host's optimizer, which is run several times: its speed wanders by a tenth within minutes
_HOST_TURNS = 4
_LEAST_UPDATED = 2**23  # parameters, 150 MB, whatever the host's limit: what updates fewer beside a copy measures Python's lock
_QUICK_TOKENS = 4096  # of a micro-batch where only the optimizer's ops are timed, which do not hang on it, nor on compiled layers
_UNCERTAINTY = 0.10  # of what is predicted from the rates instead of the table: the layers and copies were measured here
_MARGIN_BYTES = 2**21  # one small block of PyTorch's allocator
_OPTIMIZER_KINDS = ("update", "norm", "clip", "ratios")
Samples = dict[tuple[str, str | int], list[int]]
"""(cost table's key, size or shape) -> durations in ns"""


class Subject(NamedTuple):
    """A model to measure."""

    model: ModelSpec
    config: PretrainedConfig


class _Layers(NamedTuple):
    """What was found at one point of the grid."""

    shape: str
    tokens: int
    saved_bytes: int
    workspace: Workspace | None


class _Bench:
    """Runs plans of cut-down models, one after the other, and collects what their ops took."""

    def __init__(self, device: torch.device, limits: tuple[int, int], progress: Callable[[str], None]) -> None:
        self.device, self.limits, self.progress = device, limits, progress
        self.memory = KeptMemory(registered=device.type == "cuda")
        self.samples: Samples = {}
        self.amounts: dict[tuple[str, str | int], int] = {}
        """what compute ops are scaled by"""
        self.beside: list[int] = []
        """bytes that the process took beside its pools while the host's optimizer ran, each time"""

    def plan(self, policy: str, model: ModelSpec, workload: Workload, placement: Placement | None = None) -> Plan:
        knobs = Knobs(weight_slots=1 if policy == "sequential" else 2, placement=placement or Placement())
        return Plan(
            policy=policy,
            hardware="",
            source="",
            device_limit_bytes=self.limits[0],
            host_limit_bytes=self.limits[1],
            model=model,
            workload=workload,
            knobs=knobs,
        )

    def run(
        self, subject: Subject, plan: Plan, kinds: Iterable[str], *, alone: bool = False, evaluates: bool = False, seconds: float | None = None
    ) -> Trial:  # fmt: skip
        """Steady steps of `plan`; what ops of `kinds` took is collected. `alone`: one op after the other, whatever the lane."""
        schedule = serialized(lower(plan)) if alone else lower(plan)
        seconds = _SECONDS if seconds is None else seconds
        trial = run_trial(
            plan, subject.config, self.device, steps=_STEPS, seconds=seconds, schedule=schedule, host_memory=self.memory, evaluates=evaluates
        )  # fmt: skip
        for op in trial.schedule.ops:
            if op.kind in kinds:
                self._collect(plan, op, [timeline.by_op[op.id].duration_ns for timeline in trial.timelines])
        if trial.evaluation:
            self._collect(plan, *trial.evaluation)
        return trial

    def _collect(self, plan: Plan, op: Op, durations: list[int]) -> None:
        key = _key(op, wide=op.kind in WIDE_KINDS and gradient_bytes(plan, op.layer) > DTYPE_BYTES[plan.workload.dtype])
        self.samples.setdefault(key, []).extend(durations)
        self.amounts[key] = op.amount

    def layers(self, subject: Subject, workload: Workload, base: Workload) -> _Layers | None:
        """One point of the grid: everything whose time or memory hangs on the tokens. None where it does not fit.

        What keeping attention saves a token hangs on the sequence alone, so it is measured once for each length, from the base's on. Compiled, a loss
        without its backward is one more program to compile: at the base alone.
        """
        small, cuda = subject.model.shortest(_LAYERS), self.device.type == "cuda"
        evaluates = workload == base or not workload.compiled
        beside = {"resident": _OPTIMIZER_KINDS}  # where they run alone
        trial = None
        for policy in ("resident", "double_buffer") if cuda else ("sequential",):
            with contextlib.suppress(UserError):
                trial = self.run(subject, self.plan(policy, small, workload), COMPUTE_KINDS + beside.get(policy, ()), evaluates=evaluates)
                break
        if trial is None:
            self.progress(f"left out, no room: {workload.batch} x {workload.sequence} tokens")
            return None
        keeps = workload == base or workload.sequence > base.sequence
        if keeps and (attended := _worth_keeping(small, workload)):
            with contextlib.suppress(UserError):  # no room besides, or a kernel that leaves nothing to keep
                self.run(subject, self.plan(trial.schedule.policy, small, workload, Placement(attention=",".join(attended))), ("recompute",))
        workspace = _workspace(trial) if trial.peaks else None
        return _Layers(f"{subject.model.shape}/{workload.shape}", workload.tokens, trial.saved_bytes, workspace)


def calibrate(
    name: str, model: ModelSpec, workload: Workload, config: PretrainedConfig, device: torch.device, *, grid: Sequence[Workload] = (),
    others: Sequence[Subject] = (), host_bytes: int | None = None, device_bytes: int | None = None, progress: Callable[[str], None] = lambda _: None,
) -> HardwareSpec:  # fmt: skip
    """Measures the layers of `model` and of `others` under `workload` and under every workload of `grid`, and the machine around them.

    `host_bytes` and `device_bytes` replace what the machine reports of itself. `progress` hears what is measured next. Raises UserError
    where even the cut-down model does not fit.
    """
    limits = (device_bytes or machine.usable_device_bytes(device), host_bytes or machine.host_bytes())
    workload, *grid = (msgspec.structs.replace(point, accumulation=1) for point in (workload, *grid))
    bench, subject, small = _Bench(device, limits, progress), Subject(model, config), model.shortest(_LAYERS)
    with contextlib.ExitStack() as held:
        held.callback(bench.memory.free)
        quick = msgspec.structs.replace(workload, batch=min(workload.batch, max(_QUICK_TOKENS // workload.sequence, 1)), compiled=False)
        most = bench.plan("sequential", small, msgspec.structs.replace(quick, accumulation=2))
        needed = sum(buffer.allocated for buffer in lower(most).buffers if buffer.place == "host")
        if 0 < needed <= limits[1]:  # otherwise the executor says that it does not fit
            progress("memory: touching and registering it")
            with contextlib.suppress(RuntimeError, OSError, ValueError):  # likewise
                bench.memory.reserve(needed)
        count = min(sum(layer.elements for layer in small.decoders), max(limits[1] - needed, 0) // BYTES)
        chunks = ChunkUpdates(
            max(count, min(sum(layer.elements for layer in small.decoders), _LEAST_UPDATED)), TORCH_DTYPE[workload.dtype], lane_threads(device)["cpu"]
        )
        held.callback(chunks.close)
        _measure_optimizer(bench, subject, quick)
        progress("lanes together")
        together = bench.run(subject, bench.plan("double_buffer", small, workload), ())
        points, wanted = [], list(itertools.product((subject, *others), dict.fromkeys((workload, *grid))))
        every = -(-len(wanted) // (_HOST_TURNS - 1))
        for number, (each, point) in enumerate(wanted):
            if number % every == 0:
                _measure_host_optimizer(bench, chunks, subject, quick, 1 + number // every)
            progress(f"layers of {each.model.name}, {point.batch} x {point.sequence} tokens")
            points.append(bench.layers(each, point, workload))
        _measure_host_optimizer(bench, chunks, subject, quick, 1 + -(-len(wanted) // every))
        progress("copies and rates")
        rates = measure_rates(small, workload, config, device, lane_threads(device), chunks.in_turn())
    table = _table(bench, rates, together, [point for point in points if point], workload.loss_chunk, device)
    described = machine.describe(device)
    h2d, d2h = _curve(rates.copies["load_weights"]), _curve(rates.copies["save_gradients"])
    kept_h2d, kept_d2h = (table.contention.get(lane, {}) for lane in ("h2d", "d2h"))
    return HardwareSpec(
        name=name, source=f"measured on {described['device']}, {described['cores']} cores, by `megatrain calibrate` on {table.date}",
        device_bytes=limits[0], host_bytes=limits[1], cores=machine.cores(),
        peak_tflops={workload.dtype: rounded(rates.matmul_flops / 1e12)}, linear_efficiency=rounded(_linear_efficiency(table, rates, small, workload)),
        device_gb_per_s=rounded(rates.device_bytes_per_s / 1e9), h2d_gb_per_s=h2d[-1][1], d2h_gb_per_s=d2h[-1][1], h2d_curve=h2d, d2h_curve=d2h,
        duplex_curve=_duplex(rates.duplex, h2d, d2h), duplex_fraction=min(kept_h2d.get("d2h", 1.0), kept_d2h.get("h2d", 1.0)),
        link_latency_ns=rates.copies["load_weights"][0][1], uncertainty=_UNCERTAINTY, host_gb_per_s=rounded(rates.host_bytes_per_s / 1e9),
        cpu_update_per_s=rounded(_rate(table.curves["cpu_update"])), cpu_adam_per_s=rounded(rates.cpu_adam_per_s),
        thread_gb_per_s=rounded(rates.thread_bytes_per_s / 1e9), costs=table,
    )  # fmt: skip


def _measure_host_optimizer(bench: _Bench, chunks: ChunkUpdates, subject: Subject, workload: Workload, turn: int) -> None:
    """Its ops on the host's cores, which do not hang on the tokens: whole layers and chunks of them. What is measured in several turns is pooled: the host's speed
    wanders, and the spread says by how much.
    """
    bench.progress(f"optimizer on the host, whole layers, chunks, accumulating, turn {turn}")
    small, kinds = subject.model.shortest(_LAYERS), tuple(kind for kind in CURVE_KINDS if kind not in COPY_KINDS)
    with growth() as grown:
        for accumulation in (1, 2):
            work = msgspec.structs.replace(workload, accumulation=accumulation)
            bench.run(subject, bench.plan("sequential", small, work), kinds, seconds=_HOST_SECONDS)
    bench.beside += grown
    for key, durations in chunks.measure(_HOST_SECONDS).items():
        bench.samples.setdefault(key, []).extend(durations)


def _measure_optimizer(bench: _Bench, subject: Subject, workload: Workload) -> None:
    """Other ops that do not hang on the tokens: of the device, whole layers and chunks of them, and what clips by the update."""
    small = subject.model.shortest(_LAYERS)
    by_update, twice = msgspec.structs.replace(workload, clipping="update"), msgspec.structs.replace(workload, accumulation=2)
    for what, policy, work, kinds, alone in (
        ("optimizer on the device", "resident", workload, _OPTIMIZER_KINDS, False),
        ("gradient accumulation on the device", "resident", twice, _OPTIMIZER_KINDS, False),
        ("optimizer on the device, in chunks", "overlapped", workload, _OPTIMIZER_KINDS, True),
        ("clipping by the update, on the host", "sequential", by_update, ("ratios",), False),
        ("clipping by the update, in chunks", "overlapped", by_update, ("ratios",), True),
        ("clipping by the update, on the device", "resident", by_update, ("ratios",), True),
    ):
        bench.progress(what)
        try:
            bench.run(subject, bench.plan(policy, small, work), kinds, alone=alone)
        except UserError:
            if policy != "resident":  # too large for this device even so: then the whole model will not be resident either
                raise


def _worth_keeping(model: ModelSpec, workload: Workload) -> list[str]:
    """The decoder layers whose attention can be kept, and is a good part of their work."""
    layers = [layer.name for layer in model.decoders if model.keeps_attention(layer.name)]
    works = {layer: model.work("recompute", layer, workload) for layer in layers}
    return [layer for layer, work in works.items() if work.attention_flops >= _LEAST_ATTENTION * work.flops]


def _key(op: Op, *, wide: bool) -> tuple[str, str | int]:
    """Where the cost table keeps the duration of `op`, whose gradient may be `wide`."""
    if op.kind in COMPUTE_KINDS + UNMEASURED_KINDS:
        return op.kind, op.shape
    how = ":add" if op.adds else ":wide" if wide else ""
    other_lane = f"@{op.lane}" if op.kind in _OPTIMIZER_KINDS[1:] and op.lane != "cpu" else ""
    return f"{op.kind}{how}{other_lane}", op.parameters


def _table(bench: _Bench, rates: Rates, together: Trial, points: list[_Layers], loss_chunk: int, device: torch.device) -> CostTable:
    curves: dict[str, list[tuple[int, int]]] = {kind: list(points) for kind, points in rates.copies.items()}
    compute: dict[str, dict[str, tuple[int, int]]] = {}
    overhead = [round(seconds * 1e9) - timeline.makespan_ns for seconds, timeline in zip(together.seconds, together.timelines, strict=True)]
    waits, lanes = _waits(together), rates.contention
    spreads = rates.spread | {f"dispatch_ns.{lane}": spread([statistics.median(step) for step in steps]) for lane, steps in waits.items()}
    spreads["step_overhead_ns"] = spread(overhead)
    for (kind, size), durations in sorted(bench.samples.items(), key=_by_number):
        typical = round(statistics.median(durations))
        if isinstance(size, str):
            compute.setdefault(kind, {})[size] = (bench.amounts[kind, size], typical)
        else:
            curves.setdefault(kind, []).append((size, typical))
        spreads[f"{kind} {size}"] = spread(durations)
    return CostTable(
        measured_on=str(machine.describe(device)["device"]), date=time.strftime("%Y-%m-%d"),
        curves={kind: _ascending(points) for kind, points in curves.items()}, compute=compute, loss_chunk=loss_chunk,
        activations={point.shape: (point.tokens, point.saved_bytes) for point in points if point.workspace},
        workspace={point.shape: point.workspace for point in points if point.workspace}, contention=lanes.kept,
        turns=lanes.turns, fixed=rates.fixed, process_bytes=_process_bytes(bench.beside, device), dispatch_ns=_dispatch(waits),
        spread=spreads, step_overhead_ns=max(round(statistics.median(overhead)), 0),
    )  # fmt: skip


def _process_bytes(beside: list[int], device: torch.device) -> int:
    """The median of what was seen. Without a GPU the pools that stand for its memory would count too."""
    return round(statistics.median(beside)) if beside and device.type == "cuda" else 0


def _by_number(sample: tuple[tuple[str, str | int], object]) -> list[str]:
    """Sorts 3x512 before 12x512."""
    return [digits.zfill(20) if digits.isdigit() else digits for digits in re.split(r"(\d+)", " ".join(map(str, sample[0])))]


def _workspace(trial: Trial) -> Workspace:
    """What was seen and a little more: at 36 layers instead of 3 the peak was 1.0 MiB of 11.9 GiB higher, and memory may not be under-predicted."""
    layer_kinds = ("forward", "recompute", "backward")
    margin = trial.saved_bytes // 200 + _MARGIN_BYTES
    layer = max(trial.peaks[kind] for kind in layer_kinds) - trial.saved_bytes
    head = max(trial.peaks[kind] for kind in ("embed", "head", "embed_backward"))
    update = max((trial.peaks[kind] for kind in _OPTIMIZER_KINDS if kind in trial.peaks), default=0)
    return Workspace(layer=max(layer, 0) + margin, head=head + margin, update=update + margin)


def _ascending(points: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sizes ascending, and a proportional point where there is only one and it is no constant: a rate."""
    ordered = sorted(points)
    if len(ordered) == 1 and ordered[0][0] > 0:
        size, duration = ordered[0]
        return (ordered[0], (2 * size, 2 * duration))
    return tuple(ordered)


def _waits(measured: Trial) -> dict[str, list[list[int]]]:
    """Lane -> of each step, the times from an op being ready (its lane free, its dependencies ended) to its start."""
    waits: dict[str, list[list[int]]] = {lane: [] for lane in measured.schedule.lanes}
    for timeline in measured.timelines:
        free = dict.fromkeys(measured.schedule.lanes, 0)
        for steps in waits.values():
            steps.append([])
        for op in measured.schedule.ops:
            span = timeline.by_op[op.id]
            ready = max([free[op.lane], *(timeline.by_op[other].end_ns for other in op.after)])
            waits[op.lane][-1].append(max(span.start_ns - ready, 0))
            free[op.lane] = span.end_ns
    return waits


def _dispatch(waits: dict[str, list[list[int]]]) -> dict[str, int]:
    """Per lane, the median over all steps."""
    return {lane: round(statistics.median(itertools.chain(*steps))) for lane, steps in waits.items()}


def _linear_efficiency(table: CostTable, rates: Rates, model: ModelSpec, workload: Workload) -> float:
    """What a decoder layer's products reach of the matrix product's rate: so that the datasheet's formula, with what a usual GPU's attention reaches,
    gives the layer's measured forward. Where the rest of that formula would take more than half of it, as on a CPU, half.
    """
    layer = model.decoders[0]
    work = model.work("forward", layer.name, workload)
    seconds = table.compute["forward"][f"{layer.signature}/{workload.shape}"][1] / 1e9
    rest = work.moved_bytes / rates.device_bytes_per_s
    rest += work.attention_flops * (1 + ATTENTION_HALF_TOKENS / workload.sequence) / (ATTENTION_EFFICIENCY * rates.matmul_flops)
    return min(1.0, work.linear_flops / max(seconds - rest, seconds / 2) / rates.matmul_flops)


def _curve(points: list[tuple[int, int]]) -> Curve:
    """(bytes, GB/s). A copy never takes less time than a smaller one: where noise says so, it takes as long."""
    longest, curve = 0.0, []
    for size, duration in points:
        rate = rounded(size / max(duration, 1))
        curve.append((size, min(rate, size / longest) if longest else rate))
        longest = size / curve[-1][1]
    return tuple(curve)


def _duplex(both: list[tuple[int, int]], h2d: Curve, d2h: Curve) -> Curve:
    """(bytes, GB/s of each direction while both are busy), no faster than the faster one alone."""
    alone = {size: max(dict(h2d)[size], dict(d2h)[size]) for size, _ in both}
    return tuple((size, min(rate, alone[size])) for size, rate in _curve(both))


def _rate(points: tuple[tuple[int, int], ...]) -> float:
    size, duration = points[-1]
    return size / (duration / 1e9)
