"""Tests of the measurements of the link: what is copied, and what becomes of several moments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from clock import Clock

from megatrain.runtime.calibration import contention
from megatrain.runtime.calibration import link as module
from megatrain.runtime.calibration.timing import Work, spread
from megatrain.runtime.memory.host_memory import HostMemory
from megatrain.runtime.memory.reusable_pinned_pool import ReusablePinnedPool
from megatrain.simulator.schedule import LANES

CPU = torch.device("cpu")


@pytest.fixture
def storage() -> dict[str, torch.Tensor]:
    drawn = torch.arange(64, dtype=torch.uint8)
    return {"here": drawn, "there": torch.zeros_like(drawn)}


def test_copies_are_at_all_places_and_timed_after_two(
    storage: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of one place only would come from a cache."""
    durations = iter([1000, 500, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    clock = Clock({torch.ops.aten.copy_.default: lambda _: next(durations)})
    clock.install(monkeypatch, module)
    arenas: Any = SimpleNamespace(
        flat=lambda name, _, count, place: storage[name][place : place + count]
    )
    with clock:
        found = module._time_copies(arenas, "here", "there", 8, 64, CPU)
    assert found == list(range(1, 11))
    assert not list(durations)
    assert storage["there"].equal(storage["here"])


def test_a_copy_in_both_directions_takes_as_long_as_the_slower(
    storage: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit of work is four copies here. Only a GPU copies in both directions."""
    names = ("host.weights:0", "device.weights:0", "device.gradients:0", "host.gradients:0")
    memory = {name: storage["there"].clone() for name in names}
    for source in names[::2]:
        memory[source].copy_(storage["here"])
    arenas: Any = SimpleNamespace(
        flat=lambda name, _, count, place: memory[name][place : place + count]
    )

    def together(both: dict[str, Work], *_: object) -> dict[str, tuple[float, ...]]:
        for _ in range(2):
            for work in both.values():
                work()
        return {"h2d": (2.0, 4.0, 5.0), "d2h": (1.0, 5.0, 2.5)}

    monkeypatch.setattr(module, "_DUPLEX_UNIT", 32)
    monkeypatch.setattr(module, "run_together", together)
    found = module._time_duplex(arenas, 8, 64, {}, CPU)
    assert found == (1e9 / 4, 1e9 / 16, 1e9 / 10)
    assert all(tensor.equal(storage["here"]) for tensor in memory.values())


def test_the_result_is_the_median_of_all_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is four times as slow at one of three moments, as it may be on a shared host."""
    slow = iter([1, 4, 1])
    moment = [0]
    measured: list[tuple[int, HostMemory]] = []

    class Buffers:
        """What stands for the memory that is copied."""

        def __init__(self, *_: object, host_memory: HostMemory, **__: object) -> None:
            moment[0] = next(slow)
            measured.append((torch.get_num_threads(), host_memory))

        def flat(self, *_: object) -> torch.Tensor:
            return torch.empty(0, dtype=torch.uint8)

        def close(self) -> None:
            moment[0] = 0

    def shares(work: dict[str, Work], combinations: object, *_: object) -> contention.Shares:
        assert list(work) == ["h2d", "d2h", "cpu"]
        assert combinations == [("h2d", "d2h"), ("h2d", "cpu"), ("d2h", "cpu"), tuple(work)]
        return {("h2d", "d2h"): (1 / moment[0],)}

    gpu: Any = SimpleNamespace(type="cuda")
    monkeypatch.setattr(module, "COPY_SIZES", (2**16, 2**20, 2**22))
    monkeypatch.setattr(module, "Arenas", Buffers)
    monkeypatch.setattr(module, "copy_work", lambda *_: dict.fromkeys(("h2d", "d2h")))
    monkeypatch.setattr(module, "measure_shares", shares)
    monkeypatch.setattr(module, "_time_copies", lambda *given: [moment[0] * given[3] // 2**10] * 2)
    monkeypatch.setattr(
        module,
        "_time_duplex",
        lambda _, size, *__: tuple(moment[0] * size / 512 * part for part in (1, 0.5, 2)),
    )
    memory, threads = ReusablePinnedPool(registered=False), torch.get_num_threads()
    bench = module.LinkBench(gpu, dict.fromkeys(LANES, 1), lambda: None, memory)
    for _ in range(3):
        bench.measure()
    assert measured == [(threads, memory)] * 3
    found = bench.rates()
    points = [(2**16, 2**6), (2**20, 2**10), (2**22, 2**12)]
    assert found.copies == {"load_weights": points, "save_gradients": points}
    assert found.duplex == [(2**20, 2**11), (2**22, 2**13)], "64 KiB is too small for both"
    assert found.shares == [
        {("h2d", "d2h"): (1.0,)},
        {("h2d", "d2h"): (0.25,)},
        {("h2d", "d2h"): (1.0,)},
    ]
    assert found.spread == dict.fromkeys(
        [f"{kind} {size}" for kind in found.copies for size in (2**16, 2**20, 2**22)],
        spread([1, 1, 4, 4, 1, 1]),
    ) | dict.fromkeys(
        [f"duplex_curve {size}" for size in (2**20, 2**22)], spread([0.5, 2, 2, 8, 0.5, 2])
    )


def test_the_link_of_a_cpu_is_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same code copies real memory. Memory and threads are as before afterwards."""
    monkeypatch.setattr(contention, "_WINDOW_SECONDS", 0.01)
    monkeypatch.setattr(module, "COPY_SIZES", (2**10, 2**12, 2**14))
    memory, threads = ReusablePinnedPool(registered=False), torch.get_num_threads()
    bench = module.LinkBench(CPU, dict.fromkeys(LANES, 1), lambda: None, memory)
    for _ in range(2):
        bench.measure()
    assert (sum(memory._used), torch.get_num_threads()) == (0, threads)
    found = bench.rates()
    assert found.copies.keys() == contention.COPIES.keys()
    assert [size for size, _ in found.copies["load_weights"]] == [2**10, 2**12]
    assert found.duplex == [], "only a GPU copies in both directions"
    lanes = {("h2d", "d2h"), ("h2d", "cpu"), ("d2h", "cpu")}
    both = lanes | {(other, lane) for lane, other in lanes}
    assert [shares.keys() for shares in found.shares] == [both, both]
    memory.free()
