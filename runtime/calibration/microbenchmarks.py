"""Measures rates that do not depend on a model: matrix products, memory, kernel launches, and how
much lanes slow each other (`contention.py`).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from megatrain.runtime.calibration.contention import Contention, copy_buffers, measure_contention
from megatrain.runtime.calibration.link import LinkRates, largest_copy
from megatrain.runtime.calibration.timing import (
    TimedRate,
    Work,
    rounded,
    spread,
    synchronize,
    time_repeatedly,
)
from megatrain.runtime.layers.fp8_linear import E4M3, multiply, quantise, rows
from megatrain.runtime.layers.functional_layers import FunctionalLayers
from megatrain.runtime.memory.arenas import Arenas
from megatrain.runtime.memory.host_memory import HostMemory, map_pages
from megatrain.simulator.hardware.cost_table import FixedCosts
from megatrain.simulator.model.layer import DTYPE_BYTES
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Scaling, Workload

_TOUCHED_BYTES = 2**30
"""Bytes of the new host memory that is touched and registered."""
_PIECES = 8
"""Number of pieces in which this memory is touched and registered."""
_MATRIX_ROWS = {"cuda": 8192, "cpu": 768}
"""Type of device -> the rows of a square matrix product."""
_CALLS, _ROUNDS = 100, 20
"""Number of calls in a round and number of rounds, for launches, autograd's calls and events."""


@dataclass(frozen=True)
class MeasuredRates:
    """The measured rates, per second."""

    link: LinkRates
    """Copies between host and device."""
    contention: Contention
    """How much lanes slow each other."""
    matmul_flops: float
    """FLOP/s of a matrix product in the dtype of the workload."""
    device_bytes_per_s: float
    """Bytes read and written per second by a copy in device memory."""
    host_bytes_per_s: float
    """Bytes read and written per second by a copy in host memory, on all threads."""
    thread_bytes_per_s: float
    """Bytes read and written per second by a copy in host memory, on one thread."""
    cpu_adam_per_s: float
    """Parameters per second of a fused AdamW on the CPU, with bf16 weights and gradients."""
    fixed: FixedCosts
    """Costs of kernel launches, events and new host memory."""
    spread: dict[str, float]
    """Interquartile range divided by the median, for each measurement. Keys are those of
    `LinkRates.spread`, and otherwise the field of HardwareSpec or CostTable."""
    fp8_flops: float
    """FLOP/s of a matrix product in fp8, without its casts, or 0 if the workload does not use
    fp8."""


def measure_rates(
    model: ModelSpec,
    workload: Workload,
    config: PretrainedConfig,
    device: torch.device,
    threads: dict[str, int],
    host_update: Work,
    link: LinkRates,
) -> MeasuredRates:
    """Measures all rates, which takes about 15 s.

    Args:
        model: The model whose decoder layer 0 is the work of the compute lane.
        workload: The workload of this layer.
        config: The transformers configuration of the model.
        device: The device to measure.
        threads: Lane -> the number of threads that its ops may use.
        host_update: The work of the cpu lane while other lanes are busy.
        link: What was measured of the link.
    """
    layer, largest = model.stack["0"], largest_copy(device)
    schedule = copy_buffers(largest, layer=DTYPE_BYTES[workload.dtype] * layer.elements)
    arenas = Arenas(schedule, device, device_limit_bytes=2**62, host_limit_bytes=2**62)
    own_threads = torch.get_num_threads()
    try:
        # Bytes from 1 to 59 make finite floats. With zeros, matrix products run 13 % too fast.
        for buffer in schedule.buffers:
            arenas.flat(buffer.id, torch.uint8, buffer.bytes).random_(1, 60)
        torch.set_num_threads(threads["compute"])
        functional_layers = FunctionalLayers(model, workload, config, device)
        contention = measure_contention(
            functional_layers, arenas, layer, largest, threads, device, host_update, link.shares
        )
        host = torch.device("cpu")
        measured = {
            f"peak_tflops.{workload.dtype}": _matmul(functional_layers.dtype, device),
            **({"peak_tflops.fp8": _fp8_matmul(workload.fp8, device)} if workload.fp8 else {}),
            "device_gb_per_s": _memory_rate(device),
            "host_gb_per_s": _memory_rate(host),
            "cpu_adam_per_s": _adam_rate(),
        }
        fixed, spreads_of_fixed = _fixed_costs(device)
        torch.set_num_threads(1)
        measured["thread_gb_per_s"] = _memory_rate(host)
        spreads = (
            link.spread
            | {name: result.spread for name, result in measured.items()}
            | contention.spread
            | spreads_of_fixed
        )
        fp8 = measured.get("peak_tflops.fp8")
        return MeasuredRates(
            link,
            contention,
            measured[f"peak_tflops.{workload.dtype}"].value,
            measured["device_gb_per_s"].value,
            measured["host_gb_per_s"].value,
            measured["thread_gb_per_s"].value,
            measured["cpu_adam_per_s"].value,
            fixed,
            spreads,
            fp8.value if fp8 else 0.0,
        )
    finally:
        torch.set_num_threads(own_threads)
        arenas.close()


