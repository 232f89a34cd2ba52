"""Rates of the bare machine: copies by size, matrix products, memory, and how much lanes that work at once slow each other."""

from __future__ import annotations

import itertools
import mmap
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PretrainedConfig

from megatrain.runtime import optimizer
from megatrain.runtime.lanes import DEVICE_LANES
from megatrain.runtime.layers.templates import Templates, layer_tensors
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.simulator.fit import HostRates, fit_host_memory
from megatrain.simulator.hardware import FixedCosts, Turns
from megatrain.simulator.hardware import HostMemory as SharedMemory
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.specs import DTYPE_BYTES, LayerSpec, ModelSpec
from megatrain.simulator.workload import Workload

_COPY_SIZES = tuple(2**power for power in range(16, 29, 2))  # 64 KiB to 256 MiB
_LEAST_DUPLEX = 2**20  # smaller copies are no longer than what it takes to enqueue them
_DUPLEX_UNIT = 2**26  # bytes enqueued at once
_PAIR_SECONDS = 0.5
_TOUCHED_BYTES = 2**30  # to see what new pages cost
_UPDATED = 2**25  # parameters in a unit of the update lane's work
_MOST_UPDATED = 2**28  # of the largest: 3.5 GiB
_AHEAD = 3  # units of work that a stream's thread enqueues ahead, as the executor's does: else waiting for Python's lock would look like a slower GPU
_DRAM_LANES = ("h2d", "d2h", "cpu")
Work = Callable[[], object]


@dataclass(frozen=True)
class Rates:
    """What was measured; rates per second."""

    copies: dict[str, list[tuple[int, int]]]
    """`load_weights` and `save_gradients`: (bytes, ns)"""
    duplex: list[tuple[int, int]]
    """(bytes, ns) of a copy while the other direction is as busy; empty without a GPU"""
    contention: dict[str, dict[str, float]]
    """lane -> other lane -> share of its speed that the first keeps"""
    host_memory: SharedMemory | None
    """what the link and the host's cores share, where there is a link and its copies suffer from them"""
    turns: Turns | None
    """how the update lane's kernels and those of compute share the device, where there is one"""
    matmul_flops: float
    device_bytes_per_s: float
    host_bytes_per_s: float
    thread_bytes_per_s: float
    """copied by one thread, read and written"""
    cpu_adam_per_s: float
    """parameters of a fused AdamW on the host, with bf16 weights and gradients"""
    fixed: FixedCosts
    spread: dict[str, float]
    """`KIND BYTES` of a copy, or the name of a rate -> interquartile range over median"""


def measure_rates(model: ModelSpec, workload: Workload, config: PretrainedConfig, device: torch.device, threads: dict[str, int]) -> Rates:
    """Some 10 s. `model` gives the sizes of the layer and the optimizer step that stand for the compute and cpu lanes."""
    layer, width, cuda = model.stack["0"], DTYPE_BYTES[workload.dtype], device.type == "cuda"
    largest = _COPY_SIZES[-1] if cuda else _COPY_SIZES[-2]
    sizes = {"host.weights:0": largest, "host.gradients:0": largest, "device.weights:0": largest, "device.gradients:0": largest}
    sizes |= {"device.layer:0": width * layer.elements, "host.layer:0": 4 * layer.elements}
    schedule = Schedule(policy="rates", buffers=tuple(Buffer(id=name, bytes=size, persistent=True) for name, size in sizes.items()), ops=())
    arenas = Arenas(schedule, device, device_limit_bytes=2**62, host_limit_bytes=2**62)
    workers, own_threads = optimizer.workers(threads["cpu"]), torch.get_num_threads()
    try:
        for name, size in sizes.items():  # touched, and not zeros: a product of zeros runs 13 % too fast; bytes below 60 keep floats finite
            arenas.flat(name, torch.uint8, size).random_(1, 60)
        torch.set_num_threads(1)
        copies: dict[str, list[tuple[int, int]]] = {}
        spread: dict[str, float] = {}
        for kind, source, target in (("load_weights", "host.weights:0", "device.weights:0"), ("save_gradients", "device.gradients:0", "host.gradients:0")):
            for size in (size for size in _COPY_SIZES if size <= largest):
                typical, spread[f"{kind} {size}"] = _time_copy(arenas, source, target, size, largest, device)
                copies.setdefault(kind, []).append((size, typical))
        duplex = [(size, _time_duplex(arenas, size, largest, threads, device)) for size in _COPY_SIZES if _LEAST_DUPLEX <= size <= largest] if cuda else []
        torch.set_num_threads(threads["compute"])
        templates = Templates(model, workload, config, device)
        work = _lane_work(templates, arenas, layer, largest, device, workers)
        speeds = _measure_together(work, threads, device)
        memory = _host_memory(speeds, _traffic(layer, width, largest)) if cuda else None
        turns = _turns(templates, arenas, layer, work["compute"], threads, device) if cuda else None
        host = torch.device("cpu")
        measured = {
            "matrix product": _matmul(templates.dtype, device),
            "device copy": _memory_rate(device),
            "host copy": _memory_rate(host),
            "host AdamW": _adam_rate(),
        }
        fixed = _fixed_costs(device)
        torch.set_num_threads(1)
        measured["thread copy"] = _memory_rate(host)
        spread |= {name: found for name, (_, found) in measured.items()}
        matmul, device_rate, host_rate, adam, thread_rate = (rate for rate, _ in measured.values())
        return Rates(copies, duplex, _contention(speeds), memory, turns, matmul, device_rate, host_rate, thread_rate, adam, fixed, spread)
    finally:
        torch.set_num_threads(own_threads)
        workers.close()
        arenas.close()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Timed(NamedTuple):
    """Wall time of a piece of work."""

    seconds: float
    """median"""
    spread: float
    """interquartile range over it"""


