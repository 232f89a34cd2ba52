"""Measures how much lanes slow each other.

The speed of each lane, in units of work per second, is measured alone and while other lanes are
busy. Each pair of lanes runs for a window of time. Lanes that share the host's DRAM run several
times during a calibration (`link.py`), in pairs and also all three together. The shares of two
pairs cannot be multiplied: while both directions of the link are busy, the cores keep more of their
speed than the product of the shares, and the link keeps less.

A result is computed from whole windows, and is the median if lanes ran several times. For its
spread, windows are cut into equal parts, and the result is computed again from the first part of
each window, from the second part, and so on.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from megatrain.runtime.calibration.timing import Work, spread
from megatrain.runtime.execution.lanes import DEVICE_LANES
from megatrain.runtime.layers.functional_layers import FunctionalLayers, layer_tensors
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.optimizer import adamw as optimizer
from megatrain.simulator.hardware.cost_table import KernelInterleaving
from megatrain.simulator.hardware.limits import DRAM_LANES
from megatrain.simulator.model.layer import LayerSpec
from megatrain.simulator.schedule import Buffer, Schedule

_WINDOW_SECONDS = 0.5
"""The length of a window in seconds."""
_PARTS = 8
"""Number of parts of a window."""
_TWO_ERRORS = 2 / (1.35 * _PARTS**0.5)
"""Two standard errors of the mean over the parts, divided by their interquartile range. For a
normal distribution, this range is 1.35 standard deviations."""
_UPDATED = 2**25
"""The maximum number of parameters in a unit of work of an update."""
_MOST_UPDATED = 2**28
"""The maximum number of parameters in the largest update, which has 3.5 GiB."""
_AHEAD = 3
"""Number of units of work that the thread of a stream enqueues ahead, as in the executor. Without
this, time that a thread waits for Python's lock would look like a slower GPU."""
COPIES = {
    "load_weights": ("host.weights:0", "device.weights:0"),
    "save_gradients": ("device.gradients:0", "host.gradients:0"),
}
"""Kind of copy -> the buffers to copy from and to."""
LaneRates = tuple[float, ...]
"""Units of work per second, over a whole window and then over each of its parts."""
Speeds = Mapping[tuple[str, ...], Mapping[str, float]]
"""The lanes that run together -> each of these lanes -> its units of work per second."""
Shares = dict[tuple[str, str], tuple[float, ...]]
"""(lane, other lanes joined by `+`) -> the share of its speed that the lane keeps while the others
are busy, over a whole window and then over each of its parts."""


class Contention(NamedTuple):
    """How much lanes slow each other."""

    kept: dict[str, dict[str, float]]
    """Lane -> other lanes, joined by `+` -> the share of its speed that the lane keeps while the
    others are busy (`CostTable.contention`)."""
    turns: KernelInterleaving | None
    """How kernels of the update lane and of the compute lane share the GPU, or None without a
    GPU."""
    spread: dict[str, float]
    """Interquartile range divided by the median. Keys are `contention.LANE.OTHER` and
    `turns.FIELD`."""


def measure_contention(
    functional_layers: FunctionalLayers,
    arenas: Arenas,
    layer: LayerSpec,
    largest: int,
    threads: dict[str, int],
    device: torch.device,
    host_update: Work,
    of_dram: Sequence[Shares],
) -> Contention:
    """Measures how much lanes slow each other.

    Args:
        functional_layers: Runs `layer`, which is the work of the compute lane.
        arenas: Holds the weights of `layer`, and buffers to copy from and to.
        layer: A decoder layer.
        largest: The size of each of these buffers in bytes.
        threads: Lane -> the number of threads that its ops may use.
        device: The device to measure.
        host_update: A unit of work of the cpu lane. Updates are most of this lane's work, and need
            the most DRAM bandwidth.
    """
    work = _lane_work(functional_layers, arenas, layer, largest, device) | {"cpu": host_update}
    pairs = [
        lanes for lanes in itertools.combinations(work, 2) if not set(lanes) <= DRAM_LANES.keys()
    ]
    moments = [measure_shares(work, pairs, threads, device), *of_dram]
    whole, spreads = typical(moments)
    turns, spreads_of_turns = (
        _measure_interleaving(functional_layers, arenas, layer, work["compute"], threads, device)
        if device.type == "cuda"
        else (None, {})
    )
    return Contention(kept(whole, within_moments(moments)), turns, spreads | spreads_of_turns)


