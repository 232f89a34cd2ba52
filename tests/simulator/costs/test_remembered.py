"""Tests of the cost model that is asked once for each size of op."""

from __future__ import annotations

import pytest

from megatrain.simulator import HardwareSpec, ModelSpec, Workload, policies
from megatrain.simulator.costs import Replayed, cost_model
from megatrain.simulator.costs.protocol import ContendedCosts
from megatrain.simulator.costs.remembered import Remembered, costs_sizes
from megatrain.simulator.costs.scaled import ScaledCosts
from megatrain.simulator.engine.evaluator import evaluate
from megatrain.simulator.planner.assessment import InShortGroups
from megatrain.simulator.planner.search import plans_of

MODEL, HARDWARE = ModelSpec.load("gemma-3-1b").with_layers(8), HardwareSpec.load("h200")


@pytest.mark.parametrize("accumulation", [1, 4])
def test_remembered_costs_are_those_of_the_cost_model(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans that stream and update different layers share the remembered costs."""
    work = Workload(batch=2, sequence=1024, accumulation=accumulation)
    plain = cost_model(HARDWARE, MODEL, work)
    costs = plain if accumulation == 1 else InShortGroups(plain, accumulation)
    remembered = Remembered(costs)
    sizes = set()
    for name in ("overlapped", "k_buffer"):
        (plan,) = plans_of(MODEL, HARDWARE, work, policies=[name])
        for op in policies.lower(plan).ops:
            assert remembered.duration_ns(op) == costs.duration_ns(op)
            assert remembered.demand(op) == costs.demand(op)
            sizes.add(op.size)
    # From now on, nothing is asked again.
    monkeypatch.setattr(type(plain), "duration_ns", None)
    assert {op.size for op in policies.lower(plan).ops} <= sizes
    assert all(remembered.duration_ns(op) >= 0 for op in policies.lower(plan).ops)


def test_costs_of_single_ops_are_not_remembered() -> None:
    """A replayed run has a duration for each op, so ops of one size differ."""
    work = Workload(batch=2, sequence=1024)
    (plan,) = plans_of(MODEL, HARDWARE, work, policies=["overlapped"])
    costs = cost_model(HARDWARE, MODEL, work)
    replayed = Replayed(evaluate(policies.lower(plan), costs))
    assert isinstance(costs, ContendedCosts)
    assert costs_sizes(costs)
    assert costs_sizes(ScaledCosts(costs, lambda op: op))
    assert not costs_sizes(replayed)
    assert not costs_sizes(ScaledCosts(replayed, lambda op: op))
