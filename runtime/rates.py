"""Rates of the bare machine: copies by size, matrix products, memory, what single calls cost, and how lanes slow each other (`contention.py`)."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from megatrain.runtime.contention import Contention, measure_contention, run_together
from megatrain.runtime.layers.templates import Templates
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.memory.host_memory import HostMemory, map_pages
from megatrain.runtime.repeats import Measured, Work, rounded, spread, synchronize, timed
from megatrain.simulator.hardware import FixedCosts
from megatrain.simulator.schedule import Buffer, Schedule
from megatrain.simulator.specs import DTYPE_BYTES, ModelSpec
from megatrain.simulator.workload import Workload

_COPY_SIZES = tuple(2**power for power in range(16, 29, 2))  # 64 KiB to 256 MiB
_LEAST_DUPLEX = 2**20  # smaller copies are no longer than what it takes to enqueue them
_DUPLEX_UNIT = 2**26  # bytes enqueued at once
_TOUCHED_BYTES = 2**30  # to see what new pages cost
_PIECES = 8  # in which they are touched, and registered
_CALLS, _ROUNDS = 100, 10  # of a launch or an event


@dataclass(frozen=True)
class Rates:
    """What was measured; rates per second."""

    copies: dict[str, list[tuple[int, int]]]
    """`load_weights` and `save_gradients`: (bytes, ns)"""
    duplex: list[tuple[int, int]]
    """(bytes, ns) of a copy while the other direction is as busy; empty without a GPU"""
    contention: Contention
    """of lanes that work at once"""
    matmul_flops: float
    device_bytes_per_s: float
    host_bytes_per_s: float
    thread_bytes_per_s: float
    """copied by one thread, read and written"""
    cpu_adam_per_s: float
    """parameters of a fused AdamW on the host, with bf16 weights and gradients"""
    fixed: FixedCosts
    spread: dict[str, float]
    """where the number will stand: `KIND BYTES` of a copy, or a key of HardwareSpec or CostTable -> interquartile range over median"""


def measure_rates(
    model: ModelSpec, workload: Workload, config: PretrainedConfig, device: torch.device, threads: dict[str, int], host_update: Work
) -> Rates:  # fmt: skip
    """Some 20 s. `model` gives the sizes of the layer that stands for the compute lane, `host_update` is what the cpu lane does beside others."""
    layer, width, cuda = model.stack["0"], DTYPE_BYTES[workload.dtype], device.type == "cuda"
    largest = _COPY_SIZES[-1] if cuda else _COPY_SIZES[-2]
    sizes = {"host.weights:0": largest, "host.gradients:0": largest, "device.weights:0": largest, "device.gradients:0": largest}
    sizes["device.layer:0"] = width * layer.elements
    schedule = Schedule(
        policy="rates", buffers=tuple(Buffer(id=name, bytes=size, data="workspace", dtype="mixed", persistent=True) for name, size in sizes.items()), ops=()
    )
    arenas = Arenas(schedule, device, device_limit_bytes=2**62, host_limit_bytes=2**62)
    own_threads = torch.get_num_threads()
    try:
        for name, size in sizes.items():  # touched, and not zeros: a product of zeros runs 13 % too fast; bytes below 60 keep floats finite
            arenas.flat(name, torch.uint8, size).random_(1, 60)
        torch.set_num_threads(1)
        copies: dict[str, list[tuple[int, int]]] = {}
        spreads: dict[str, float] = {}
        for kind, source, target in (("load_weights", "host.weights:0", "device.weights:0"), ("save_gradients", "device.gradients:0", "host.gradients:0")):
            for size in (size for size in _COPY_SIZES if size <= largest):
                typical, spreads[f"{kind} {size}"] = _time_copy(arenas, source, target, size, largest, device)
                copies.setdefault(kind, []).append((size, round(typical)))
        duplex = []
        for size in (size for size in _COPY_SIZES if cuda and _LEAST_DUPLEX <= size <= largest):
            typical, spreads[f"duplex_curve {size}"] = _time_duplex(arenas, size, largest, threads, device)
            duplex.append((size, round(typical)))
        torch.set_num_threads(threads["compute"])
        templates = Templates(model, workload, config, device)
        contention = measure_contention(templates, arenas, layer, largest, threads, device, host_update)
        host = torch.device("cpu")
        measured = {
            f"peak_tflops.{workload.dtype}": _matmul(templates.dtype, device),
            "device_gb_per_s": _memory_rate(device),
            "host_gb_per_s": _memory_rate(host),
            "cpu_adam_per_s": _adam_rate(),
        }
        fixed, spreads_of_fixed = _fixed_costs(device)
        torch.set_num_threads(1)
        measured["thread_gb_per_s"] = _memory_rate(host)
        spreads |= {name: found.spread for name, found in measured.items()} | contention.spread | spreads_of_fixed
        matmul, device_rate, host_rate, adam, thread_rate = (found.value for found in measured.values())
        return Rates(copies, duplex, contention, matmul, device_rate, host_rate, thread_rate, adam, fixed, spreads)
    finally:
        torch.set_num_threads(own_threads)
        arenas.close()


def _time_copy(arenas: Arenas, source: str, target: str, size: int, largest: int, device: torch.device) -> Measured:
    """ns of one copy of `size` bytes. Source and target move through their buffers, as layers do, so that small copies
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
    return Measured(statistics.median(times[2:]), spread(times[2:]))


