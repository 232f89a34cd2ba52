"""Measures this machine for some models over a grid of workloads. The result is a HardwareSpec with
a CostTable.

The executor measures op durations: it runs a few steps of a model with the same layers, but fewer
of them. Ops on the CPU are timed with the policy `sequential`, where one op runs at a time. So is
compute without a GPU. Compute on a GPU is timed with the policy `resident`, where it runs without
pauses, because pauses let a GPU run at higher clocks than in a step (`docs/lab_notes.md`). Copies
are also timed by size. Lanes run in pairs to measure how much they slow each other.

Costs that depend on the tokens (layers, head, activations, workspace) are measured for every model
at every workload of the grid. All others (the optimizer's ops, copies, contention) are measured for
the first model only, over sizes.
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
from megatrain.runtime.calibration.cpu_adam_bench import BYTES, ChunkUpdates
from megatrain.runtime.calibration.microbenchmarks import Rates, measure_rates
from megatrain.runtime.calibration.profile_steps import StepProfile, profile_steps
from megatrain.runtime.calibration.timing import rounded, spread
from megatrain.runtime.execution.executor import lane_threads
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.runtime.memory.process_memory import growth
from megatrain.runtime.memory.reusable_pinned_pool import ReusablePinnedPool
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.machine import (
    ATTENTION_EFFICIENCY,
    ATTENTION_HALF_TOKENS,
    COMPUTE_KINDS,
    COPY_KINDS,
    CURVE_KINDS,
    EVALUATION_KINDS,
    WIDE_KINDS,
    CostTable,
    Curve,
    HardwareSpec,
    Workspace,
)
from megatrain.simulator.model.specs import DTYPE_BYTES, ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op, serialized
from megatrain.simulator.schedule.arithmetic import gradient_bytes
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

_LAYERS = 3
"""Decoder layers of the model that runs."""
_LEAST_ATTENTION = 0.05
"""The least share of attention in the FLOPs of a recompute for which saving it is measured. This
share of the FLOPs is a tenth of the time on an H200."""
_STEPS = 3
"""The least number of steps of each plan."""
_SECONDS = 1.5
"""The least time of steps of each plan. The speed of a shared machine varies within seconds."""
_HOST_SECONDS = 1.0
"""The least time of each run of the CPU optimizer."""
_HOST_TURNS = 4
"""Number of runs of the CPU optimizer. Its speed varies by a tenth within minutes."""
_LEAST_UPDATED = 2**23
"""The least number of parameters of the CPU updates that run at the same time as copies: 150 MB,
whatever the limit of host memory. With fewer, the result would depend on Python's lock."""
_QUICK_TOKENS = 4096
"""The most tokens of a micro-batch if only the optimizer's ops are timed. They do not depend on the
tokens, nor on compilation of the layers."""
_UNCERTAINTY = 0.10
"""Uncertainty of times that are predicted from the rates instead of the table. It is low, because
the layers and copies of this machine were measured."""
_MARGIN_BYTES = 2**21
"""A small block of PyTorch's allocator."""
_OPTIMIZER_KINDS = ("update", "norm", "clip", "update_ratios")
Samples = dict[tuple[str, str | int], list[int]]
"""Durations in ns, by key of the cost table and size or shape."""


class Subject(NamedTuple):
    """A model to measure."""

    model: ModelSpec
    """Its layers and their shapes."""
    config: PretrainedConfig
    """The transformers configuration of the model."""


class _GridPoint(NamedTuple):
    """Measurements of one model at one workload of the grid."""

    shape: str
    """Shapes of the model and the workload: the key in the cost table."""
    tokens: int
    """Tokens in a micro-batch."""
    saved_bytes: int
    """Bytes of the activations of one decoder layer."""
    workspace: Workspace | None
    """Device memory besides the pools; None without CUDA."""


