"""Contention: units of each lane's work a second, alone and while other lanes are busy, and how much they slow each other.

Every pair of lanes runs for a window of time, those that share the host's DRAM for two, and so do the three together: with both directions of the link busy
the cores keep more than both pairs' shares multiplied, and the link less. A number comes from the whole windows; its spread from windows cut into equal parts, with the number
worked out anew from the first part of each, from the second, and so on.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch

from megatrain.runtime import optimizer
from megatrain.runtime.lanes import DEVICE_LANES
from megatrain.runtime.layers.templates import Templates, layer_tensors
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.repeats import Work, spread
from megatrain.simulator.hardware import DRAM_LANES, Turns
from megatrain.simulator.specs import LayerSpec

_WINDOW_SECONDS = 0.5
_DRAM_WINDOWS = 2  # such windows for what shares the host's DRAM, which wanders most
_PARTS = 8  # of a window
_TWO_ERRORS = 2 / (1.35 * _PARTS**0.5)  # of their mean, of their interquartile range: 1.35 standard deviations
_UPDATED = 2**25  # parameters in a unit of an update, at most
_MOST_UPDATED = 2**28  # of the largest: 3.5 GiB
_AHEAD = 3  # units of work that a stream's thread enqueues ahead, as the executor's does: else waiting for Python's lock would look like a slower GPU
Rates = tuple[float, ...]
"""units of work a second: over a whole window, then over each of its parts"""
Speeds = Mapping[tuple[str, ...], Mapping[str, float]]
"""lanes that run together -> lane -> units of its work a second"""


class Contention(NamedTuple):
    """What was found."""

    kept: dict[str, dict[str, float]]
    """lane -> other lane, or others -> share of its speed that the first keeps, as in CostTable"""
    turns: Turns | None
    """how the update lane's kernels and those of compute share the device, where there is one"""
    spread: dict[str, float]
    """`contention.LANE.OTHER` and `turns.FIELD` -> interquartile range over median"""


def measure_contention(
    templates: Templates, arenas: Arenas, layer: LayerSpec, largest: int, threads: dict[str, int], device: torch.device, host_update: Work
) -> Contention:
    """Of work on `layer`, whose weights and sums are in `arenas`, as are buffers of `largest` bytes to copy from and to. `host_update`: a unit of the cpu lane's,
    an update, most of what it does, and what asks most of DRAM.
    """
    work, cuda = _lane_work(templates, arenas, layer, largest, device) | {"cpu": host_update}, device.type == "cuda"
    runs = _measure_together(work, threads, device)
    whole, *parts = [{lanes: {lane: rates[turn] for lane, rates in found.items()} for lanes, found in runs.items()} for turn in range(1 + _PARTS)]
    spreads = {f"contention.{lane}.{other}": spread([shares(part)[lane, other] for part in parts]) for lane, other in shares(whole)}
    turns, spreads_of_turns = _measure_turns(templates, arenas, layer, work["compute"], threads, device) if cuda else (None, {})
    return Contention(kept(whole, spreads), turns, spreads | spreads_of_turns)


def shares(speeds: Speeds) -> dict[tuple[str, str], float]:
    """(lane, other lane or lanes, `h2d+d2h`) -> the first's speed beside them, of its speed alone."""
    together = {lanes: rates for lanes, rates in speeds.items() if len(lanes) > 1}
    return {
        (lane, "+".join(other for other in lanes if other != lane)): rates[lane] / speeds[lane,][lane] for lanes, rates in together.items() for lane in lanes
    }


