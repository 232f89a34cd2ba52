"""Measures this machine for several models and workloads. The result is a HardwareSpec with a
CostTable.

The executor measures op durations: it runs a few steps of a model with the same layers, but fewer
of them. Ops on the CPU are timed with the policy `sequential`, which runs one op at a time. Without
a GPU, compute is timed in the same way. On a GPU, compute runs alone for about a second a step,
because a GPU at its power limit runs at higher clocks for a while after each pause
(`docs/lab_notes.md`). Copies are also timed by size. Lanes run in pairs to measure how much they
slow each other.

Costs that depend on the tokens (layers, head, activations, workspace) are measured for every model
at every workload of the grid. All other costs (optimizer, copies, contention) are measured for the
first model only, over sizes.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch
from transformers import PretrainedConfig

from megatrain.runtime import machine
from megatrain.runtime.calibration.attention_kernel import (
    attention_curve,
    attention_curves,
    attention_rate,
)
from megatrain.runtime.calibration.cpu_adam_bench import BYTES, ChunkUpdates
from megatrain.runtime.calibration.link import LinkBench
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
from megatrain.runtime.host import WITHOUT_GPU, usable_host_bytes
from megatrain.runtime.layers.lengths import takes_lengths
from megatrain.runtime.memory.arenas import TORCH_DTYPE
from megatrain.runtime.memory.process_memory import growth
from megatrain.runtime.memory.reusable_pinned_pool import ReusablePinnedPool
from megatrain.runtime.optimizer.settings import AdamW
from megatrain.simulator.base.errors import DoesNotFit, UserError
from megatrain.simulator.base.units import format_bytes
from megatrain.simulator.hardware.cost_table import (
    COMPUTE_KINDS,
    COPY_KINDS,
    CURVE_KINDS,
    EVALUATION_KINDS,
    WIDE_KINDS,
)
from megatrain.simulator.hardware.machine import (
    COLLECTIVE_BYTES,
    COLLECTIVE_PEER_BYTES,
    AttentionRate,
    HardwareSpec,
)
from megatrain.simulator.model.attention_kernel import separates_documents
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.model.op_work import attention_shape, op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.state_format import EXACT
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.policies import lower
from megatrain.simulator.schedule import Op, serialized
from megatrain.simulator.schedule.arithmetic import layer_state
from megatrain.simulator.schedule.plan import Knobs, Placement, Plan

_LAYERS = 3
"""Number of decoder layers in the models that run."""
_COMPUTE_SECONDS = 1.0
"""The duration of the layers' compute in a step that times it on a GPU, in seconds. After a pause
of a few ms, the layers of an H200 were a tenth faster for 20 ms."""
_HEAD_SECONDS = 0.25
"""The same in a step that times the head with another loss chunk. The host calls the head's
functions while the GPU computes the layers before it, as in a whole model."""
_MOST_LAYERS = 16
"""The maximum number of decoder layers in such a step. They share the memory of two layers, except
their inputs."""
_LEAST_ATTENTION = 0.05
"""Saved attention is measured only if attention has at least this share of the FLOPs of a
recompute. This share of the FLOPs is a tenth of the time on an H200."""
_STEPS = 3
"""The least number of steps of each plan, after the warm-up."""
_SECONDS = 1.5
"""The least duration of these steps in seconds. The speed of a shared machine varies within
seconds."""
_HOST_SECONDS = 1.0
"""The least duration of each run of the CPU optimizer in seconds."""
_HOST_TURNS = 4
"""Number of runs of the CPU optimizer, and of measurements of the link. Their speed varies by a
tenth within minutes."""
_WINDOW_SECONDS = 0.15
"""The least duration of the CPU optimizer after each run of a plan, in seconds. About 30 such
windows show how much its speed varies."""
_LEAST_UPDATED = 2**23
"""The least number of parameters in the CPU updates that run at the same time as copies, even if
the host memory is limited: 150 MB. With fewer, the result would depend on Python's lock."""
_QUICK_TOKENS = 4096
"""The maximum number of tokens in a micro-batch if only the optimizer's ops are timed. These do not
depend on the tokens, nor on the compilation of layers."""
_LOSS_CHUNKS = (1024, 2048, 4096)
"""Loss chunks with which the head of the first model is measured, in addition to the workload's
loss chunk."""
_UNCERTAINTY = 0.10
"""Relative uncertainty of times that are predicted from the rates instead of the table. It is low,
because the layers and copies of this machine were measured."""