def measure_shares(
    work: Mapping[str, Work],
    combinations: Sequence[tuple[str, ...]],
    threads: dict[str, int],
    device: torch.device,
) -> Shares:
    """Runs each lane of `combinations` alone, then each combination, for a window each. Returns the
    share that each lane keeps in each combination.

    Args:
        work: Lane -> a unit of its work.
        combinations: The lanes to run together.
        threads: Lane -> the number of threads that its work may use.
        device: The device of the lanes that have a stream.
    """
    alone = [(lane,) for lane in work if any(lane in lanes for lanes in combinations)]
    runs = {
        lanes: run_together({lane: work[lane] for lane in lanes}, threads, device)
        for lanes in [*alone, *combinations]
    }
    parts = [
        shares(
            {
                lanes: {lane: rates[part] for lane, rates in lane_rates.items()}
                for lanes, lane_rates in runs.items()
            }
        )
        for part in range(1 + _PARTS)
    ]
    return {key: tuple(part[key] for part in parts) for key in parts[0]}


def shares(speeds: Speeds) -> dict[tuple[str, str], float]:
    """Returns the speed of each lane while others are busy, divided by its speed alone.

    Keys are the lane and the others, which are joined by `+`, such as `h2d+d2h`.
    """
    together = {lanes: rates for lanes, rates in speeds.items() if len(lanes) > 1}
    return {
        (lane, "+".join(other for other in lanes if other != lane)): (
            rates[lane] / speeds[lane,][lane]
        )
        for lanes, rates in together.items()
        for lane in lanes
    }


def typical(moments: Sequence[Shares]) -> tuple[dict[tuple[str, str], float], dict[str, float]]:
    """Returns the median of each share over the moments at which it was measured, and its spread.

    The spread is that of the parts of all windows, with the keys of `Contention.spread`.
    """
    found: dict[tuple[str, str], list[tuple[float, ...]]] = {}
    for moment in moments:
        for key, rates in moment.items():
            found.setdefault(key, []).append(rates)
    return (
        {key: statistics.median(whole for whole, *_ in runs) for key, runs in found.items()},
        {
            f"contention.{lane}.{others}": spread([part for _, *parts in runs for part in parts])
            for (lane, others), runs in found.items()
        },
    )


def within_moments(moments: Sequence[Shares]) -> dict[str, float]:
    """Returns the median, over the moments, of the spread of the parts of a window, with the keys
    of `Contention.spread`. How far the moments differ does not count.
    """
    found: dict[str, list[float]] = {}
    for moment in moments:
        for (lane, others), (_, *parts) in moment.items():
            found.setdefault(f"contention.{lane}.{others}", []).append(spread(parts))
    return {key: statistics.median(spreads) for key, spreads in found.items()}


def kept(
    whole: Mapping[tuple[str, str], float], spreads: Mapping[str, float]
) -> dict[str, dict[str, float]]:
    """Returns the shares `whole` as `Contention.kept`, from 0.01 to 1.

    A share that is less than two standard errors below 1 is set to 1. `spreads` are those of the
    parts of one window (`within_moments`).
    """
    by_lane: dict[str, dict[str, float]] = {}
    for (lane, others), share in whole.items():
        clear = 1 - share > _TWO_ERRORS * spreads.get(f"contention.{lane}.{others}", 0.0)
        by_lane.setdefault(lane, {})[others] = round(max(share, 0.01), 3) if clear else 1.0
    return by_lane


def copy_buffers(largest: int, **others: int) -> Schedule:
    """Returns a schedule without ops whose buffers `copy_work` uses, with `largest` bytes each.

    `others` are the names of further buffers of the device, and their bytes.
    """
    sizes = {name: largest for pair in COPIES.values() for name in pair}
    sizes |= {f"device.{name}:0": size for name, size in others.items()}
    return Schedule(
        policy="rates",
        buffers=tuple(
            Buffer(id=name, bytes=size, data="workspace", dtype="mixed")
            for name, size in sizes.items()
        ),
        ops=(),
    )


def copy_work(arenas: Arenas, size: int) -> dict[str, Work]:
    """Returns a unit of work for the lanes h2d and d2h: a copy of `size` bytes."""

    def copy(source: str, target: str) -> Work:
        read, write = (arenas.flat(name, torch.uint8, size) for name in (source, target))
        return lambda: write.copy_(read, non_blocking=True)

    return {"h2d": copy(*COPIES["load_weights"]), "d2h": copy(*COPIES["save_gradients"])}