def kept(speeds: Speeds, spreads: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """The same by lane, from 0.01 to 1: what is less than two standard errors from 1 is 1."""
    found: dict[str, dict[str, float]] = {}
    for (lane, others), share in shares(speeds).items():
        clear = 1 - share > _TWO_ERRORS * spreads.get(f"contention.{lane}.{others}", 0.0)
        found.setdefault(lane, {})[others] = round(max(share, 0.01), 3) if clear else 1.0
    return found


def run_together(work: Mapping[str, Work], threads: dict[str, int], device: torch.device, windows: int = 1) -> dict[str, Rates]:
    """Each lane's rates while all run: counted from when all have begun to when the first stops. Raises what a lane's work raises, when all have stopped."""
    counts: dict[str, list[float]] = {lane: [] for lane in work}
    stop, failures = threading.Event(), list[BaseException]()

    def serve(lane: str) -> None:
        try:
            loop(lane)
        except BaseException as error:
            failures.append(error)
            stop.set()

    def loop(lane: str) -> None:
        torch.set_num_threads(threads[lane])
        stream = torch.cuda.Stream(device) if device.type == "cuda" and lane in DEVICE_LANES else None
        if stream is not None:
            torch.cuda.set_stream(stream)
        begun: deque[torch.cuda.Event] = deque()
        while not stop.is_set():
            work[lane]()
            if stream is not None:
                begun.append(stream.record_event())
                if len(begun) > _AHEAD:
                    begun.popleft().synchronize()
            counts[lane].append(time.perf_counter())

    workers = [threading.Thread(target=serve, args=(lane,)) for lane in work]
    for worker in workers:
        worker.start()
    while not stop.is_set() and not all(len(stamps) >= 2 for stamps in counts.values()):
        time.sleep(0.005)
    stop.wait(windows * _WINDOW_SECONDS)
    while not stop.is_set() and not all(len(stamps) >= 5 for stamps in counts.values()):
        time.sleep(0.005)
    stop.set()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    begin, end = max(stamps[1] for stamps in counts.values()), min(stamps[-1] for stamps in counts.values())
    return {lane: _rates(stamps, begin, end) for lane, stamps in counts.items()}


def _rates(stamps: list[float], begin: float, end: float) -> Rates:
    """From the times at which units were done, those from `begin` to `end`; of all but the first where these are fewer than two.

    A unit that reaches over the seam of two parts counts in both, by its share of time.
    """
    inside = [stamp for stamp in stamps if begin <= stamp <= end]
    if len(inside) < 2:
        inside = stamps[1:]
    units, seconds = len(inside) - 1, inside[-1] - inside[0]
    done = np.interp(np.linspace(inside[0], inside[-1], _PARTS + 1), inside, np.arange(units + 1))
    return (units / seconds, *(float(rate) for rate in np.diff(done) * _PARTS / seconds))


def _lane_work(templates: Templates, arenas: Arenas, layer: LayerSpec, largest: int, device: torch.device) -> dict[str, Work]:
    """A unit of what each lane but the host's does while others are busy."""
    work, model = templates.workload, templates.model
    width = templates.dtype.itemsize
    weights = layer_tensors(arenas, layer, "device.layer:0", templates.dtype)
    for tensor in weights.values():
        tensor.normal_(0, 0.02)
    x = torch.randn(work.batch, work.sequence, model.hidden, device=device).to(templates.dtype)
    chunk = _copied_bytes(layer, width, largest)
    flat = {name: arenas.flat(name, torch.uint8, chunk) for name in ("host.weights:0", "host.gradients:0", "device.weights:0", "device.gradients:0")}

    templates.begin(0)
    templates.forward(layer.name, weights, x)  # its router's choices, where their loss is asked for

    def layer_both_ways() -> None:
        saved = templates.recompute(arenas, layer, "device.layer:0", x.detach())
        templates.backward(saved, "device.layer:0", x)

    return {
        "compute": layer_both_ways,
        "update": _update(_updated(layer), device),
        "h2d": lambda: flat["device.weights:0"].copy_(flat["host.weights:0"], non_blocking=True),
        "d2h": lambda: flat["host.gradients:0"].copy_(flat["device.gradients:0"], non_blocking=True),
    }


def _updated(layer: LayerSpec) -> int:
    """Parameters in a unit of an update."""
    return min(layer.elements, _UPDATED)


def _update(count: int, device: torch.device) -> Work:
    """AdamW on `count` parameters of the device."""
    state, residual = torch.zeros(2, count, device=device), torch.zeros(count, dtype=torch.int16, device=device)
    master, gradient = (torch.randn(count, device=device).to(torch.bfloat16) for _ in range(2))
    return lambda: optimizer.update(master, residual, state, gradient, settings=optimizer.AdamW(), rate=0.0, number=1, clip=None)


def _copied_bytes(layer: LayerSpec, width: int, largest: int) -> int:
    """Of a copy's unit of work."""
    return min(largest, width * layer.elements)


def _measure_together(work: dict[str, Work], threads: dict[str, int], device: torch.device) -> dict[tuple[str, ...], dict[str, Rates]]:
    """Each lane alone, in pairs, and on a GPU both directions of the link beside the cores."""
    combinations: list[tuple[str, ...]] = [*itertools.combinations(work, 1), *itertools.combinations(work, 2)]
    if device.type == "cuda":
        combinations.append(tuple(DRAM_LANES))
    windows = {lanes: _DRAM_WINDOWS if set(lanes) <= DRAM_LANES.keys() else 1 for lanes in combinations}
    return {lanes: run_together({lane: work[lane] for lane in lanes}, threads, device, windows[lanes]) for lanes in combinations}


class _UpdateBeside(NamedTuple):
    """Units of work a second of an update alone, and of it and of compute beside each other."""

    alone: float
    update: float
    compute: float

    def loss(self, compute_alone: float) -> float:
        """Of compute's speed, for each share of its own that the update has."""
        return (1 - self.compute / compute_alone) * self.alone / self.update


def _measure_turns(
    templates: Templates, arenas: Arenas, layer: LayerSpec, both_ways: Work, threads: dict[str, int], device: torch.device
) -> tuple[Turns, dict[str, float]]:
    """From a chunk's and a layer's update beside a layer's forward, and the layer's beside forward and backward; and their spread."""
    weights = layer_tensors(arenas, layer, "device.layer:0", templates.dtype)
    x = torch.randn(templates.workload.batch, templates.workload.sequence, templates.model.hidden, device=device).to(templates.dtype)

    def forward() -> None:
        templates.forward(layer.name, weights, x)

    def beside(compute: Work, update: Work, alone: Rates) -> list[_UpdateBeside]:
        found = run_together({"compute": compute, "update": update}, threads, device)
        return [_UpdateBeside(*rates) for rates in zip(alone, found["update"], found["compute"], strict=True)]

    forwards, both = (run_together({"compute": work}, threads, device)["compute"] for work in (forward, both_ways))
    runs = []
    for count in (_updated(layer), min(layer.elements, _MOST_UPDATED)):
        update = _update(count, device)
        alone = run_together({"update": update}, threads, device)["update"]
        runs.append(beside(forward, update, alone))
    chunk, whole = runs
    found = [_turns(*rates) for rates in zip(forwards, both, chunk, whole, beside(both_ways, update, alone), strict=True)]
    wait, loss, backward_loss = found[0]
    spreads = {f"turns.{field}": spread(values) for field, values in zip(Turns.__struct_fields__, zip(*found[1:], strict=True), strict=True)}
    return Turns(wait_ns=max(round(wait), 0), forward_loss=_share(loss), backward_loss=_share(backward_loss)), spreads


def _turns(forwards: float, both: float, chunk: _UpdateBeside, layer: _UpdateBeside, layer_beside_both: _UpdateBeside) -> tuple[float, float, float]:
    """(wait_ns, forward_loss, backward_loss) from forwards a second, and forwards and backwards; from updates beside forwards; and beside both."""
    wait = statistics.mean(1 / run.update - 1 / run.alone for run in (chunk, layer))
    share = both / forwards  # of the time both ways that the forward takes
    loss = layer.loss(forwards)
    return 1e9 * wait, loss, (layer_beside_both.loss(both) - share * loss) / (1 - share)


def _share(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 3)