def _pairs(arenas: Arenas, source: str, target: str, size: int, largest: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Places to copy from and to."""
    places = range(0, largest - size + 1, size)
    return [(arenas.flat(source, torch.uint8, size, place), arenas.flat(target, torch.uint8, size, place)) for place in places]


def _time_duplex(arenas: Arenas, size: int, largest: int, threads: dict[str, int], device: torch.device) -> Measured:
    """ns of a copy of `size` bytes while copies as large go the other way without a pause; of the slower direction."""
    count = max(_DUPLEX_UNIT // size, 1)

    def work(source: str, target: str) -> Work:
        places = itertools.cycle(_pairs(arenas, source, target, size, largest))

        def copies() -> None:
            for read, write in itertools.islice(places, count):
                write.copy_(read, non_blocking=True)

        return copies

    both = {"h2d": work("host.weights:0", "device.weights:0"), "d2h": work("device.gradients:0", "host.gradients:0")}
    whole, *parts = (1e9 / (count * min(rates)) for rates in zip(*run_together(both, threads, device).values(), strict=True))
    return Measured(whole, spread(parts))


def _matmul(dtype: torch.dtype, device: torch.device) -> Measured:
    """FLOP/s of a large square matrix product on random numbers."""
    size = 8192 if device.type == "cuda" else 768
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return _rate(2 * size**3, timed(lambda: left @ right, device))


def _memory_rate(device: torch.device) -> Measured:
    """Bytes read and written a second by a copy inside `device`."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(7)
    target = torch.empty_like(source)
    return _rate(2 * size, timed(lambda: target.copy_(source), device))


def _adam_rate() -> Measured:
    """PyTorch's fused AdamW with everything in fp32, 28 bytes a parameter, told as parameters of 22 bytes: bf16 weights and gradients, fp32 moments.

    Both are bound by memory: on an H200's host 4.9e9/s and 6.2e9/s were measured, 137 and 136 GB/s.
    """
    parameter = torch.zeros(2**25, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    fused = torch.optim.AdamW([parameter], fused=True)
    return _rate(parameter.numel() * 28 / 22, timed(fused.step, torch.device("cpu"), repeats=3))


def _rate(amount: float, seconds: Measured) -> Measured:
    """Of so much in so long."""
    return Measured(amount / seconds.value, seconds.spread)


def _fixed_costs(device: torch.device) -> tuple[FixedCosts, dict[str, float]]:
    """And their spread. Of launches and events the mean, enqueued without waiting; of memory a stretch of new pages, in pieces."""
    small, cuda = torch.zeros(64, device=device), device.type == "cuda"

    def enqueued(work: Work) -> list[float]:
        """ns a call, by rounds"""
        synchronize(device)
        stamps = [time.perf_counter_ns()]
        for _ in range(_ROUNDS):
            for _ in range(_CALLS):
                work()
            stamps.append(time.perf_counter_ns())
        synchronize(device)
        return [(end - begin) / _CALLS for begin, end in itertools.pairwise(stamps)]

    def piecewise(work: Callable[[torch.Tensor], object]) -> list[float]:
        """GB/s, by pieces"""
        rates = []
        for piece in pieces:
            begin = time.perf_counter()
            work(piece)
            rates.append(piece.nbytes / (time.perf_counter() - begin) / 1e9)
        return rates

    enqueued(lambda: small.add_(1))  # the first is compiled or loaded
    launches, recorded = enqueued(lambda: small.add_(1)), [0.0]
    if cuda:
        events = iter([torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS * _CALLS)])
        recorded = enqueued(lambda: next(events).record())
    pieces = torch.frombuffer(map_pages(_TOUCHED_BYTES), dtype=torch.uint8).chunk(_PIECES)
    memory = HostMemory(registered=cuda)
    touched = piecewise(lambda piece: piece.fill_(1))
    registered = piecewise(memory.register) if cuda else [0.0]
    memory.close()
    rounds = {"launch_ns": launches, "event_ns": recorded, "first_touch_gb_per_s": touched, "registration_gb_per_s": registered}
    fixed = FixedCosts(
        launch_ns=round(statistics.mean(launches)), event_ns=round(statistics.mean(recorded)), first_touch_gb_per_s=rounded(statistics.harmonic_mean(touched)),
        registration_gb_per_s=rounded(statistics.harmonic_mean(registered)),
    )  # fmt: skip
    return fixed, {f"fixed.{name}": spread(found) for name, found in rounds.items() if len(found) > 1}