def run_together(
    work: Mapping[str, Work],
    threads: dict[str, int],
    device: torch.device,
    windows: int = 1,
    counts: Mapping[str, int] | None = None,
) -> dict[str, LaneRates]:
    """Runs the work of all lanes together, and returns the rates of each lane.

    No work is left on the device when this function ends, so its memory may be freed. Work
    counts from the time at which all lanes run until the first of them stops. If the work of a
    lane raises an exception, all lanes are stopped and the exception is raised here. A lane with a
    count runs all of its units even then, because other processes may wait for them.

    Args:
        work: Lane -> a unit of its work.
        threads: Lane -> the number of threads that its work may use.
        device: The device of the lanes that have a stream.
        windows: The number of windows of half a second.
        counts: Lane -> the number of its units of work, at least 5. Such a lane begins when all
            other lanes run, and they stop when it has ended. `windows` is then not used.
    """
    ended: dict[str, list[float]] = {lane: [] for lane in work}
    fixed = counts or {}
    others = [stamps for lane, stamps in ended.items() if lane not in fixed]
    ready, stop, failures = threading.Event(), threading.Event(), list[BaseException]()

    def serve(lane: str) -> None:
        try:
            loop(lane)
        except BaseException as error:
            failures.append(error)
            stop.set()

    def loop(lane: str) -> None:
        torch.set_num_threads(threads[lane])
        stream = (
            torch.cuda.Stream(device) if device.type == "cuda" and lane in DEVICE_LANES else None
        )
        if stream is not None:
            torch.cuda.set_device(stream.device)  # a new thread has no CUDA context
            torch.cuda.set_stream(stream)
        try:
            enqueue(lane, stream)
        finally:
            if stream is not None:
                stream.synchronize()

    def enqueue(lane: str, stream: torch.cuda.Stream | None) -> None:
        begun: deque[torch.cuda.Event] = deque()
        if lane in fixed:
            ready.wait()
        for _ in range(fixed[lane]) if lane in fixed else itertools.count():
            if stop.is_set() and lane not in fixed:
                break
            work[lane]()
            if stream is not None:
                begun.append(stream.record_event())
                if len(begun) > _AHEAD:
                    begun.popleft().synchronize()
            ended[lane].append(time.perf_counter())

    def wait(enough: Callable[[], bool]) -> None:
        while not stop.is_set() and not enough():
            time.sleep(0.005)

    workers = [threading.Thread(target=serve, args=(lane,)) for lane in work]
    try:
        for worker in workers:
            worker.start()
        wait(lambda: all(len(stamps) >= 2 for stamps in others))
        ready.set()
        if fixed:
            wait(lambda: all(len(ended[lane]) >= count for lane, count in fixed.items()))
        else:
            stop.wait(windows * _WINDOW_SECONDS)
        wait(lambda: all(len(stamps) >= 5 for stamps in ended.values()))
    finally:  # also after Ctrl-C
        ready.set()
        stop.set()
        for worker in workers:
            if worker.is_alive():
                worker.join()
    if failures:
        raise failures[0]
    begin, end = (
        max(stamps[1] for stamps in ended.values()),
        min(stamps[-1] for stamps in ended.values()),
    )
    return {lane: _rates(stamps, begin, end) for lane, stamps in ended.items()}


def _rates(stamps: list[float], begin: float, end: float) -> LaneRates:
    """Returns the rates from `begin` to `end`. `stamps` are the times at which units of work ended.

    If fewer than two stamps are in this range, all stamps except the first are used. A unit that
    overlaps two parts counts in both, in proportion to its time in each.
    """
    inside = [stamp for stamp in stamps if begin <= stamp <= end]
    if len(inside) < 2:
        inside = stamps[1:]
    units, seconds = len(inside) - 1, inside[-1] - inside[0]
    done = np.interp(np.linspace(inside[0], inside[-1], _PARTS + 1), inside, np.arange(units + 1))
    return (units / seconds, *(float(rate) for rate in np.diff(done) * _PARTS / seconds))


def _lane_work(
    functional_layers: FunctionalLayers,
    arenas: Arenas,
    layer: LayerSpec,
    largest: int,
    device: torch.device,
) -> dict[str, Work]:
    """Returns a unit of work for each lane except cpu.

    It is forward and backward of the layer for compute, AdamW for update, and a copy for h2d and
    d2h.
    """
    work, model = functional_layers.workload, functional_layers.model
    chunk = min(largest, functional_layers.dtype.itemsize * layer.elements)
    weights = layer_tensors(arenas, layer, "device.layer:0", functional_layers.dtype)
    for tensor in weights.values():
        tensor.normal_(0, 0.02)
    x = torch.randn(work.batch, work.sequence, model.carried, device=device).to(
        functional_layers.dtype
    )
    functional_layers.begin(0)
    # The balancing loss needs the choices of the router.
    functional_layers.forward(layer.name, weights, x)

    def layer_both_ways() -> None:
        saved = functional_layers.recompute(arenas, layer, "device.layer:0", x.detach())
        functional_layers.backward(saved, "device.layer:0", x)

    return {"compute": layer_both_ways, "update": _update(_updated(layer), device)} | copy_work(
        arenas, chunk
    )


