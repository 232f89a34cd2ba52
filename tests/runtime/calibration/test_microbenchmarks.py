"""Tests of the rates that calibration measures: what runs, on how many threads, and that a rate is
the amount of work divided by its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from clock import Clock
from torch.utils.flop_counter import FlopCounterMode

from megatrain.runtime.calibration import microbenchmarks as module
from megatrain.runtime.calibration.contention import Contention
from megatrain.runtime.calibration.link import LinkRates
from megatrain.runtime.calibration.timing import TimedRate, Work
from megatrain.runtime.layers.functional_layers import config_of
from megatrain.simulator.hardware.cost_table import FixedCosts
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.schedule import LANES
from megatrain.simulator.schedule.plan import Plan

CPU = torch.device("cpu")


@pytest.fixture
def half_a_second(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Makes any function take half a second. Returns the functions that were timed."""
    timed: list[Work] = []

    def half(work: Work, *_: object, **__: object) -> TimedRate:
        timed.append(work)
        return TimedRate(0.5, 0.25)

    monkeypatch.setattr(module, "time_repeatedly", half)
    return timed


def test_a_product_has_a_multiplication_and_an_addition_for_each_pair(
    half_a_second: list[Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(module._MATRIX_ROWS, "cpu", 32)
    found = module._matmul(torch.float32, CPU)
    with FlopCounterMode(display=False) as counted:
        half_a_second[-1]()
    assert found == (2 * counted.get_total_flops(), 0.25)
    assert module._fp8_matmul("tensor", CPU) == found


def test_a_copy_in_memory_reads_and_writes_every_byte(half_a_second: list[Work]) -> None:
    found, copied = module._memory_rate(CPU), Clock({torch.ops.aten.copy_.default: torch.numel})
    begin = copied.now
    with copied:
        half_a_second[-1]()
    assert found == (2 * 2 * (copied.now - begin), 0.25)


def test_the_rate_of_adam_is_that_of_bf16_weights_and_gradients(half_a_second: list[Work]) -> None:
    """It is measured in fp32, with 28 bytes per parameter instead of 22."""
    found = module._adam_rate()
    (group,) = half_a_second[-1].__self__.param_groups
    assert group["fused"]
    count = sum(parameter.numel() for parameter in group["params"])
    assert all(parameter.grad is not None for parameter in group["params"])
    assert found == (pytest.approx(2 * count * 28 / 22), 0.25)


def test_launches_and_new_memory_cost_what_their_calls_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first call is left out, because it also loads the kernel. So is the first backward pass.
    Memory is touched at 4 bytes per ns.
    """
    launches, products = iter([10**6]), iter([10**6] * 200)
    clock = Clock(
        {
            torch.ops.aten.add_.Tensor: lambda _: next(launches, 7),
            torch.ops.aten.mul.Tensor: lambda _: next(products, 9),
            torch.ops.aten.fill_.Scalar: lambda memory: memory.nbytes // 4,
        }
    )
    clock.install(monkeypatch, module)
    monkeypatch.setattr(module, "_TOUCHED_BYTES", 2**16)
    with clock:
        found, spreads = module._fixed_costs(CPU)
    assert found == FixedCosts(
        launch_ns=7,
        backward_call_ns=9,
        event_ns=0,
        first_touch_gb_per_s=4.0,
        registration_gb_per_s=0.0,
    )
    names = ("launch_ns", "backward_call_ns", "first_touch_gb_per_s")
    assert spreads == {f"fixed.{name}": 0.0 for name in names}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("fp8", [None, "tensorwise"])
def test_each_rate_is_measured_on_the_threads_that_it_has_in_a_step(
    executable: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, fp8: Any
) -> None:
    """A thread's share of the host's DRAM is measured on one thread, and compute on those of its
    lane.
    """
    used: list[tuple[str, int]] = []
    numbers = iter(range(1, 20))

    def measured(name: str, result: Callable[[], Any]) -> None:
        monkeypatch.setattr(
            module, name, lambda *_: (used.append((name, torch.get_num_threads())), result())[1]
        )

    def rate() -> TimedRate:
        return TimedRate(float(next(numbers)), 0.5)

    for name in ("_matmul", "_fp8_matmul", "_memory_rate", "_adam_rate"):
        measured(name, rate)
    fixed = FixedCosts(launch_ns=1, event_ns=0, first_touch_gb_per_s=1.0, registration_gb_per_s=0.0)
    measured("_fixed_costs", lambda: (fixed, {"fixed.launch_ns": 0.1}))
    contention = Contention({}, None, {"contention.h2d.cpu": 0.2})
    measured("measure_contention", lambda: contention)
    monkeypatch.setattr(module, "largest_copy", lambda _: 2**12)
    link = LinkRates({"load_weights": [(2**10, 1)]}, [], [], {"load_weights 1024": 0.4})
    plan = executable()
    workload = Workload(batch=1, sequence=8, dtype="bf16", fp8=fp8)
    found = module.measure_rates(
        plan.model,
        workload,
        config_of(plan.model),
        CPU,
        {**dict.fromkeys(LANES, 2), "compute": 3},
        lambda: None,
        link,
    )
    more = ["_fp8_matmul"] if fp8 else []
    assert used == [
        *[
            (name, 3)
            for name in (
                "measure_contention",
                "_matmul",
                *more,
                "_memory_rate",
                "_memory_rate",
                "_adam_rate",
                "_fixed_costs",
            )
        ],
        ("_memory_rate", 1),
    ]
    assert torch.get_num_threads() == 4
    assert found.link == link
    assert (found.matmul_flops, found.fp8_flops) == (1, 2 if fp8 else 0)
    assert [
        found.device_bytes_per_s,
        found.host_bytes_per_s,
        found.cpu_adam_per_s,
        found.thread_bytes_per_s,
    ] == [2 + len(more) + number for number in range(4)]
    rates = ("peak_tflops.bf16", "device_gb_per_s", "host_gb_per_s", "thread_gb_per_s")
    rates += ("cpu_adam_per_s", *(["peak_tflops.fp8"] if fp8 else []))
    assert found.spread == {
        **dict.fromkeys(rates, 0.5),
        "load_weights 1024": 0.4,
        "fixed.launch_ns": 0.1,
        "contention.h2d.cpu": 0.2,
    }
