"""Tests of ops that sum gradients, on a machine that measured larger micro-batches."""

from __future__ import annotations

from pathlib import Path

from megatrain.simulator import policies
from megatrain.simulator.costs import cost_model
from megatrain.simulator.hardware.machine import HardwareSpec
from megatrain.simulator.model.specs import ModelSpec
from megatrain.simulator.model.workload import Workload
from megatrain.simulator.planner.search import plans_of

RESULTS = Path(__file__).parents[3] / "experiments" / "results"


def test_no_op_takes_a_negative_time() -> None:
    """The embedding's backward is scaled to few tokens, and its sum moves fewer bytes."""
    hardware = HardwareSpec.load(str(RESULTS / "h200-qwen2.5-3b" / "hardware.toml"))
    model = ModelSpec.load("qwen2.5-3b")
    work = Workload(batch=1, sequence=2048, accumulation=4, clipping="none")
    costs = cost_model(hardware, model, work)
    for plan in plans_of(model, hardware, work):
        assert all(costs.duration_ns(op) >= 0 for op in policies.lower(plan).ops), plan.policy
