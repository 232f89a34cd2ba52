"""Calibrate: measures this machine for one model and workload, as a HardwareSpec with a CostTable.

Op durations come from the executor itself: a cut-down model (same layers, fewer of them) runs a few steps. The host's ops are timed under
`sequential`, each alone, and so is compute without a GPU; on one it is timed under `resident`, without a pause: a GPU that rests between ops
runs at higher clocks, and a 7B step on an H200 then took 9 to 14 % longer op by op than was measured with pauses. Copies are timed by size on top of that; how lanes slow each other, by running them in pairs.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import torch
from transformers import PretrainedConfig

from megatrain.runtime import machine
from megatrain.runtime.batch import Batch
from megatrain.runtime.executor import Executor, lane_threads
from megatrain.runtime.files.model_files import ModelState, random_weights
from megatrain.runtime.hyperparameters import AdamW
from megatrain.runtime.rates import Rates, measure_rates
from megatrain.simulator.errors import UserError
from megatrain.simulator.hardware import ATTENTION_EFFICIENCY, ATTENTION_HALF_TOKENS, COMPUTE_KINDS, COPY_KINDS, CURVE_KINDS, CostTable, HardwareSpec, Workspace
from megatrain.simulator.plan import Knobs, Placement, Plan
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op, Schedule, serialized
from megatrain.simulator.specs import ModelSpec, Workload
from megatrain.simulator.timeline import Timeline

_LAYERS = 3
_LEAST_ATTENTION = 0.05  # of a recompute's FLOPs: below, nobody keeps it (a tenth of the time on an H200)
_WARM_UP, _STEPS = 2, 6
_SECONDS = 6.0  # of steps at least, under each policy: a shared machine's speed wanders by 10 % within seconds
_UNCERTAINTY = 0.10  # of what is predicted from the rates instead of the table: the layers and copies were measured here
_MARGIN_BYTES = 2**21  # one small block of PyTorch's allocator
Samples = dict[tuple[str, str | int], list[int]]
"""(cost table's key, size or shape) -> durations in ns"""


class _Measured(NamedTuple):
    schedule: Schedule
    timelines: list[Timeline]
    seconds: list[float]
    peaks: dict[str, int]
    """op kind -> the most that was allocated on the device while one ran, besides the pools; empty without CUDA"""
    saved_bytes: int
    """of one decoder layer's activations"""


def calibrate(
    name: str, model: ModelSpec, workload: Workload, config: PretrainedConfig, device: torch.device, *,
    host_bytes: int | None = None, device_bytes: int | None = None, progress: Callable[[str], None] = lambda _: None,
) -> HardwareSpec:  # fmt: skip
    """Measures `model`'s layers under `workload` on `device` and the machine around it; some 45 s.

    `host_bytes` and `device_bytes` replace what the machine reports of itself. `progress` hears what is measured next. Raises UserError
    where even the cut-down model does not fit.
    """
    limits = (device_bytes or machine.usable_device_bytes(device), host_bytes or machine.host_bytes())
    small = model.shortest(_LAYERS)
    samples: Samples = {}
    host_kinds = tuple(kind for kind in CURVE_KINDS if kind not in COPY_KINDS)
    progress("layers, one op at a time")
    alone = _run(_plan("sequential", small, workload, limits), config, device)
    _collect(alone, samples, host_kinds)
    progress("gradient accumulation")
    _collect(_run(_plan("sequential", small, _with_accumulation(workload, 2), limits), config, device), samples, host_kinds)
    progress("everything resident")
    resident = None
    with contextlib.suppress(UserError):  # too large for this device even so: then the whole model will not be resident either
        resident = _run(_plan("resident", small, workload, limits), config, device)
        _collect(resident, samples, ("update", "norm", "clip"))
    progress("optimizer on the device, in chunks")
    plan = _plan("overlapped", small, workload, limits)
    _collect(_run(plan, config, device, serialized(lower(plan))), samples, ("update", "norm", "clip"))
    progress("clipping by the update")
    by_update = msgspec.structs.replace(workload, clipping="update")
    _collect(_run(_plan("sequential", small, by_update, limits), config, device), samples, ("ratios",))
    for policy in ("overlapped", "resident") if resident else ("overlapped",):  # chunks, and whole layers
        plan = _plan(policy, small, by_update, limits)
        _collect(_run(plan, config, device, serialized(lower(plan))), samples, ("ratios",))
    progress("lanes together")
    together = _run(_plan("double_buffer", small, workload, limits), config, device)
    _collect((resident or together) if device.type == "cuda" else alone, samples, COMPUTE_KINDS)
    kept = None
    if attended := _worth_keeping(small, workload):
        progress("kept attention")
        policy = "sequential" if device.type == "cpu" else "resident" if resident else "double_buffer"
        with contextlib.suppress(UserError):  # no room besides, or a kernel that leaves nothing to keep
            kept = _run(_plan(policy, small, workload, limits, Placement(attention=",".join(attended))), config, device)
            _collect(kept, samples, ("recompute",))
    progress("copies and rates")
    rates = measure_rates(small, workload, config, device, lane_threads(device))
    table = _table(samples, rates, alone, together, kept, resident.peaks.get("update", 0) if resident else 0, model, workload, device)
    described = machine.describe(device)
    return HardwareSpec(
        name=name, source=f"measured on {described['device']}, {described['cores']} cores, by `megatrain calibrate` on {table.date}",
        device_bytes=limits[0], host_bytes=limits[1], cores=machine.cores(),
        peak_tflops={workload.dtype: rates.matmul_flops / 1e12}, linear_efficiency=_linear_efficiency(samples, alone.schedule, rates, small, workload),
        device_gb_per_s=rates.device_bytes_per_s / 1e9, h2d_gb_per_s=_largest(rates.copies["load_weights"]), d2h_gb_per_s=_largest(rates.copies["save_gradients"]),
        h2d_curve=_curve(rates.copies["load_weights"]), d2h_curve=_curve(rates.copies["save_gradients"]),
        duplex_fraction=min(rates.contention.get("h2d", {}).get("d2h", 1.0), rates.contention.get("d2h", {}).get("h2d", 1.0)),
        link_latency_ns=rates.copies["load_weights"][0][1], uncertainty=_UNCERTAINTY, host_gb_per_s=rates.host_bytes_per_s / 1e9,
        cpu_update_per_s=_rate(table.curves["cpu_update"]), cpu_adam_per_s=rates.cpu_adam_per_s, thread_gb_per_s=rates.thread_bytes_per_s / 1e9,
        contention=table.contention, dispatch_ns=table.dispatch_ns, costs=table,
    )  # fmt: skip


def _with_accumulation(workload: Workload, accumulation: int) -> Workload:
    return msgspec.structs.replace(workload, accumulation=accumulation)


def _worth_keeping(model: ModelSpec, workload: Workload) -> list[str]:
    """The decoder layers whose attention can be kept, and is a good part of their work."""
    layers = [layer.name for layer in model.decoders if model.keeps_attention(layer.name)]
    works = {layer: model.work("recompute", layer, workload) for layer in layers}
    return [layer for layer, work in works.items() if work.attention_flops >= _LEAST_ATTENTION * work.flops]


def _plan(policy: str, model: ModelSpec, workload: Workload, limits: tuple[int, int], placement: Placement | None = None) -> Plan:
    knobs = Knobs(weight_slots=1 if policy == "sequential" else 2, placement=placement or Placement())
    return Plan(policy=policy, hardware="", source="", device_limit_bytes=limits[0], host_limit_bytes=limits[1], model=model, workload=workload, knobs=knobs)


def _run(plan: Plan, config: PretrainedConfig, device: torch.device, schedule: Schedule | None = None) -> _Measured:
    """Steady steps of `plan`, or of another `schedule` for it, on random weights and tokens."""
    cuda, work = device.type == "cuda", plan.workload
    machine.forget_device_memory(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    generator = torch.Generator().manual_seed(0)
    # several, and one of them as long as can be: what attention takes at most
    documents = (torch.arange(work.sequence) > 0).long().expand(work.batch, -1) if work.documents else None
    with Executor(plan, config, AdamW(), device, schedule=schedule or lower(plan)) as executor:
        ModelState(plan, executor.schedule, executor.arenas, executor.templates.persistent).load(random_weights(0, device))
        timelines, seconds = [], []
        number, steady_since = 0, 0.0
        while number < _WARM_UP + _STEPS or time.monotonic() - steady_since < _SECONDS:
            number += 1
            drawn = [torch.randint(plan.model.vocabulary, (2, work.batch, work.sequence), generator=generator) for _ in range(work.accumulation)]
            result = executor.step([Batch(ids, labels, documents) for ids, labels in drawn], rate=1e-4, number=number)
            if number == _WARM_UP:
                steady_since = time.monotonic()
            elif number > _WARM_UP:
                timelines.append(result.timeline)
                seconds.append(result.seconds)
        if not cuda:
            return _Measured(executor.schedule, timelines, seconds, {}, 0)
        peaks, growth = _watch_memory(executor)
        executor.step([Batch(ids, labels, documents) for ids, labels in drawn], rate=1e-4, number=number + 1)
        base = before + executor.arenas.total("device")
        return _Measured(executor.schedule, timelines, seconds, {kind: peak - base for kind, peak in peaks.items()}, growth["recompute"])


def _watch_memory(executor: Executor) -> tuple[dict[str, int], dict[str, int]]:
    """From the next step on: by op kind, the most that was allocated on the device during one, and by how much one left it grown.

    PyTorch's allocator counts when work is enqueued, which the lane's thread does op by op.
    """
    peaks: dict[str, int] = defaultdict(int)
    growth: dict[str, int] = defaultdict(int)
    for op in executor.schedule.ops:
        if op.lane in ("compute", "update"):
            task = executor.tasks[op.id]

            def run(work: Callable[[], object] = task.run, kind: str = op.kind) -> None:
                before = torch.cuda.memory_allocated(executor.device)
                torch.cuda.reset_peak_memory_stats(executor.device)
                work()
                peaks[kind] = max(peaks[kind], torch.cuda.max_memory_allocated(executor.device))
                growth[kind] = max(growth[kind], torch.cuda.memory_allocated(executor.device) - before)

            task.run = run
    return peaks, growth


def _key(op: Op) -> tuple[str, str | int]:
    """Where the cost table keeps the duration of `op`."""
    if op.kind in COMPUTE_KINDS:
        return op.kind, op.shape
    adds = ":add" if set(op.reads) & set(op.writes) else ""
    other_lane = f"@{op.lane}" if op.kind in ("norm", "clip", "ratios") and op.lane != "cpu" else ""
    return f"{op.kind}{adds}{other_lane}", op.parameters


def _collect(measured: _Measured, samples: Samples, kinds: Iterable[str]) -> None:
    for op in measured.schedule.ops:
        if op.kind in kinds:
            samples.setdefault(_key(op), []).extend(timeline.by_op[op.id].duration_ns for timeline in measured.timelines)


def _table(
    samples: Samples, rates: Rates, alone: _Measured, together: _Measured, kept: _Measured | None, update_bytes: int, model: ModelSpec, workload: Workload,
    device: torch.device,
) -> CostTable:  # fmt: skip
    curves: dict[str, list[tuple[int, int]]] = {kind: list(points) for kind, points in rates.copies.items()}
    compute: dict[str, dict[str, tuple[int, int]]] = {}
    amounts = {_key(op): op.amount for measured in (alone, kept) if measured for op in measured.schedule.ops}
    spread: dict[str, list[float]] = {}
    for (kind, size), durations in sorted(samples.items(), key=str):
        typical = round(statistics.median(durations))
        if isinstance(size, str):
            compute.setdefault(kind, {})[size] = (amounts[kind, size], typical)
        else:
            curves.setdefault(kind, []).append((size, typical))
        low, _, high = statistics.quantiles(durations, n=4)
        spread.setdefault(kind, []).append((high - low) / max(typical, 1))
    shape = f"{model.shape}/{workload.shape}"
    overhead = [round(seconds * 1e9) - timeline.makespan_ns for seconds, timeline in zip(together.seconds, together.timelines, strict=True)]
    return CostTable(
        measured_on=str(machine.describe(device)["device"]), date=time.strftime("%Y-%m-%d"), curves={kind: _ascending(points) for kind, points in curves.items()},
        compute=compute, activations={shape: (workload.tokens, together.saved_bytes)} if together.peaks else {},
        workspace={shape: _workspace(together, update_bytes)} if together.peaks else {}, contention=rates.contention, host_memory=rates.host_memory, turns=rates.turns,
        dispatch_ns=_dispatch(together),
        spread={kind: round(statistics.median(values), 4) for kind, values in spread.items()}, step_overhead_ns=max(round(statistics.median(overhead)), 0),
    )  # fmt: skip


def _workspace(measured: _Measured, update_bytes: int) -> Workspace:
    """What was seen and a little more: at 36 layers instead of 3 the peak was 1.0 MiB of 11.9 GiB higher, and memory may not be under-predicted."""
    layer_kinds = ("forward", "recompute", "backward")
    margin = measured.saved_bytes // 200 + _MARGIN_BYTES
    layer = max(measured.peaks[kind] for kind in layer_kinds) - measured.saved_bytes
    head = max(peak for kind, peak in measured.peaks.items() if kind not in layer_kinds)
    return Workspace(layer=max(layer, 0) + margin, head=head + margin, update=update_bytes + margin)


def _ascending(points: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sizes ascending, and a proportional point where there is only one and it is no constant: a rate."""
    ordered = sorted(points)
    if len(ordered) == 1 and ordered[0][0] > 0:
        size, duration = ordered[0]
        return (ordered[0], (2 * size, 2 * duration))
    return tuple(ordered)


def _dispatch(measured: _Measured) -> dict[str, int]:
    """Per lane, the median time from an op being ready (its lane free, its dependencies ended) to its start."""
    waits: dict[str, list[int]] = {}
    for timeline in measured.timelines:
        free = dict.fromkeys(measured.schedule.lanes, 0)
        for op in measured.schedule.ops:
            span = timeline.by_op[op.id]
            ready = max([free[op.lane], *(timeline.by_op[other].end_ns for other in op.after)])
            waits.setdefault(op.lane, []).append(max(span.start_ns - ready, 0))
            free[op.lane] = span.end_ns
    return {lane: round(statistics.median(values)) for lane, values in waits.items()}


def _linear_efficiency(samples: Samples, schedule: Schedule, rates: Rates, model: ModelSpec, workload: Workload) -> float:
    """What a decoder layer's products reach of the matrix product's rate: so that the datasheet's formula, with what a usual GPU's attention reaches,
    gives the layer's measured forward. Where the rest of that formula would take more than half of it, as on a CPU, half.
    """
    op = next(op for op in schedule.ops if op.kind == "forward")
    seconds, work = statistics.median(samples[_key(op)]) / 1e9, model.work("forward", op.layer, workload)
    rest = work.moved_bytes / rates.device_bytes_per_s
    rest += work.attention_flops * (1 + ATTENTION_HALF_TOKENS / workload.sequence) / (ATTENTION_EFFICIENCY * rates.matmul_flops)
    return min(1.0, work.linear_flops / max(seconds - rest, seconds / 2) / rates.matmul_flops)


def _largest(points: list[tuple[int, int]]) -> float:
    """GB/s of the largest copy."""
    size, duration = points[-1]
    return size / duration


def _curve(points: list[tuple[int, int]]) -> tuple[tuple[int, float], ...]:
    """(bytes, GB/s). A copy never takes less time than a smaller one: where noise says so, it takes as long."""
    longest, curve = 0, []
    for size, duration in points:
        longest = max(longest, duration, 1)
        curve.append((size, size / longest))
    return tuple(curve)


def _rate(points: tuple[tuple[int, int], ...]) -> float:
    size, duration = points[-1]
    return size / (duration / 1e9)
