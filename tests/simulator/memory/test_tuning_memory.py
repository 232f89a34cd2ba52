"""Host memory that the compiler takes while it tunes kernels, compared with stored runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.simulator import policies
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.memory.account import TUNING
from megatrain.simulator.memory.formulas import tuning_bytes
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.assessment import plan_account
from megatrain.simulator.schedule.plan import Plan

GIB = 2**30
PROCESS = 1.7 * GIB
"""Host memory of a process besides its pools, on an H200 and an H100."""
RESULTS = Path(__file__).parents[3] / "experiments" / "results"
LONG = ("h100-qwen2.5-7b-calibrated/l131", "h200-long-context/m14", "h200-long-context/l262")


def measured(name: str) -> tuple[Plan, int]:
    """Returns a stored plan and the peak of the process's host memory while it ran, in bytes."""
    (system,) = json.loads((RESULTS / f"{name}.json").read_text())["systems"]
    return Plan.load(RESULTS / f"{name}.plan.toml"), system["host_peak_bytes"]


@pytest.mark.parametrize("name", LONG)
def test_long_contexts_take_the_pools_the_process_and_a_copy_rounded_up(name: str) -> None:
    """The measured peak is that of the host pools, the process and `tuning_bytes`, within 1 %."""
    plan, peak = measured(name)
    pools = sum(
        buffer.allocated for buffer in policies.lower(plan).buffers if buffer.place == "host"
    )
    expected = pools + PROCESS + tuning_bytes(plan.model, plan.workload)
    assert peak == pytest.approx(expected, rel=0.01)
    assert peak > 1.01 * (pools + PROCESS)


def test_a_plan_s_host_memory_includes_it() -> None:
    plan, _ = measured(LONG[0])
    costs = cost_model(HardwareSpec.load("h100-sxm"), plan.model, plan.workload)
    account = plan_account(plan, policies.lower(plan), costs)
    assert account.pools[TUNING] == 8 * GIB
    host = sum(size for pool, size in account.pools.items() if pool.startswith("host."))
    assert account.host_peak_bytes == host


@pytest.mark.parametrize(
    ("model", "size"), [("qwen2.5-7b", 2048 * 18_944 * 2), ("qwen3-30b-a3b", 2048 * 8 * 768 * 2)]
)
def test_the_copy_has_the_width_of_the_mlp_and_the_tokens_of_a_piece(model: str, size: int) -> None:
    spec = ModelSpec.load(model)
    rounded = 1 << (size - 1).bit_length()
    work = Workload(batch=2, sequence=1024, compiled=True)
    assert tuning_bytes(spec, work) == rounded
    pieces = Workload(batch=1, sequence=65_536, compiled=True, token_piece=2048)
    assert tuning_bytes(spec, pieces) == rounded
    assert tuning_bytes(spec, Workload(batch=2, sequence=1024)) == 0