def _matmul(dtype: torch.dtype, device: torch.device) -> TimedRate:
    """Returns the FLOP/s of a large square matrix product of random numbers."""
    size = _MATRIX_ROWS[device.type]
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return _rate(2 * size**3, time_repeatedly(lambda: left @ right, device))


def _fp8_matmul(scaling: Scaling, device: torch.device) -> TimedRate:
    """Returns the FLOP/s of a large square product of random numbers in fp8, without the casts."""
    size = _MATRIX_ROWS[device.type]
    both = [torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2)]
    (left, s), (right, t) = (quantise(matrix, E4M3, rows(scaling)) for matrix in both)
    return _rate(2 * size**3, time_repeatedly(lambda: multiply(left, right, s, t), device))


def _memory_rate(device: torch.device) -> TimedRate:
    """Returns the bytes read and written per second by a copy inside the memory of `device`."""
    size = 2**30 if device.type == "cuda" else 2**27
    source = torch.empty(size, dtype=torch.uint8, device=device).fill_(7)
    target = torch.empty_like(source)
    return _rate(2 * size, time_repeatedly(lambda: target.copy_(source), device))


def _adam_rate() -> TimedRate:
    """Returns the parameters per second of PyTorch's fused AdamW on the CPU, for bf16 weights and
    gradients and fp32 moments.

    Everything is measured in fp32, which moves 28 bytes per parameter, and converted to 22 bytes
    per parameter. This is valid because both are limited by memory bandwidth: on an H200's host,
    they reached 137 and 136 GB/s.
    """
    parameter = torch.zeros(2**25, requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    fused = torch.optim.AdamW([parameter], fused=True)
    return _rate(
        parameter.numel() * 28 / 22, time_repeatedly(fused.step, torch.device("cpu"), repeats=3)
    )


def _rate(amount: float, seconds: TimedRate) -> TimedRate:
    """Returns `amount` divided by `seconds`, with the same spread."""
    return TimedRate(amount / seconds.value, seconds.spread)


def _fixed_costs(device: torch.device) -> tuple[FixedCosts, dict[str, float]]:
    """Returns the fixed costs, and the spread of each by its field.

    The time of a launch, of a function that autograd calls, or of an event is the mean over calls
    that are enqueued without waiting. Host memory is timed on new pages, in pieces.
    """
    small, cuda = torch.zeros(64, device=device), device.type == "cuda"

    def enqueued(work: Work) -> list[float]:
        """Returns the ns per call, for each round."""
        stamps = [time.perf_counter_ns()]
        for _ in range(_ROUNDS):
            for _ in range(_CALLS):
                work()
            stamps.append(time.perf_counter_ns())
        synchronize(device)
        return [(end - begin) / _CALLS for begin, end in itertools.pairwise(stamps)]

    def by_autograd() -> list[float]:
        """Returns the ns per function that autograd calls in a backward pass, for each round."""
        leaf, times = torch.ones(64, device=device, requires_grad=True), []
        for _ in range(1 + _ROUNDS):
            result = leaf
            for _ in range(_CALLS):
                result = result * 1.0
            begin = time.perf_counter_ns()
            torch.autograd.grad(result, leaf, small)
            times.append((time.perf_counter_ns() - begin) / _CALLS)
            synchronize(device)
        return times[1:]

    def piecewise(work: Callable[[torch.Tensor], object]) -> list[float]:
        """Returns the GB/s of `work` on each piece of the new memory."""
        rates = []
        for piece in pieces:
            begin = time.perf_counter()
            work(piece)
            rates.append(piece.nbytes / (time.perf_counter() - begin) / 1e9)
        return rates

    enqueued(lambda: small.add_(1))  # loads the kernel
    launches, recorded = enqueued(lambda: small.add_(1)), [0.0]
    if cuda:
        events = iter([torch.cuda.Event(enable_timing=True) for _ in range(_ROUNDS * _CALLS)])
        recorded = enqueued(lambda: next(events).record())
    pieces = torch.frombuffer(map_pages(_TOUCHED_BYTES), dtype=torch.uint8).chunk(_PIECES)
    memory = HostMemory(registered=cuda)
    touched = piecewise(lambda piece: piece.fill_(1))
    registered = piecewise(memory.register) if cuda else [0.0]
    memory.close()
    rounds = {
        "launch_ns": launches,
        "backward_call_ns": (called := by_autograd()),
        "event_ns": recorded,
        "first_touch_gb_per_s": touched,
        "registration_gb_per_s": registered,
    }
    fixed = FixedCosts(
        launch_ns=round(statistics.mean(launches)),
        backward_call_ns=round(statistics.mean(called)),
        event_ns=round(statistics.mean(recorded)),
        first_touch_gb_per_s=rounded(statistics.harmonic_mean(touched)),
        registration_gb_per_s=rounded(statistics.harmonic_mean(registered)),
    )
    return fixed, {
        f"fixed.{name}": spread(values) for name, values in rounds.items() if len(values) > 1
    }