class _Bench:
    """Runs plans of models with few layers, one after the other, and collects the durations of
    their ops.
    """

    def __init__(
        self, device: torch.device, limits: tuple[int, int], progress: Callable[[str], None]
    ) -> None:
        """`limits` are the bytes of device and host memory."""
        self.device, self.limits, self.progress = device, limits, progress
        self.memory = ReusablePinnedPool(registered=device.type == "cuda")
        self.samples: Samples = {}
        self.amounts: dict[tuple[str, str | int], int] = {}
        """The amount of work that the duration of a compute op is proportional to."""
        self.process_growth: list[int] = []
        """Bytes that the process took besides its pools, in each run of the CPU optimizer."""

    def plan(
        self, policy: str, model: ModelSpec, workload: Workload, placement: Placement | None = None
    ) -> Plan:
        """Returns a plan with one weight slot for `sequential`, and two for other policies."""
        knobs = Knobs(
            weight_slots=1 if policy == "sequential" else 2, placement=placement or Placement()
        )
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
        self,
        subject: Subject,
        plan: Plan,
        kinds: Iterable[str],
        *,
        alone: bool = False,
        evaluates: bool = False,
        seconds: float | None = None,
    ) -> StepProfile:
        """Runs steps of `plan` for at least `seconds` after the warm-up, and collects the durations
        of ops of `kinds`.

        With `alone`, one op runs at a time, on all lanes together. With `evaluates`, the loss op of
        an evaluation is also collected. Raises UserError if the plan does not fit.
        """
        schedule = serialized(lower(plan)) if alone else lower(plan)
        seconds = _SECONDS if seconds is None else seconds
        profile = profile_steps(
            plan,
            subject.config,
            self.device,
            steps=_STEPS,
            seconds=seconds,
            schedule=schedule,
            host_memory=self.memory,
            evaluates=evaluates,
        )
        for op in profile.schedule.ops:
            if op.kind in kinds:
                self._collect(
                    plan, op, [timeline.by_op[op.id].duration_ns for timeline in profile.timelines]
                )
        if profile.evaluation:
            self._collect(plan, *profile.evaluation)
        return profile

    def _collect(self, plan: Plan, op: Op, durations: list[int]) -> None:
        key = _key(
            op,
            wide=op.kind in WIDE_KINDS
            and gradient_bytes(plan, op.layer) > DTYPE_BYTES[plan.workload.dtype],
        )
        self.samples.setdefault(key, []).extend(durations)
        self.amounts[key] = op.amount

    def layers(self, subject: Subject, workload: Workload, base: Workload) -> _GridPoint | None:
        """Measures all times and memory that depend on the tokens, at one point of the grid.
        Returns None if it does not fit.

        Recompute with saved attention is measured once for each sequence length, from the length of
        `base` on, because its saving per token depends only on that length. With compiled layers, a
        loss without backward is one more program to compile, so it is measured at `base` only.
        """
        small, cuda = subject.model.shortest(_LAYERS), self.device.type == "cuda"
        evaluates = workload == base or not workload.compiled
        # with this policy, the optimizer's ops on the device run while no other op does
        further = {"resident": _OPTIMIZER_KINDS}
        profile = None
        for policy in ("resident", "double_buffer") if cuda else ("sequential",):
            with contextlib.suppress(UserError):
                profile = self.run(
                    subject,
                    self.plan(policy, small, workload),
                    COMPUTE_KINDS + further.get(policy, ()),
                    evaluates=evaluates,
                )
                break
        if profile is None:
            self.progress(f"skipped, does not fit: {workload.batch} x {workload.sequence} tokens")
            return None
        longer = workload == base or workload.sequence > base.sequence
        if longer and (layers := _attention_to_save(small, workload)):
            # a UserError means too little memory, or an attention kernel that cannot save it
            with contextlib.suppress(UserError):
                self.run(
                    subject,
                    self.plan(
                        profile.schedule.policy,
                        small,
                        workload,
                        Placement(saved_attention=",".join(layers)),
                    ),
                    ("recompute",),
                )
        return _GridPoint(
            f"{subject.model.shape}/{workload.shape}",
            workload.tokens,
            profile.saved_bytes,
            _workspace(profile) if profile.peaks else None,
        )