class Subject(NamedTuple):
    """A model to measure."""

    model: ModelSpec
    """The model with its layers and their shapes."""
    config: PretrainedConfig
    """The transformers configuration of the model."""


class _Bench:
    """Runs plans for models with few layers, and collects the durations of their ops."""

    def __init__(
        self, device: torch.device, limits: tuple[int, int], progress: Callable[[str], None]
    ) -> None:
        """Creates a bench for `device`. `limits` are the bytes of device and host memory."""
        self.device, self.limits, self.progress = device, limits, progress
        self._cuda = device.type == "cuda"
        self.memory = ReusablePinnedPool(registered=device.type == "cuda")
        self.samples: Samples = {}
        """The durations that were measured so far, in ns."""
        self.amounts: dict[tuple[str, str | int], int] = {}
        """Key of a sample -> the amount of work in the op (`Op.amount`)."""
        self.host_windows: dict[tuple[str, str | int], list[float]] = {}
        """(kind of CPU update, number of parameters) -> mean duration in each window, in ns."""
        self.updates: ChunkUpdates | None = None
        """Runs in a window after each plan."""
        self.process_growth: list[int] = []
        """For each run of the CPU optimizer, the bytes that the process allocated outside of its
        pools."""
        self._before_head: dict[str, int] = {}
        """Shapes of a model and a workload -> number of decoder layers in a step that times the
        head."""

    def plan(
        self, policy: str, model: ModelSpec, workload: Workload, placement: Placement | None = None
    ) -> Plan:
        """Returns a plan with one weight slot for `sequential`, or two for another policy."""
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
        compute_only: bool = False,
        watches: bool = True,
    ) -> StepProfile:
        """Runs steps of `plan`, and collects the durations of the ops of `kinds`. A window of the
        CPU optimizer follows.

        Args:
            subject: the model.
            plan: a plan for this model, possibly with fewer layers.
            kinds: the kinds of ops to collect.
            alone: whether only one op runs at a time, over all lanes.
            evaluates: whether the loss op of an evaluation is collected, too.
            seconds: the least duration of the steps after the warm-up, or None for 1.5 s.
            compute_only: whether only the compute ops run.
            watches: whether one more step measures device memory.

        Raises UserError if the plan does not fit.
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
            watches=watches,
            compute_only=compute_only,
        )
        for op in profile.schedule.ops:
            if op.kind in kinds:
                self._collect(
                    plan, op, [timeline.by_op[op.id].duration_ns for timeline in profile.timelines]
                )
        if profile.evaluation:
            self._collect(plan, *profile.evaluation)
        if self.updates is not None:
            self.collect_window(self.updates.window(_WINDOW_SECONDS))
        return profile

    def _collect(self, plan: Plan, op: Op, durations: list[int]) -> None:
        """Adds the durations of `op` in ns to the samples."""
        key = _key(
            op,
            wide=op.kind in WIDE_KINDS
            and layer_state(plan, op.layer)["gradients"].bytes > DTYPE_BYTES[plan.workload.dtype],
        )
        self.samples.setdefault(key, []).extend(durations)
        self.amounts[key] = op.amount

    def collect_window(self, durations: dict[tuple[str, str | int], list[int]]) -> None:
        """Adds durations of CPU updates in ns, which were measured without a pause, to the samples.
        Their means are added to the windows.
        """
        for key, measured in durations.items():
            self.samples.setdefault(key, []).extend(measured)
            self.host_windows.setdefault(key, []).append(statistics.fmean(measured))

    def layers(self, subject: Subject, workload: Workload, base: Workload) -> GridPoint | None:
        """Measures all times and memory that depend on the tokens, for one workload of the grid.
        Returns None if the workload does not fit.

        Saved attention is measured for `base` and for longer sequences only, because the time that
        it saves per token depends only on the length. With compiled layers, the loss of an
        evaluation is measured for `base` only, because it is another program to compile.
        """
        small, cuda = subject.model.shortest(_LAYERS), self._cuda
        evaluates = workload == base or not workload.compiled
        # With `resident`, no other op runs at the same time as the optimizer's ops on the device.
        kinds = {"resident": OPTIMIZER_KINDS, "sequential": COMPUTE_KINDS}
        profile = None
        for policy in ("resident", "double_buffer") if cuda else ("sequential",):
            with contextlib.suppress(UserError):
                profile = self.run(
                    subject,
                    self.plan(policy, small, workload),
                    kinds.get(policy, ()),
                    evaluates=evaluates,
                    seconds=0 if cuda else None,
                )
                break
        timed = self._without_pauses(subject, workload, profile) if cuda and profile else small
        if profile is None or timed is None:
            self.progress(f"skipped, does not fit: {workload.batch} x {workload.sequence} tokens")
            return None
        longer = workload == base or workload.sequence > base.sequence
        if longer and (layers := _attention_to_save(timed, workload)):
            saved = Placement(saved_attention=",".join(layers))
            # UserError: too little memory, or an attention kernel whose output cannot be saved
            with contextlib.suppress(UserError):
                self._compute(subject, timed, workload, ("recompute",), saved)
        return GridPoint(
            f"{subject.model.shape}/{workload.shape}",
            workload.tokens,
            profile.saved_bytes,
            workspace(profile) if profile.peaks else None,
        )

    def _without_pauses(
        self, subject: Subject, workload: Workload, profile: StepProfile
    ) -> ModelSpec | None:
        """Measures compute ops for about a second a step, and returns the model that was timed. It
        has fewer layers if the inputs of so many do not fit. Returns None if nothing fits.

        `profile` has the durations of a few layers.
        """
        shape = f"{subject.model.shape}/{workload.shape}"
        self._before_head[shape] = _layers_to_time(profile, _HEAD_SECONDS, 1)
        for count in (_layers_to_time(profile, _COMPUTE_SECONDS, _LAYERS), _LAYERS):
            model = subject.model.shortest(count)
            with contextlib.suppress(UserError):
                self._compute(subject, model, workload, COMPUTE_KINDS)
                return model
        return None

    def _compute(
        self,
        subject: Subject,
        model: ModelSpec,
        workload: Workload,
        kinds: Iterable[str],
        placement: Placement | None = None,
    ) -> None:
        """Measures compute ops of `kinds` on `model`, which is the model of `subject` with fewer
        layers. Raises UserError if they do not fit.
        """
        policy = "double_buffer" if self._cuda else "sequential"
        plan = self.plan(policy, model, workload, placement)
        self.run(subject, plan, kinds, compute_only=self._cuda, watches=not self._cuda)

    def heads(
        self, subject: Subject, works: Sequence[Workload], points: Sequence[GridPoint | None]
    ) -> dict[str, tuple[tuple[int, int, int], ...]]:
        """Measures the head with other loss chunks than the workload's own. Returns points as in
        `CostTable.heads`.

        Args:
            subject: the model.
            works: the workloads that were measured, for all models.
            points: the result for each of them, or None if it did not fit.

        The largest micro-batch of this model that fits is used. A loss chunk is left out if it is
        not smaller than this micro-batch, or if it does not fit.
        """
        shape = subject.model.shape
        fitting = [
            work
            for work, point in zip(works, points, strict=True)
            if point and point.shape == f"{shape}/{work.shape}"
        ]
        if not fitting:
            return {}
        work = max(fitting, key=lambda work: work.tokens)
        policy = "double_buffer" if self._cuda else "sequential"
        most = self._before_head.get(f"{shape}/{work.shape}", 1)
        rows = list[tuple[int, int, int]]()
        for chunk in _LOSS_CHUNKS:
            if chunk == work.loss_chunk or max(chunk, work.loss_chunk) >= work.tokens:
                continue
            self.progress(f"the head with loss chunks of {chunk:,} tokens")
            changed = msgspec.structs.replace(work, loss_chunk=chunk)
            for count in dict.fromkeys((most, 1)):
                plan = self.plan(policy, subject.model.shortest(count), changed)
                with contextlib.suppress(UserError):
                    profile = self.run(subject, plan, (), seconds=0, compute_only=self._cuda)
                    spans = [
                        span.duration_ns
                        for timeline in profile.timelines
                        for span in timeline.spans
                        if span.kind == "head"
                    ]
                    size = workspace(profile).head if profile.peaks else 0
                    rows.append((chunk, round(statistics.median(spans)), size))
                    break
        return {f"{shape}/{work.shape}": tuple(rows)} if rows else {}


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
        model: The first model to measure. Costs that do not depend on the tokens are measured with
            this model only.
        workload: The first workload to measure.
        config: The transformers configuration of `model`.
        device: The device to measure.
        grid: Further workloads.
        others: Further models.
        host_bytes: Replaces the host memory that plans can use, in bytes.
        device_bytes: Replaces the device memory that plans can use, in bytes. On a CPU, it is taken
            from the host memory.
        state: A state format whose update on the host is measured, too.
        progress: Called with a description of each measurement before it starts.

    Raises:
        UserError: A model cannot be executed, or the first model does not fit even with few layers.
            Nothing has been measured.
    """
    limits = _limits(device, device_bytes, host_bytes)
    workload, *grid = (
        msgspec.structs.replace(point, accumulation=1) for point in (workload, *grid)
    )
    bench, subject, small = (
        _Bench(device, limits, progress),
        Subject(model, config),
        model.shortest(_LAYERS),
    )
    for measured in (subject, *others):
        plan = bench.plan("sequential", measured.model, workload)
        preflight(plan, AdamW(), device, schedule=lower(plan))
    quick = msgspec.structs.replace(
        workload,
        batch=min(workload.batch, max(_QUICK_TOKENS // workload.sequence, 1)),
        compiled=False,
        fp8=None,
    )
    _refuse_too_little_memory(bench, model, quick, workload)
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(bench.memory.free)
        twice = msgspec.structs.replace(quick, accumulation=2)
        each = [
            _host_bytes_of(bench.plan("sequential", measured.model.shortest(_LAYERS), twice))
            for measured in (subject, *others)
        ]
        # The first model must fit, or the executor raises a UserError later. Others may be skipped.
        needed = max([each[0], *(size for size in each if size <= limits[1])])
        if 0 < needed <= limits[1]:
            progress("host memory: touching and registering")
            with contextlib.suppress(RuntimeError, OSError, ValueError):
                bench.memory.reserve(needed)
        # The layers of the largest model, because updates that fit in a cache are faster.
        elements = max(
            sum(layer.elements for layer in measured.model.shortest(_LAYERS).decoders)
            for measured in (subject, *others)
        )
        count = min(elements, max(limits[1] - needed, 0) // BYTES)
        chunks = ChunkUpdates(
            max(count, min(elements, _LEAST_UPDATED)),
            TORCH_DTYPE[workload.dtype],
            lane_threads(device)["cpu"],
        )
        cleanup.callback(chunks.close)
        bench.updates = chunks
        link = LinkBench(device, lane_threads(device), chunks.in_turn(), bench.memory)

        def turn(number: int) -> None:
            _measure_host_optimizer(bench, chunks, subject, quick, number)
            progress(f"copies, alone and together, turn {number}")
            link.measure()

        _measure_optimizer(bench, subject, quick)
        progress("all lanes together")
        together = bench.run(subject, bench.plan("double_buffer", small, workload), ())
        runs = list(itertools.product((subject, *others), dict.fromkeys((workload, *grid))))
        points = []
        # The turns are spread over the time of the other measurements.
        every = -(-len(runs) // (_HOST_TURNS - 1))
        for number, (measured, work) in enumerate(runs):
            if number % every == 0:
                turn(1 + number // every)
            progress(f"layers of {measured.model.name}, {work.batch} x {work.sequence} tokens")
            points.append(bench.layers(measured, work, workload))
        turn(1 + -(-len(runs) // every))
        heads = bench.heads(subject, [work for _, work in runs], points)
        progress("attention alone")
        curves = attention_curves(model, workload, device)
        used = workload.kernel if device.type == "cuda" else None
        attention = {
            attention_shape(
                model, msgspec.structs.replace(workload, attention=kernel, documents=False)
            ): points
            for kernel, points in curves.items()
        }
        packed = msgspec.structs.replace(
            workload,
            documents=True,
            attention=workload.attention if separates_documents(workload.attention) else None,
        )
        for measured in (subject, *others):
            shape = attention_shape(measured.model, packed)
            if shape not in attention and takes_lengths(measured.model, packed, device):
                attention[shape] = attention_curve(measured.model, packed, device)
        attention.setdefault(attention_shape(model, workload), curves[used])
        for other in others:
            shape = attention_shape(other.model, workload)
            if shape not in attention:
                attention[shape] = attention_curve(other.model, workload, device)
        progress("rates")
        rates = measure_rates(
            small, workload, config, device, lane_threads(device), chunks.in_turn(), link.rates()
        )
    if state != EXACT:
        _measure_format(bench, state, max(count, _LEAST_UPDATED))
    table = cost_table(
        bench.samples,
        bench.amounts,
        bench.host_windows,
        bench.process_growth,
        rates,
        together,
        [point for point in points if point],
        {shape: rows for shape, rows in attention.items() if len(rows) > 1},
        workload.loss_chunk,
        heads,
        device,
    )
    reached: dict[str, AttentionRate] = {
        kernel or "": rate
        for kernel, points in curves.items()
        if (rate := attention_rate(model, points, rates.matmul_flops))
    }
    # A model may write out its scores unless a kernel is named. PyTorch's choice has no rate then.
    measured_usual = reached.pop("", None) or reached.get("flash")
    usual = measured_usual or AttentionRate.usual()
    described = machine.describe(device)
    copies = rates.link.copies
    h2d, d2h = copy_curve(copies["load_weights"]), copy_curve(copies["save_gradients"])
    library = HardwareSpec.of_gpu(table.measured_on)
    of_two, of_peer = collective_memory(library, device)
    kept_h2d, kept_d2h = (table.contention.get(lane, {}) for lane in ("h2d", "d2h"))
    return HardwareSpec(
        name=name,
        source=(
            f"measured on {described['device']}, {described['cores']} cores, by `megatrain"
            f" calibrate` on {table.date}"
        ),
        device_bytes=limits[0],
        library_bytes=library.library_bytes if library else 0,
        collective_bytes=of_two,
        collective_peer_bytes=of_peer,
        peer_gb_per_s=library.peer_gb_per_s if library else None,
        host_bytes=limits[1],
        cores=machine.cores(),
        peak_tflops={
            workload.dtype: rounded(rates.matmul_flops / 1e12),
            **({"fp8": rounded(rates.fp8_flops / 1e12)} if rates.fp8_flops else {}),
        },
        linear_efficiency=rounded(
            linear_efficiency(table, rates, small, workload, reached.get(used or "", usual))
        ),
        attention_efficiency=usual.efficiency,
        attention_half_tokens=usual.half_tokens,
        attention=reached if measured_usual else {},
        attention_kernels=library.attention_kernels if library else None,
        device_gb_per_s=rounded(rates.device_bytes_per_s / 1e9),
        h2d_gb_per_s=h2d[-1][1],
        d2h_gb_per_s=d2h[-1][1],
        h2d_curve=h2d,
        d2h_curve=d2h,
        duplex_curve=duplex_curve(rates.link.duplex, h2d, d2h),
        duplex_fraction=min(kept_h2d.get("d2h", 1.0), kept_d2h.get("h2d", 1.0)),
        link_latency_ns=copies["load_weights"][0][1],
        uncertainty=_UNCERTAINTY,
        host_gb_per_s=rounded(rates.host_bytes_per_s / 1e9),
        cpu_update_per_s=rounded(rate_at_the_end(table.curves["cpu_update"])),
        cpu_adam_per_s=rounded(rates.cpu_adam_per_s),
        thread_gb_per_s=rounded(rates.thread_bytes_per_s / 1e9),
        costs=table,
    )


def collective_memory(library: HardwareSpec | None, device: torch.device) -> tuple[int, int]:
    """Returns `HardwareSpec.collective_bytes` and `collective_peer_bytes`, which one process cannot
    measure: those of `library`, the library's machine with the same GPU. What it does not state has
    the default, or is 0 on a CPU, which does not use NCCL.
    """
    first, peer = (
        (library.collective_bytes, library.collective_peer_bytes) if library else (None, None)
    )
    if device.type != "cuda":
        return first or 0, peer or 0
    return (
        COLLECTIVE_BYTES if first is None else first,
        COLLECTIVE_PEER_BYTES if peer is None else peer,
    )


def _limits(
    device: torch.device, device_bytes: int | None, host_bytes: int | None
) -> tuple[int, int]:
    """Returns the bytes of device and host memory that plans can use on this machine.

    On a CPU, both are parts of the same memory. Raises UserError if `device_bytes` leave nothing of
    it for the host, unless `host_bytes` are given.
    """
    device_limit, host = device_bytes or machine.usable_device_bytes(device), usable_host_bytes()
    if device.type == "cuda" or host_bytes:
        return device_limit, host_bytes or host
    if device_limit >= host:
        raise UserError(
            "--device-memory",
            found=format_bytes(device_limit),
            allowed=f"less than {format_bytes(host)}, because {WITHOUT_GPU}",
            fix="give less, or leave it out",
        )
    return device_limit, host - device_limit


def _refuse_too_little_memory(
    bench: _Bench, model: ModelSpec, quick: Workload, workload: Workload
) -> None:
    """Raises DoesNotFit if the pools of a plan that must run exceed a limit of `bench`."""
    small = model.shortest(_LAYERS)
    buffers = [
        lower(bench.plan(policy, small, work)).buffers
        for policy, work in (
            ("sequential", msgspec.structs.replace(quick, accumulation=2)),
            ("overlapped", msgspec.structs.replace(quick, clipping="update")),
            ("double_buffer", workload),
        )
    ]
    for place, limit in zip(("device", "host"), bench.limits, strict=True):
        needed = max(
            sum(each.allocated for each in pools if each.place == place and not each.dynamic)
            for pools in buffers
        )
        if needed > limit:
            raise DoesNotFit(
                f"{place} memory",
                found=format_bytes(limit),
                allowed=f"at least {format_bytes(needed)}, because this machine is measured with"
                f" {len(small.decoders)} layers of {model.name}",
                fix=f"give more with --{place}-memory; or run `megatrain calibrate` without this"
                " limit, and plan or train with its file (--hardware) and the limit",
            )


def _host_bytes_of(plan: Plan) -> int:
    """Returns the bytes of the plan's pools in host memory."""
    return sum(buffer.allocated for buffer in lower(plan).buffers if buffer.place == "host")


def _measure_host_optimizer(
    bench: _Bench, chunks: ChunkUpdates, subject: Subject, workload: Workload, turn: int
) -> None:
    """Measures the optimizer's ops on the CPU, for whole layers and for chunks.

    The samples of all turns are pooled, because the CPU's speed varies over minutes. Their spread
    then includes this variation. The ops do not depend on the tokens, so `workload` may be small.
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
    bench.collect_window(chunks.measure(_HOST_SECONDS))


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
    """Measures the optimizer's ops on the device, for whole layers and for chunks, and the ops of
    clipping by `update`. They do not depend on the tokens, so `workload` may be small.
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
            # If a few layers cannot be resident, no plan for the whole model will be resident.
            if policy != "resident":
                raise


def _layers_to_time(profile: StepProfile, seconds: float, least: int) -> int:
    """Returns the number of decoder layers whose compute takes about `seconds` in a step, from
    `least` to `_MOST_LAYERS`. `profile` has the durations of a few layers.
    """
    durations = defaultdict[str, int](int)
    for span in profile.timelines[-1].spans:
        if span.kind in ("forward", "recompute", "backward"):
            durations[profile.schedule.by_id[span.op].layer] += span.duration_ns
    wanted = round(seconds * 1e9 / statistics.fmean(durations.values()))
    return min(max(wanted, least), _MOST_LAYERS)


def _attention_to_save(model: ModelSpec, workload: Workload) -> list[str]:
    """Returns the decoder layers whose attention can be saved and has a large enough share of their
    FLOPs.
    """
    fused = model.fuses_scores(workload)
    layers = [
        layer.name for layer in model.decoders if model.can_save_attention(layer.name, fused=fused)
    ]
    works = {layer: op_work(model, "recompute", layer, workload) for layer in layers}
    return [
        layer
        for layer, work in works.items()
        if work.attention_flops >= _LEAST_ATTENTION * work.flops
    ]


def _key(op: Op, *, wide: bool) -> tuple[str, str | int]:
    """Returns the key of `op` in the cost table. `wide` says that its gradients are wider than the
    compute dtype.
    """
    if op.kind in COMPUTE_KINDS + EVALUATION_KINDS:
        return op.kind, op.shape
    variant = ":add" if op.adds else ":wide" if wide else ""
    other_lane = f"@{op.lane}" if op.kind in OPTIMIZER_KINDS[1:] and op.lane != "cpu" else ""
    return f"{op.kind}{variant}{other_lane}", op.parameters
