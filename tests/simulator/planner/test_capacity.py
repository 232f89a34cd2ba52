"""Tests of the largest batch that fits, on machines whose host memory is too small for all state.

Some state is then resident on the device and needs no slots. The gradient of the vocabulary is
moved first, because its slot is as large, or all weights and gradients in the last case. The host
may hold only some of the checkpoints.
"""

from __future__ import annotations

import msgspec
import pytest

from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import assess
from megatrain.simulator.planner.capacity import MemoryFootprint, largest_batch, usable
from megatrain.simulator.schedule.plan import Plan

pytestmark = pytest.mark.usefixtures("without_libraries")

CASES = (
    (
        "olmoe-1b-7b",
        "gb200",
        Workload(batch=2, sequence=4096, accumulation=2, loss_chunk=4096),
        (147773718528, 119990648832),  # bytes of the GPU and of the host
        96,
    ),
    (
        "llama-3.2-1b",
        "a100-40",
        Workload(
            batch=8, sequence=2048, accumulation=3, dtype="fp32", clipping="layer", loss_chunk=256
        ),
        (42305427865, 13743895347),
        42,
    ),
    (
        "qwen2.5-0.5b",
        "h200",
        Workload(batch=1, sequence=256, loss_chunk=256),
        (107667259392, 34359738368),
        4086,
    ),
    (
        "qwen3-4b",
        "h200",
        Workload(batch=1, sequence=512, accumulation=4, loss_chunk=1024),
        (35889086464, 34359738368),
        22,  # with a checkpoint interval above 1, otherwise 14
    ),
    # Few bytes more than needed have to move, so the low halves of some layers move last.
    (
        "qwen2.5-7b",
        "h200",
        Workload(batch=1, sequence=512, loss_chunk=4096),
        (143556345856, 42949672960),
        296,
    ),
)


@pytest.mark.parametrize(
    ("name", "machine", "work", "limits", "most"), CASES, ids=[case[0] for case in CASES]
)
def test_the_largest_batch_that_fits(
    name: str, machine: str, work: Workload, limits: tuple[int, int], most: int
) -> None:
    model, hardware = ModelSpec.load(name), HardwareSpec.load(machine)
    plan = Plan(
        policy="overlapped",
        hardware=hardware.name,
        source=model.name,
        model=model,
        workload=work,
        device_limit_bytes=limits[0],
        host_limit_bytes=limits[1],
    )
    costs = cost_model(hardware, model, work)
    assert largest_batch(list(usable(plan, hardware, costs, ["overlapped"])), work) == most
    wide = msgspec.structs.replace(plan, workload=msgspec.structs.replace(work, batch=most))
    fitting = [
        footprint
        for footprint in usable(wide, hardware, costs, ["overlapped"])
        if footprint.account().fits
    ]
    assert fitting
    for footprint in fitting:
        assert assess(footprint.placed(), costs).feasible


@pytest.mark.parametrize(("name", "machine", "work", "limits", "most"), CASES[:2])
def test_whether_a_workload_fits_is_known_before_state_is_moved(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    machine: str,
    work: Workload,
    limits: tuple[int, int],
    most: int,
) -> None:
    model, hardware = ModelSpec.load(name), HardwareSpec.load(machine)
    plan = Plan(
        policy="overlapped",
        hardware=hardware.name,
        source=name,
        model=model,
        workload=work,
        device_limit_bytes=limits[0],
        host_limit_bytes=limits[1],
    )
    footprints = list(usable(plan, hardware, cost_model(hardware, model, work), ["overlapped"]))
    found = set[bool]()
    for footprint in footprints:
        for batch in (1, most // 2, most - 1, most, most + 1):
            wide = msgspec.structs.replace(work, batch=batch)
            for limit in (None, hardware.host_bytes):
                fits = footprint.account(wide, limit).fits
                assert footprint.fits(wide, limit) == fits
                found.add(fits)
    assert found == {False, True}
    moved: list[object] = []
    monkeypatch.setattr(MemoryFootprint, "_moved", lambda *arguments: moved.append(arguments))
    huge = msgspec.structs.replace(work, batch=100 * most)
    assert not any(footprint.fits(huge) for footprint in footprints)
    assert not moved
