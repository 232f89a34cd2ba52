"""Measures this machine for some models over a grid of workloads. The result is a HardwareSpec with
a CostTable.

The executor measures op durations: it runs a few steps of a model with the same layers, but fewer
of them. Ops on the CPU are timed with the policy `sequential`, where one op runs at a time.
Without a GPU, compute is timed in the same way. On a GPU, compute is timed with the policy
`resident`, where it runs without pauses, because pauses let a GPU run at higher clocks than in a
step (`docs/lab_notes.md`). Copies are also timed by size. Lanes run in pairs to measure how much
they slow each other.

Costs that depend on the tokens (layers, head, activations, workspace) are measured for every model
at every workload of the grid. All others (the optimizer's ops, copies, contention) are measured for
the first model only, over sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch
from transformers import PretrainedConfig

from megatrain.runtime import machine
from megatrain.runtime.calibration.attention_kernel import attention_curve, attention_rate
from megatrain.runtime.calibration.cpu_adam_bench import BYTES, ChunkUpdates
from megatrain.runtime.calibration.measured_costs import (
    OPTIMIZER_KINDS,
    GridPoint,
    Samples,
    copy_curve,
    cost_table,
    duplex_curve,
    linear_efficiency,
    rate_at_the_end,
    workspace,
)
from megatrain.runtime.calibration.microbenchmarks import measure_rates
from megatrain.runtime.calibration.profile_steps import StepProfile, profile_steps
from megatrain.runtime.calibration.timing import rounded
from megatrain.runtime.execution.executor import lane_threads
from megatrain.runtime.execution.preflight import preflight
from megatrain.runtime.host import usable_host_bytes
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.runtime.memory.process_memory import growth
from megatrain.runtime.memory.reusable_pinned_pool import ReusablePinnedPool
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import UserError
from megatrain.simulator.hardware.cost_table import (
    COMPUTE_KINDS,
    COPY_KINDS,
    CURVE_KINDS,
    EVALUATION_KINDS,
    WIDE_KINDS,
)
from megatrain.simulator.hardware.machine import (
    ATTENTION_EFFICIENCY,
    ATTENTION_HALF_TOKENS,
    HardwareSpec,
)
from megatrain.simulator.model.specs import DTYPE_BYTES, ModelSpec
from megatrain.simulator.model.state_format import EXACT
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
_LOSS_CHUNKS = (1024, 2048, 4096)
"""Loss chunks with which the head of the first model is measured, besides that of the workload."""
_UNCERTAINTY = 0.10
"""Uncertainty of times that are predicted from the rates instead of the table. It is low, because
the layers and copies of this machine were measured."""


class Subject(NamedTuple):
    """A model to measure."""

    model: ModelSpec
    """Its layers and their shapes."""
    config: PretrainedConfig
    """The transformers configuration of the model."""


class _Bench:
    """Runs plans of models with few layers, one after the other, and collects the durations of
    their ops.
    """

    def __init__(
        self, device: torch.device, limits: tuple[int, int], progress: Callable[[str], None]
    ) -> None:
        """`limits` are the bytes of device and host memory."""
        self.device, self.limits, self.progress = device, limits, progress
        self._cuda = device.type == "cuda"
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

    def layers(self, subject: Subject, workload: Workload, base: Workload) -> GridPoint | None:
        """Measures all times and memory that depend on the tokens, at one point of the grid.
        Returns None if it does not fit.

        Recompute with saved attention is measured once for each sequence length, from the length of
        `base` on, because its saving per token depends only on that length. With compiled layers, a
        loss without backward is one more program to compile, so it is measured at `base` only.
        """
        small, cuda = subject.model.shortest(_LAYERS), self._cuda
        evaluates = workload == base or not workload.compiled
        # with this policy, the optimizer's ops on the device run while no other op does
        further = {"resident": OPTIMIZER_KINDS}
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
        return GridPoint(
            f"{subject.model.shape}/{workload.shape}",
            workload.tokens,
            profile.saved_bytes,
            workspace(profile) if profile.peaks else None,
        )

    def heads(
        self, subject: Subject, works: Sequence[Workload], points: Sequence[GridPoint | None]
    ) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """Measures the head with each of `_LOSS_CHUNKS` that is not the workload's own.

        It is measured at the largest of the micro-batches `works` that fits, which are those of
        `points`. A chunk is left out unless it is smaller than that, and if memory runs out.
        Returns points as in `CostTable.heads`.
        """
        shape = subject.model.shape
        fitting = [
            work
            for work, point in zip(works, points, strict=True)
            if point and point.shape == f"{shape}/{work.shape}"
        ]
        if not fitting:
            return {}
        work = max(fitting, key=lambda each: each.tokens)
        small, found = subject.model.shortest(1), list[tuple[int, int, int]]()
        for chunk in _LOSS_CHUNKS:
            if chunk == work.loss_chunk or max(chunk, work.loss_chunk) >= work.tokens:
                continue
            self.progress(f"the head with loss chunks of {chunk:,} tokens")
            changed = msgspec.structs.replace(work, loss_chunk=chunk)
            for policy in ("resident", "double_buffer") if self._cuda else ("sequential",):
                with contextlib.suppress(UserError):
                    profile = self.run(subject, self.plan(policy, small, changed), (), seconds=0)
                    spans = [
                        span.duration_ns
                        for timeline in profile.timelines
                        for span in timeline.spans
                        if span.kind == "head"
                    ]
                    size = workspace(profile).head if profile.peaks else 0
                    found.append((chunk, round(statistics.median(spans)), size))
                    break
        return {f"{shape}/{work.shape}": tuple(found)} if found else {}


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
    state: str = EXACT,
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
        host_bytes: Replaces the host memory that a plan may have on this machine.
        device_bytes: Replaces the device memory that the machine reports.
        state: A state format whose update on the host is measured as well.
        progress: Called with a description of each measurement before it starts.

    Raises:
        UserError: A model cannot be executed, or the first one does not fit although it runs
                with few layers.
    """
    limits = (
        device_bytes or machine.usable_device_bytes(device),
        host_bytes or usable_host_bytes(),
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
            fp8=None,
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
        heads = bench.heads(subject, [point for _, point in wanted], points)
        progress("attention alone")
        attention = {
            each.model.attention_shape(workload): attention_curve(each.model, workload, device)
            for each in (subject, *others)
        }
        progress("copies and rates")
        rates = measure_rates(
            small, workload, config, device, lane_threads(device), chunks.in_turn()
        )
    if state != EXACT:
        _measure_format(bench, state, max(count, _LEAST_UPDATED))
    table = cost_table(
        bench.samples,
        bench.amounts,
        bench.process_growth,
        rates,
        together,
        [point for point in points if point],
        {shape: rows for shape, rows in attention.items() if len(rows) > 1},
        workload.loss_chunk,
        heads,
        device,
    )
    rate = attention_rate(
        model, attention[model.attention_shape(workload)], rates.matmul_flops
    ) or (ATTENTION_EFFICIENCY, ATTENTION_HALF_TOKENS)
    described = machine.describe(device)
    h2d, d2h = copy_curve(rates.copies["load_weights"]), copy_curve(rates.copies["save_gradients"])
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
        peak_tflops={
            workload.dtype: rounded(rates.matmul_flops / 1e12),
            **({"fp8": rounded(rates.fp8_flops / 1e12)} if rates.fp8_flops else {}),
        },
        linear_efficiency=rounded(linear_efficiency(table, rates, small, workload, rate)),
        attention_efficiency=rounded(rate[0]),
        attention_half_tokens=rate[1],
        device_gb_per_s=rounded(rates.device_bytes_per_s / 1e9),
        h2d_gb_per_s=h2d[-1][1],
        d2h_gb_per_s=d2h[-1][1],
        h2d_curve=h2d,
        d2h_curve=d2h,
        duplex_curve=duplex_curve(rates.duplex, h2d, d2h),
        duplex_fraction=min(kept_h2d.get("d2h", 1.0), kept_d2h.get("h2d", 1.0)),
        link_latency_ns=rates.copies["load_weights"][0][1],
        uncertainty=_UNCERTAINTY,
        host_gb_per_s=rounded(rates.host_bytes_per_s / 1e9),
        cpu_update_per_s=rounded(rate_at_the_end(table.curves["cpu_update"])),
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


def _measure_format(bench: _Bench, state: str, count: int) -> None:
    """Measures the update on the CPU in another state format, for chunks of `count` parameters."""
    bench.progress(f"optimizer on the CPU in {state}")
    threads = lane_threads(bench.device)["cpu"]
    chunks = ChunkUpdates(count, torch.bfloat16, threads, state)
    try:
        bench.samples |= chunks.measure(_HOST_TURNS * _HOST_SECONDS)
    finally:
        chunks.close()


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
        ("optimizer on the device", "resident", workload, OPTIMIZER_KINDS, False),
        ("gradient accumulation on the device", "resident", twice, OPTIMIZER_KINDS, False),
        ("optimizer on the device, in chunks", "overlapped", workload, OPTIMIZER_KINDS, True),
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
    other_lane = f"@{op.lane}" if op.kind in OPTIMIZER_KINDS[1:] and op.lane != "cpu" else ""
    return f"{op.kind}{how}{other_lane}", op.parameters