def calibrate(
    name: str,
    model: ModelSpec,
    workload: Workload,
    config: PretrainedConfig,
    device: torch.device,
    *,
    grid: Sequence[Workload] = (),
    others: Sequence[Subject] = (),
    host_bytes: int | None = None,
    device_bytes: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> HardwareSpec:
    """Measures this machine and returns its HardwareSpec with a CostTable.

    Args:
        name: The name of the HardwareSpec.
        model: The first model to measure. All that does not depend on the tokens is measured with
            this model only.
        workload: The first workload to measure.
        config: The transformers configuration of `model`.
        device: The device to measure.
        grid: Further workloads.
        others: Further models.
        host_bytes: Replaces the host memory that the machine reports.
        device_bytes: Replaces the device memory that the machine reports.
        progress: Called with a description of each measurement before it starts.

    Raises:
        UserError: A model cannot be executed, or the first one does not fit although it runs
                with few layers.
    """
    limits = (
        device_bytes or machine.usable_device_bytes(device),
        host_bytes or machine.host_bytes(),
    )
    workload, *grid = (
        msgspec.structs.replace(point, accumulation=1) for point in (workload, *grid)
    )
    bench, subject, small = (
        _Bench(device, limits, progress),
        Subject(model, config),
        model.shortest(_LAYERS),
    )
    for each in (subject, *others):
        plan = bench.plan("sequential", each.model, workload)
        preflight(plan, AdamW(), device, schedule=lower(plan))
    with contextlib.ExitStack() as held:
        held.callback(bench.memory.free)
        quick = msgspec.structs.replace(
            workload,
            batch=min(workload.batch, max(_QUICK_TOKENS // workload.sequence, 1)),
            compiled=False,
        )
        most = bench.plan("sequential", small, msgspec.structs.replace(quick, accumulation=2))
        needed = sum(buffer.allocated for buffer in lower(most).buffers if buffer.place == "host")
        # if it does not fit, the executor raises a UserError that says so
        if 0 < needed <= limits[1]:
            progress("host memory: touching and registering")
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                bench.memory.reserve(needed)
        count = min(
            sum(layer.elements for layer in small.decoders), max(limits[1] - needed, 0) // BYTES
        )
        chunks = ChunkUpdates(
            max(count, min(sum(layer.elements for layer in small.decoders), _LEAST_UPDATED)),
            TORCH_DTYPE[workload.dtype],
            lane_threads(device)["cpu"],
        )
        held.callback(chunks.close)
        _measure_optimizer(bench, subject, quick)
        progress("all lanes together")
        together = bench.run(subject, bench.plan("double_buffer", small, workload), ())
        points, wanted = (
            [],
            list(itertools.product((subject, *others), dict.fromkeys((workload, *grid)))),
        )
        every = -(-len(wanted) // (_HOST_TURNS - 1))
        for number, (each, point) in enumerate(wanted):
            if number % every == 0:
                _measure_host_optimizer(bench, chunks, subject, quick, 1 + number // every)
            progress(f"layers of {each.model.name}, {point.batch} x {point.sequence} tokens")
            points.append(bench.layers(each, point, workload))
        _measure_host_optimizer(bench, chunks, subject, quick, 1 + -(-len(wanted) // every))
        progress("copies and rates")
        rates = measure_rates(
            small, workload, config, device, lane_threads(device), chunks.in_turn()
        )
    table = _table(
        bench, rates, together, [point for point in points if point], workload.loss_chunk, device
    )
    described = machine.describe(device)
    h2d, d2h = _curve(rates.copies["load_weights"]), _curve(rates.copies["save_gradients"])
    kept_h2d, kept_d2h = (table.contention.get(lane, {}) for lane in ("h2d", "d2h"))
    return HardwareSpec(
        name=name,
        source=(
            f"measured on {described['device']}, {described['cores']} cores, by `megatrain"
            f" calibrate` on {table.date}"
        ),
        device_bytes=limits[0],
        host_bytes=limits[1],
        cores=machine.cores(),
        peak_tflops={workload.dtype: rounded(rates.matmul_flops / 1e12)},
        linear_efficiency=rounded(_linear_efficiency(table, rates, small, workload)),
        device_gb_per_s=rounded(rates.device_bytes_per_s / 1e9),
        h2d_gb_per_s=h2d[-1][1],
        d2h_gb_per_s=d2h[-1][1],
        h2d_curve=h2d,
        d2h_curve=d2h,
        duplex_curve=_duplex(rates.duplex, h2d, d2h),
        duplex_fraction=min(kept_h2d.get("d2h", 1.0), kept_d2h.get("h2d", 1.0)),
        link_latency_ns=rates.copies["load_weights"][0][1],
        uncertainty=_UNCERTAINTY,
        host_gb_per_s=rounded(rates.host_bytes_per_s / 1e9),
        cpu_update_per_s=rounded(_rate(table.curves["cpu_update"])),
        cpu_adam_per_s=rounded(rates.cpu_adam_per_s),
        thread_gb_per_s=rounded(rates.thread_bytes_per_s / 1e9),
        costs=table,
    )


def _measure_host_optimizer(
    bench: _Bench, chunks: ChunkUpdates, subject: Subject, workload: Workload, turn: int
) -> None:
    """Measures the optimizer's ops on the CPU, for whole layers and for chunks of them. They do not
    depend on the tokens.

    The samples of all turns are pooled, because the CPU's speed varies over minutes. Their spread
    shows by how much.
    """
    bench.progress(f"optimizer on the CPU: layers, chunks and gradient accumulation, turn {turn}")
    small, kinds = (
        subject.model.shortest(_LAYERS),
        tuple(kind for kind in CURVE_KINDS if kind not in COPY_KINDS),
    )
    with growth() as grown:
        for accumulation in (1, 2):
            work = msgspec.structs.replace(workload, accumulation=accumulation)
            bench.run(subject, bench.plan("sequential", small, work), kinds, seconds=_HOST_SECONDS)
    bench.process_growth += grown
    for key, durations in chunks.measure(_HOST_SECONDS).items():
        bench.samples.setdefault(key, []).extend(durations)


def _measure_optimizer(bench: _Bench, subject: Subject, workload: Workload) -> None:
    """Measures the optimizer's ops on the device, for whole layers and for chunks of them, and the
    ops of clipping by `update`. They do not depend on the tokens.
    """
    small = subject.model.shortest(_LAYERS)
    by_update, twice = (
        msgspec.structs.replace(workload, clipping="update"),
        msgspec.structs.replace(workload, accumulation=2),
    )
    for what, policy, work, kinds, alone in (
        ("optimizer on the device", "resident", workload, _OPTIMIZER_KINDS, False),
        ("gradient accumulation on the device", "resident", twice, _OPTIMIZER_KINDS, False),
        ("optimizer on the device, in chunks", "overlapped", workload, _OPTIMIZER_KINDS, True),
        ("clipping by update on the CPU", "sequential", by_update, ("update_ratios",), False),
        ("clipping by update, in chunks", "overlapped", by_update, ("update_ratios",), True),
        ("clipping by update on the device", "resident", by_update, ("update_ratios",), True),
    ):
        bench.progress(what)
        try:
            bench.run(subject, bench.plan(policy, small, work), kinds, alone=alone)
        except UserError:
            # if a few layers cannot be resident, the whole model will not be either
            if policy != "resident":
                raise


def _attention_to_save(model: ModelSpec, workload: Workload) -> list[str]:
    """Returns the decoder layers whose attention can be saved and is a large enough part of their
    work.
    """
    layers = [layer.name for layer in model.decoders if model.can_save_attention(layer.name)]
    works = {layer: model.work("recompute", layer, workload) for layer in layers}
    return [
        layer
        for layer, work in works.items()
        if work.attention_flops >= _LEAST_ATTENTION * work.flops
    ]


def _key(op: Op, *, wide: bool) -> tuple[str, str | int]:
    """Returns the key of `op` in the cost table. `wide` means that its gradients are wider than the
    compute dtype.
    """
    if op.kind in COMPUTE_KINDS + EVALUATION_KINDS:
        return op.kind, op.shape
    how = ":add" if op.adds else ":wide" if wide else ""
    other_lane = f"@{op.lane}" if op.kind in _OPTIMIZER_KINDS[1:] and op.lane != "cpu" else ""
    return f"{op.kind}{how}{other_lane}", op.parameters


def _table(
    bench: _Bench,
    rates: Rates,
    together: StepProfile,
    points: list[_GridPoint],
    loss_chunk: int,
    device: torch.device,
) -> CostTable:
    """Returns the cost table: the median of each measurement, and its spread."""
    curves: dict[str, list[tuple[int, int]]] = {
        kind: list(points) for kind, points in rates.copies.items()
    }
    compute: dict[str, dict[str, tuple[int, int]]] = {}
    overhead = [
        round(seconds * 1e9) - timeline.makespan_ns
        for seconds, timeline in zip(together.seconds, together.timelines, strict=True)
    ]
    waits, lanes = _waits(together), rates.contention
    spreads = rates.spread | {
        f"dispatch_ns.{lane}": spread([statistics.median(step) for step in steps])
        for lane, steps in waits.items()
    }
    spreads["step_overhead_ns"] = spread(overhead)
    for (kind, size), durations in sorted(bench.samples.items(), key=_by_number):
        typical = round(statistics.median(durations))
        if isinstance(size, str):
            compute.setdefault(kind, {})[size] = (bench.amounts[kind, size], typical)
        else:
            curves.setdefault(kind, []).append((size, typical))
        spreads[f"{kind} {size}"] = spread(durations)
    return CostTable(
        measured_on=str(machine.describe(device)["device"]),
        date=time.strftime("%Y-%m-%d"),
        curves={kind: _ascending(points) for kind, points in curves.items()},
        compute=compute,
        loss_chunk=loss_chunk,
        activations={
            point.shape: (point.tokens, point.saved_bytes) for point in points if point.workspace
        },
        workspace={point.shape: point.workspace for point in points if point.workspace},
        contention=lanes.kept,
        turns=lanes.turns,
        fixed=rates.fixed,
        process_bytes=_process_bytes(bench.process_growth, device),
        dispatch_ns=_dispatch(waits),
        spread=spreads,
        step_overhead_ns=max(round(statistics.median(overhead)), 0),
    )


def _process_bytes(grown: list[int], device: torch.device) -> int:
    """Returns the median of `grown`. The result is 0 without CUDA, because `grown` would include
    the device pools.
    """
    return round(statistics.median(grown)) if grown and device.type == "cuda" else 0


def _by_number(sample: tuple[tuple[str, str | int], object]) -> list[str]:
    """Returns a key that sorts by number: 3x512 before 12x512."""
    return [
        digits.zfill(20) if digits.isdigit() else digits
        for digits in re.split(r"(\d+)", " ".join(map(str, sample[0])))
    ]


def _workspace(profile: StepProfile) -> Workspace:
    """Returns the measured workspace plus a margin, because memory must not be under-predicted. The
    peak of 36 layers was 1.0 MiB of 11.9 GiB higher than that of 3 layers.
    """
    peaks, margin = profile.peaks, profile.saved_bytes // 200 + _MARGIN_BYTES
    layer = max(peaks[kind] for kind in ("forward", "recompute", "backward")) - profile.saved_bytes
    head = max(peaks[kind] for kind in ("embed", "head", "embed_backward"))
    update = max((peaks[kind] for kind in _OPTIMIZER_KINDS if kind in peaks), default=0)
    return Workspace(layer=max(layer, 0) + margin, head=head + margin, update=update + margin)


def _ascending(points: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the points in ascending order of size. If there is only one, and its size is not 0, a
    second point of twice the size and duration is added, so that the curve is a rate.
    """
    ordered = sorted(points)
    if len(ordered) == 1 and ordered[0][0] > 0:
        size, duration = ordered[0]
        return (ordered[0], (2 * size, 2 * duration))
    return tuple(ordered)


def _waits(measured: StepProfile) -> dict[str, list[list[int]]]:
    """Returns how long ops waited although they were ready, in ns, by lane and step. An op is ready
    when its lane is free and its dependencies have ended.
    """
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
    """Returns the median wait of each lane over all steps, in ns."""
    return {
        lane: round(statistics.median(itertools.chain(*steps))) for lane, steps in waits.items()
    }


def _linear_efficiency(
    table: CostTable, rates: Rates, model: ModelSpec, workload: Workload
) -> float:
    """Returns the rate of matrix products in a decoder layer, relative to that of a single large
    product.

    It is chosen such that the datasheet's formula, with the usual efficiency of attention, gives
    the measured time of the layer's forward. At least half of that time counts as matrix products,
    even if the other terms of the formula take more, as on a CPU.
    """
    layer = model.decoders[0]
    work = model.work("forward", layer.name, workload)
    seconds = table.compute["forward"][f"{layer.signature}/{workload.shape}"][1] / 1e9
    rest = work.moved_bytes / rates.device_bytes_per_s
    rest += (
        work.attention_flops
        * (1 + ATTENTION_HALF_TOKENS / workload.sequence)
        / (ATTENTION_EFFICIENCY * rates.matmul_flops)
    )
    return min(1.0, work.linear_flops / max(seconds - rest, seconds / 2) / rates.matmul_flops)


def _curve(points: list[tuple[int, int]]) -> Curve:
    """Returns pairs of bytes and GB/s from pairs of bytes and ns. If noise made a copy faster than
    a smaller one, it counts as equally long.
    """
    longest, curve = 0.0, []
    for size, duration in points:
        rate = rounded(size / max(duration, 1))
        curve.append((size, min(rate, size / longest) if longest else rate))
        longest = size / curve[-1][1]
    return tuple(curve)


def _duplex(both: list[tuple[int, int]], h2d: Curve, d2h: Curve) -> Curve:
    """Returns pairs of bytes and GB/s of each direction while both are busy. A rate is at most that
    of the faster direction alone.
    """
    alone = {size: max(dict(h2d)[size], dict(d2h)[size]) for size, _ in both}
    return tuple((size, min(rate, alone[size])) for size, rate in _curve(both))


def _rate(points: tuple[tuple[int, int], ...]) -> float:
    """Returns the rate per second at the largest size."""
    size, duration = points[-1]
    return size / (duration / 1e9)
