"""Tests of the outlook: it agrees with the search, and takes less time."""

from __future__ import annotations

import msgspec
import pytest

from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import Account
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import Choice
from megatrain.simulator.planner.outlook import outlook
from megatrain.simulator.planner.search import candidates


def _bytes(choice: Choice) -> Account:
    return msgspec.structs.replace(choice.account, advice="")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("state", ["exact", "bf16-sr"])
@pytest.mark.parametrize(
    ("machine", "device", "host"),
    [
        ("rtx4090", None, None),
        ("rtx4090", 2**30, None),
        ("rtx4090", None, 2**32),
        ("rtx4090", 2**30, 2**32),
        ("dgx-spark", None, None),
        ("dgx-spark", 2**32, None),
    ],
)
def test_the_outlook_is_that_of_the_search(
    machine: str, device: int | None, host: int | None, state: str, accumulation: int
) -> None:
    model, hardware = ModelSpec.load("qwen2.5-0.5b"), HardwareSpec.load(machine)
    work = Workload(batch=2, sequence=512, accumulation=accumulation, state=state)
    limits = {"device_limit": device, "host_limit": host}
    expected, found = (
        candidates(model, hardware, work, **limits)[0],
        outlook(model, hardware, work, **limits),
    )
    assert found is not None
    assert found.feasible == expected.feasible
    assert found.step_seconds <= expected.step_seconds
    if not expected.feasible:
        assert _bytes(found) == _bytes(expected)
        assert found.plan == msgspec.structs.replace(expected.plan, digest="", prediction=None)


def test_policies_of_other_systems_have_no_outlook() -> None:
    model, hardware = ModelSpec.load("qwen2.5-0.5b"), HardwareSpec.load("rtx4090")
    work = Workload(batch=1, sequence=256)
    assert outlook(model, hardware, work, policies=["zero3_offload"]) is None


def test_the_outlook_allows_a_plan_that_fits_only_in_groups_of_micro_batches() -> None:
    """Without clipping, a group of all micro-batches stores no sums of gradients on the host."""
    model, hardware = ModelSpec.load("phi-2"), HardwareSpec.load("rtx4090")
    work = Workload(batch=1, sequence=2048, accumulation=2, clipping="none", state="master24")
    device, host = 13_461_703_309, 8_825_736_090
    single = outlook(
        model,
        hardware,
        msgspec.structs.replace(work, clipping="global"),
        device_limit=device,
        host_limit=host,
    )
    assert single is not None
    assert not single.feasible
    assert candidates(model, hardware, work, device_limit=device, host_limit=host)[0].feasible
    grouped = outlook(model, hardware, work, device_limit=device, host_limit=host)
    assert grouped is None or grouped.feasible
