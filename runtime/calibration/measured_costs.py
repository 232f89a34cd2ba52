"""Makes a CostTable from the durations and bytes that calibration measured."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from megatrain.runtime import machine
from megatrain.runtime.calibration.microbenchmarks import MeasuredRates
from megatrain.runtime.calibration.profile_steps import StepProfile
from megatrain.runtime.calibration.timing import rounded, spread
from megatrain.simulator.hardware.cost_table import CostTable, Workspace
from megatrain.simulator.hardware.limits import Curve
from megatrain.simulator.hardware.machine import AttentionRate
from megatrain.simulator.model.op_work import op_work
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload

_MARGIN_BYTES = 2**21
"""The size of a small block of PyTorch's allocator."""
_LEAST_WINDOW = 2**22
"""The least number of parameters of an update whose windows show how much the host's speed varies.
The overhead of smaller updates would hide it."""
OPTIMIZER_KINDS = ("update", "norm", "clip", "update_ratios")
"""The kinds of the optimizer's ops on the device."""
Samples = dict[tuple[str, str | int], list[int]]
"""(kind in the cost table, size or shape) -> durations in ns."""


class GridPoint(NamedTuple):
    """Measurements of one model with one workload of the grid."""

    shape: str
    """The shapes of the model and the workload, which are the key in the cost table."""
    tokens: int
    """Number of tokens in a micro-batch."""
    saved_bytes: int
    """Bytes of the activations of one decoder layer."""
    workspace: Workspace | None
    """Device memory outside of the pools, or None without CUDA."""