def _updated(layer: LayerSpec) -> int:
    """Returns the number of parameters in a unit of work of an update."""
    return min(layer.elements, _UPDATED)


def _update(count: int, device: torch.device) -> Work:
    """Returns a function that runs AdamW on `count` parameters on the device."""
    state, residual = (
        torch.zeros(2, count, device=device),
        torch.zeros(count, dtype=torch.int16, device=device),
    )
    master, gradient = (torch.randn(count, device=device).to(torch.bfloat16) for _ in range(2))
    return lambda: optimizer.update(
        master, residual, state, gradient, settings=optimizer.AdamW(), rate=0.0, number=1, clip=None
    )


class _ConcurrentUpdate(NamedTuple):
    """The speeds of an update and of compute that run at the same time."""

    alone: float
    """Updates per second without compute."""
    update: float
    """Updates per second while compute runs."""
    compute: float
    """Units of compute per second while updates run."""

    def loss(self, compute_alone: float) -> float:
        """Returns the relative loss of compute's speed, divided by the share of its speed that the
        update keeps.

        `compute_alone` is the units of compute per second without updates.
        """
        return (1 - self.compute / compute_alone) * self.alone / self.update


def _measure_interleaving(
    functional_layers: FunctionalLayers,
    arenas: Arenas,
    layer: LayerSpec,
    both_ways: Work,
    threads: dict[str, int],
    device: torch.device,
) -> tuple[KernelInterleaving, dict[str, float]]:
    """Measures how kernels of an update and of compute share the GPU. Returns the result, and the
    spread of each field.

    The update of a chunk and the update of a layer run at the same time as a layer's forward. The
    update of a layer also runs at the same time as forward and backward (`both_ways`).
    """
    weights = layer_tensors(arenas, layer, "device.layer:0", functional_layers.dtype)
    x = torch.randn(
        functional_layers.workload.batch,
        functional_layers.workload.sequence,
        functional_layers.model.carried,
        device=device,
    ).to(functional_layers.dtype)

    def forward() -> None:
        functional_layers.forward(layer.name, weights, x)

    def together(compute: Work, update: Work, alone: LaneRates) -> list[_ConcurrentUpdate]:
        lanes = run_together({"compute": compute, "update": update}, threads, device)
        return [
            _ConcurrentUpdate(*rates)
            for rates in zip(alone, lanes["update"], lanes["compute"], strict=True)
        ]

    forwards, both = (
        run_together({"compute": work}, threads, device)["compute"] for work in (forward, both_ways)
    )
    runs = []
    for count in (_updated(layer), min(layer.elements, _MOST_UPDATED)):
        update = _update(count, device)
        alone = run_together({"update": update}, threads, device)["update"]
        runs.append(together(forward, update, alone))
    chunk, whole = runs
    (wait, loss, backward_loss), *parts = [
        _interleaving(*rates)
        for rates in zip(
            forwards, both, chunk, whole, together(both_ways, update, alone), strict=True
        )
    ]
    spreads = {
        f"turns.{field}": spread(values)
        for field, values in zip(
            KernelInterleaving.__struct_fields__, zip(*parts, strict=True), strict=True
        )
    }
    return (
        KernelInterleaving(
            wait_ns=max(round(wait), 0),
            forward_loss=_share(loss),
            backward_loss=_share(backward_loss),
        ),
        spreads,
    )


def _interleaving(
    forwards: float,
    both: float,
    chunk: _ConcurrentUpdate,
    layer: _ConcurrentUpdate,
    layer_with_both: _ConcurrentUpdate,
) -> tuple[float, float, float]:
    """Returns `wait_ns`, `forward_loss` and `backward_loss` of KernelInterleaving.

    Args:
        forwards: Forward passes per second.
        both: Pairs of forward and backward passes per second.
        chunk: Updates of a chunk during forward passes.
        layer: Updates of a layer during forward passes.
        layer_with_both: Updates of a layer during forward and backward passes.
    """
    wait = statistics.mean(1 / run.update - 1 / run.alone for run in (chunk, layer))
    share = both / forwards  # the forward's share of the time of forward and backward
    loss = layer.loss(forwards)
    return 1e9 * wait, loss, (layer_with_both.loss(both) - share * loss) / (1 - share)


def _share(value: float) -> float:
    """Returns `value` limited to the range from 0 to 1, with three decimals."""
    return round(min(max(value, 0.0), 1.0), 3)