def _timed(work: Work, device: torch.device, repeats: int = 7) -> _Timed:
    """Of `work`, finished, after two warm-up calls."""
    times = []
    for turn in range(repeats + 2):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        if turn >= 2:
            times.append(time.perf_counter() - start)
    low, middle, high = statistics.quantiles(times, n=4)
    return _Timed(middle, round((high - low) / middle, 4))


def _time_copy(arenas: Arenas, source: str, target: str, size: int, largest: int, device: torch.device) -> tuple[int, float]:
    """ns of one copy of `size` bytes, and their interquartile range over it. Source and target move through their buffers, as layers do, so that small copies
    do not sit in a cache.
    """
    pairs = _pairs(arenas, source, target, size, largest)
    times = []
    for turn in range(12):
        read, write = pairs[(turn * 7) % len(pairs)]
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            write.copy_(read, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(round(start.elapsed_time(end) * 1e6))
        else:
            begin = time.perf_counter_ns()
            write.copy_(read)
            times.append(time.perf_counter_ns() - begin)
    low, typical, high = statistics.quantiles(times[2:], n=4)
    return round(typical), round((high - low) / max(typical, 1), 4)


def _pairs(arenas: Arenas, source: str, target: str, size: int, largest: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Places to copy from and to."""
    places = range(0, largest - size + 1, size)
    return [(arenas.flat(source, torch.uint8, size, place), arenas.flat(target, torch.uint8, size, place)) for place in places]


def _time_duplex(arenas: Arenas, size: int, largest: int, threads: dict[str, int], device: torch.device) -> int:
    """ns of a copy of `size` bytes while copies as large go the other way without a pause; of the slower direction."""
    count = max(_DUPLEX_UNIT // size, 1)

    def work(source: str, target: str) -> Work:
        places = itertools.cycle(_pairs(arenas, source, target, size, largest))

        def copies() -> None:
            for read, write in itertools.islice(places, count):
                write.copy_(read, non_blocking=True)

        return copies

    both = {"h2d": work("host.weights:0", "device.weights:0"), "d2h": work("device.gradients:0", "host.gradients:0")}
    return round(1e9 / (count * min(_together(both, threads, device).values())))


def _lane_work(templates: Templates, arenas: Arenas, layer: LayerSpec, largest: int, device: torch.device, workers: optimizer.Workers) -> dict[str, Work]:
    """A unit of what each lane does while others are busy (on the cpu lane: summing gradients and their squares)."""
    work, model = templates.workload, templates.model
    width = templates.dtype.itemsize
    weights = layer_tensors(arenas, layer, "device.layer:0", templates.dtype)
    for tensor in weights.values():
        tensor.normal_(0, 0.02)
    x = torch.randn(work.batch, work.sequence, model.hidden, device=device).to(templates.dtype)
    chunk = _copied_bytes(layer, width, largest)
    flat = {name: arenas.flat(name, torch.uint8, chunk) for name in ("host.weights:0", "host.gradients:0", "device.weights:0", "device.gradients:0")}
    total, gradient = arenas.flat("host.layer:0", torch.float32, layer.elements), torch.randn(layer.elements).to(templates.dtype)

    templates.begin(0)
    templates.forward(layer.name, weights, x)  # its router's choices, where their loss is asked for

    def layer_both_ways() -> None:
        saved = templates.recompute(arenas, layer, "device.layer:0", x.detach())
        templates.backward(saved, "device.layer:0", x)

    def sum_gradients() -> None:
        optimizer.accumulate(total, gradient, first=True, workers=workers)
        optimizer.sum_of_squares(total, workers)

    return {
        "compute": layer_both_ways,
        "update": _update(min(layer.elements, _UPDATED), device),
        "h2d": lambda: flat["device.weights:0"].copy_(flat["host.weights:0"], non_blocking=True),
        "d2h": lambda: flat["host.gradients:0"].copy_(flat["device.gradients:0"], non_blocking=True),
        "cpu": sum_gradients,
    }


def _update(count: int, device: torch.device) -> Work:
    """AdamW on `count` parameters of the device."""
    state = torch.zeros(2, count, device=device)
    master, residual = torch.randn(count, device=device).to(torch.bfloat16), torch.zeros(count, dtype=torch.int16, device=device)
    return lambda: optimizer.update(master, residual, state, master, settings=optimizer.AdamW(), rate=0.0, number=1, clip=None)


def _copied_bytes(layer: LayerSpec, width: int, largest: int) -> int:
    """Of a copy's unit of work."""
    return min(largest, width * layer.elements)


def _traffic(layer: LayerSpec, width: int, largest: int) -> dict[str, int]:
    """Bytes copied, or read and written by the cores, in a unit of work: the sum reads the gradient and writes fp32, the squares read that."""
    copied = _copied_bytes(layer, width, largest)
    return {"h2d": copied, "d2h": copied, "cpu": (width + 4 + 4) * layer.elements}


def _measure_together(work: dict[str, Work], threads: dict[str, int], device: torch.device) -> dict[tuple[str, ...], dict[str, float]]:
    """Units of work a second of each lane: alone, in pairs, and on a GPU both directions of the link beside the cores."""
    combinations: list[tuple[str, ...]] = [*itertools.combinations(work, 1), *itertools.combinations(work, 2)]
    if device.type == "cuda":
        combinations.append(_DRAM_LANES)
    return {lanes: _together({lane: work[lane] for lane in lanes}, threads, device) for lanes in combinations}


def _turns(templates: Templates, arenas: Arenas, layer: LayerSpec, both_ways: Work, threads: dict[str, int], device: torch.device) -> Turns:
    """From a chunk's and a layer's update beside a layer's forward, and the layer's beside forward and backward."""
    weights = layer_tensors(arenas, layer, "device.layer:0", templates.dtype)
    x = torch.randn(templates.workload.batch, templates.workload.sequence, templates.model.hidden, device=device).to(templates.dtype)

    def alone(lane: str, work: Work) -> float:
        return _together({lane: work}, threads, device)[lane]

    def forward() -> None:
        templates.forward(layer.name, weights, x)

    forwards, both, waits = alone("compute", forward), alone("compute", both_ways), []
    for count in (_UPDATED, min(layer.elements, _MOST_UPDATED)):
        update = _update(count, device)
        speed = alone("update", update)
        beside = _together({"compute": forward, "update": update}, threads, device)
        waits.append(1 / beside["update"] - 1 / speed)
    loss = (1 - beside["compute"] / forwards) * speed / beside["update"]
    beside = _together({"compute": both_ways, "update": update}, threads, device)
    loss_of_both = (1 - beside["compute"] / both) * speed / beside["update"]
    share = both / forwards  # of the time both ways that the forward takes
    wait_ns = max(round(statistics.mean(waits) * 1e9), 0)
    return Turns(wait_ns=wait_ns, forward_loss=_share(loss), backward_loss=_share((loss_of_both - share * loss) / (1 - share)))


def _share(value: float) -> float:
    return round(min(max(value, 0.0), 1.0), 3)


def _contention(speeds: dict[tuple[str, ...], dict[str, float]]) -> dict[str, dict[str, float]]:
    """Each pair of lanes at once, against each alone."""
    kept: dict[str, dict[str, float]] = {}
    for lanes, both in speeds.items():
        if len(lanes) == 2:
            for lane, other in (lanes, lanes[::-1]):
                kept.setdefault(lane, {})[other] = round(min(1.0, max(both[lane] / speeds[lane,][lane], 0.01)), 3)
    return kept


def _host_memory(speeds: dict[tuple[str, ...], dict[str, float]], traffic: dict[str, int]) -> SharedMemory | None:
    """The fit to what link and cores reach alone and together. `traffic`: bytes in a unit of each lane's work."""

    def rates(*lanes: str) -> HostRates:
        return HostRates(**{lane: speeds[lanes][lane] * traffic[lane] / 1e9 for lane in lanes})

    alone = HostRates(*(getattr(rates(lane), lane) for lane in HostRates._fields))
    link = rates("h2d", "d2h")
    duplex = min(1.0, link.h2d / alone.h2d, link.d2h / alone.d2h)
    return fit_host_memory(alone, [rates("h2d", "cpu"), rates("d2h", "cpu"), rates(*_DRAM_LANES)], duplex)


def _together(work: dict[str, Work], threads: dict[str, int], device: torch.device) -> dict[str, float]:
    """Units of work a second on each lane while all run: counted from when all have begun to when the first stops."""
    counts: dict[str, list[float]] = {lane: [] for lane in work}
    stop = threading.Event()

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

    workers = [threading.Thread(target=loop, args=(lane,)) for lane in work]
    for worker in workers:
        worker.start()
    while not all(len(stamps) >= 2 for stamps in counts.values()):
        time.sleep(0.005)
    time.sleep(_PAIR_SECONDS)
    while not all(len(stamps) >= 5 for stamps in counts.values()):
        time.sleep(0.005)
    stop.set()
    for worker in workers:
        worker.join()
    begin, end = max(stamps[1] for stamps in counts.values()), min(stamps[-1] for stamps in counts.values())
    speeds = {}
    for lane, stamps in counts.items():
        inside = [stamp for stamp in stamps if begin <= stamp <= end]
        speeds[lane] = (len(inside) - 1) / (inside[-1] - inside[0]) if len(inside) > 1 else (len(stamps) - 2) / (stamps[-1] - stamps[1])
    return speeds


def _matmul(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """FLOP/s of a large square matrix product on random numbers, and the spread, as of the next two."""
    size = 8192 if device.type == "cuda" else 768
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    timed = _timed(lambda: left @ right, device)
    return 2 * size**3 / timed.seconds, timed.spread


def _memory_rate(device: torch.device) -> tuple[float, float]:
    """Bytes read and written a second by a copy inside `device`."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(7)
    target = torch.empty_like(source)
    timed = _timed(lambda: target.copy_(source), device)
    return 2 * size / timed.seconds, timed.spread


def _fixed_costs(device: torch.device) -> FixedCosts:
    """Of launches and events the mean of a thousand, enqueued without waiting; of memory one stretch of new pages."""
    small = torch.zeros(64, device=device)
    cuda, count = device.type == "cuda", 1000

    def enqueue(work: Work) -> int:
        _synchronize(device)
        begin = time.perf_counter_ns()
        for _ in range(count):
            work()
        taken = (time.perf_counter_ns() - begin) // count
        _synchronize(device)
        return taken

    enqueue(lambda: small.add_(1))  # the first is compiled or loaded
    launch, event = enqueue(lambda: small.add_(1)), 0
    if cuda:
        events = iter([torch.cuda.Event(enable_timing=True) for _ in range(count)])
        event = enqueue(lambda: next(events).record())
    memory = HostMemory(registered=cuda)
    size = _TOUCHED_BYTES
    begin = time.perf_counter()
    pages = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    pages.fill_(1)
    touched = time.perf_counter()
    memory.register(pages)
    registered = time.perf_counter()
    memory.close()
    return FixedCosts(
        launch_ns=launch, event_ns=event, first_touch_gb_per_s=size / (touched - begin) / 1e9,
        registration_gb_per_s=size / (registered - touched) / 1e9 if cuda else 0.0,
    )  # fmt: skip


def _adam_rate() -> tuple[float, float]:
    """PyTorch's fused AdamW with everything in fp32, 28 bytes a parameter, told as parameters of 22 bytes: bf16 weights and gradients, fp32 moments.

    Both are bound by memory: on an H200's host 4.9e9/s and 6.2e9/s were measured, 137 and 136 GB/s.
    """
    parameter = torch.zeros(2**25, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    fused = torch.optim.AdamW([parameter], fused=True)
    timed = _timed(fused.step, torch.device("cpu"), repeats=3)
    return parameter.numel() * 28 / 22 / timed.seconds, timed.spread