def cost_table(
    samples: Samples,
    amounts: Mapping[tuple[str, str | int], int],
    host_windows: Mapping[tuple[str, str | int], Sequence[float]],
    process_growth: Sequence[int],
    rates: MeasuredRates,
    together: StepProfile,
    points: list[GridPoint],
    attention: dict[str, tuple[tuple[int, int, int], ...]],
    loss_chunk: int,
    heads: dict[str, tuple[tuple[int, int, int], ...]],
    device: torch.device,
) -> CostTable:
    """Returns the cost table: the median of each measurement, and its spread.

    Args:
        samples: Durations in ns.
        amounts: Key of a sample of compute -> the amount of work in the op (`Op.amount`).
        host_windows: (kind of CPU update, number of parameters) -> mean durations in windows that
            are spread over the calibration.
        process_growth: For each run of the CPU optimizer, the bytes that the process allocated
            outside of its pools.
        rates: The rates that do not depend on a model.
        together: Steps in which all lanes work.
        points: Measurements with the workloads of the grid.
        attention: Attention shape -> points (S, forward_ns, backward_ns) of attention alone.
        loss_chunk: Number of tokens that the head computes at a time.
        heads: The head with other loss chunks, as in `CostTable.heads`.
        device: The device that was measured.
    """
    curves: dict[str, list[tuple[int, int]]] = {
        kind: list(points) for kind, points in rates.link.copies.items()
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
    for (kind, size), durations in sorted(samples.items(), key=_by_number):
        typical = round(statistics.median(durations))
        if isinstance(size, str):
            compute.setdefault(kind, {})[size] = (amounts[kind, size], typical)
        else:
            curves.setdefault(kind, []).append((size, typical))
        spreads[f"{kind} {size}"] = spread(durations)
    return CostTable(
        measured_on=str(machine.describe(device)["device"]),
        date=time.strftime("%Y-%m-%d"),
        curves={kind: _ascending(points) for kind, points in curves.items()},
        compute=compute,
        loss_chunk=loss_chunk,
        heads=heads,
        attention=attention,
        activations={
            point.shape: (point.tokens, point.saved_bytes) for point in points if point.workspace
        },
        workspace={point.shape: point.workspace for point in points if point.workspace},
        contention=lanes.kept,
        turns=lanes.turns,
        fixed=rates.fixed,
        process_bytes=_process_bytes(process_growth, device),
        host_factors=host_factors(host_windows, samples),
        dispatch_ns=_dispatch(waits),
        spread=spreads,
        step_overhead_ns=max(round(statistics.median(overhead)), 0),
    )


def host_factors(
    windows: Mapping[tuple[str, str | int], Sequence[float]], samples: Samples
) -> tuple[float, ...]:
    """Returns `CostTable.host_factors`: the mean duration of an update in each window, divided by
    its median over all windows, in ascending order, with four decimals.

    This median is the duration in the cost table, so that the product is the duration in the
    window. Small updates are left out.
    """
    factors = [
        round(duration / statistics.median(samples[kind, size]), 4)
        for (kind, size), durations in windows.items()
        if isinstance(size, int) and size >= _LEAST_WINDOW
        for duration in durations
    ]
    return tuple(sorted(factors))


def _process_bytes(grown: Sequence[int], device: torch.device) -> int:
    """Returns the median of `grown`, or 0 without CUDA, where `grown` would include the device
    pools.
    """
    return round(statistics.median(grown)) if grown and device.type == "cuda" else 0


def _by_number(sample: tuple[tuple[str, str | int], object]) -> list[str]:
    """Returns a sort key that compares numbers by their value: 3x512 comes before 12x512."""
    return [
        digits.zfill(20) if digits.isdigit() else digits
        for digits in re.split(r"(\d+)", " ".join(map(str, sample[0])))
    ]


def workspace(profile: StepProfile) -> Workspace:
    """Returns the measured workspace plus a margin, because memory must not be under-predicted.

    The margin covers models with more layers: with 36 layers, the peak of 11.9 GiB was 1.0 MiB
    higher than with 3 layers.
    """
    peaks, margin = profile.peaks, profile.saved_bytes // 200 + _MARGIN_BYTES
    layer = max(peaks[kind] for kind in ("forward", "recompute", "backward")) - profile.saved_bytes
    head = max(peaks[kind] for kind in ("embed", "head", "embed_backward"))
    update = max((peaks[kind] for kind in OPTIMIZER_KINDS if kind in peaks), default=0)
    return Workspace(layer=max(layer, 0) + margin, head=head + margin, update=update + margin)


def _ascending(points: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Returns the points (size, ns) in ascending order of size.

    If there is only one point, and its size is not 0, a second point with twice the size and
    duration is added. The curve is then a constant rate.
    """
    ordered = sorted(points)
    if len(ordered) == 1 and ordered[0][0] > 0:
        size, duration = ordered[0]
        return (ordered[0], (2 * size, 2 * duration))
    return tuple(ordered)


def _waits(measured: StepProfile) -> dict[str, list[list[int]]]:
    """Returns lane -> for each step, how long each op waited although it was ready, in ns.

    An op is ready when its lane is free and its dependencies have ended.
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


def linear_efficiency(
    table: CostTable,
    rates: MeasuredRates,
    model: ModelSpec,
    workload: Workload,
    attention: AttentionRate,
) -> float:
    """Returns `HardwareSpec.linear_efficiency`: the rate of matrix products in a decoder layer,
    divided by the rate of a single large product.

    It is the value with which the formula for datasheets (`simulator/costs/datasheet.py`) gives the
    measured time of the layer's forward. At least half of the time counts as matrix products, even
    if the other terms of the formula are larger, as on a CPU. FLOPs in fp8 count less, in
    proportion to the rate of a large fp8 product.

    Args:
        table: The table with the measured time of the layer's forward.
        rates: The rates of a large product and of the device memory.
        model: The model. Its decoder layer 0 is used.
        workload: The workload of the measured time.
        attention: The rate of the workload's attention kernel.
    """
    layer = model.decoders[0]
    work = op_work(model, "forward", layer.name, workload)
    seconds = table.compute["forward"][f"{layer.signature}/{workload.shape}"][1] / 1e9
    rest = work.moved_bytes / rates.device_bytes_per_s
    rest += (
        work.attention_flops
        * (1 + attention.half_tokens / workload.sequence)
        / (attention.efficiency * rates.matmul_flops)
    )
    flops: float = work.linear_flops
    if work.fp8_flops:
        flops -= work.fp8_flops * (1 - rates.matmul_flops / rates.fp8_flops)
    return min(1.0, flops / max(seconds - rest, seconds / 2) / rates.matmul_flops)


def copy_curve(points: list[tuple[int, int]]) -> Curve:
    """Returns points (bytes, GB/s) from points (bytes, ns) in ascending order.

    If noise made a copy faster than a smaller one, it gets the duration of the smaller one.
    """
    longest, curve = 1.0, []  # ns
    for size, duration in points:
        rate = rounded(size / max(duration, 1))
        curve.append((size, min(rate, size / longest)))
        longest = size / curve[-1][1]
    return tuple(curve)


def duplex_curve(both: list[tuple[int, int]], h2d: Curve, d2h: Curve) -> Curve:
    """Returns points (bytes, GB/s) for each direction while both are busy.

    `both` has points (bytes, ns) of copies while both directions are busy, and `h2d` and `d2h` are
    the curves of each direction alone. A rate is limited to the rate of the faster direction alone.
    """
    alone = {size: max(dict(h2d)[size], dict(d2h)[size]) for size, _ in both}
    return tuple((size, min(rate, alone[size])) for size, rate in copy_curve(both))


def rate_at_the_end(points: tuple[tuple[int, int], ...]) -> float:
    """Returns the size of the last of `points` (size, duration in ns), divided by its duration in
    seconds.
    """
    size, duration = points[-1]
    return size / (duration / 1e9)
